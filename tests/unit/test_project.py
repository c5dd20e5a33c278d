"""The shape of the project: public names, who imports whom, what import costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import llamabatch
from llamabatch.policies import POLICIES, STRATEGIES

PACKAGE = Path(llamabatch.__file__).parent


def imports(path: Path) -> set[str]:
    """Modules that a file names in any import, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_public_names():
    assert llamabatch.__all__ == sorted(llamabatch.__all__, key=lambda n: (not n.isupper(), n.startswith("_"), n))
    assert all(hasattr(llamabatch, name) for name in llamabatch.__all__)


def test_only_the_llama_room_and_the_baseline_touch_llama_cpp():
    touching = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "llama_cpp" in top_level(p)}
    assert {name for name in touching if not name.startswith("llama/")} <= {"compare/baseline.py"}


def test_the_scheduling_rooms_are_pure():
    for name in (
        "scheduler",
        "step",
        "policies",
        "slots",
        "prefix",
        "cells",
        "affinity",
        "sharing",
        "prefix_file",
        "waiting",
        "packing",
        "speculation",
        "lookup",
        "turns",
        "compaction",
        "precedence",
        "deadlines",
        "watch",
        "ticket",
        "ledger",
        "loaded",
        "known",
        "finish_reason",
        "restarts",
        "adapters",
        "adapter_turns",
        "embed_queue",
        "request",
        "request_checks",
        "vocabulary",
        "fanout",
        "token_counts",
        "histogram",
        "stats",
        "tallies",
        "repeats",
        "detokenizer",
        "sampling_params",
        "sampling_checks",
        "config",
    ):
        assert top_level(PACKAGE / f"{name}.py").isdisjoint({"llama_cpp", "numpy", "ctypes"}), name
        assert not any(m.startswith("llamabatch.llama") for m in imports(PACKAGE / f"{name}.py")), name


def test_reading_a_job_needs_no_engine():
    for name in ("rows", "sources", "jsonl", "plain_lines", "openai_lines", "template", "tables", "ids", "reader"):
        named = imports(PACKAGE / "jobs" / f"{name}.py")
        assert {module.split(".")[0] for module in named}.isdisjoint({"llama_cpp", "numpy", "ctypes"}), name
        assert named.isdisjoint({f"llamabatch.{room}" for room in ("llama", "engine", "client", "front", "llm")}), name


def test_imports_go_one_way():
    order = [
        {"errors", "checks", "gguf_walk", "gguf_header", "histogram"},
        {"sampling_params", "token_counts", "repeats", "detokenizer", "stats", "adapters", "vocabulary"},
        {"logprobs", "finish_reason"},
        {"known"},
        {"request"},
        {"slots", "prefix", "policies", "fanout", "deadlines", "tallies", "watch"},
        {"config", "step", "waiting", "ticket", "restarts"},
        {
            *("packing", "turns", "cells", "affinity", "lookup", "compaction", "precedence", "adapter_turns"),
            *("embed_queue", "request_checks"),
        },
        {"speculation", "sharing", "ledger"},
        {"scheduler", "limits", "gpu_memory", "graph_buffers", "weights"},
        {"machine", "model_facts"},
        {"memory"},
        {"capacity", "model_file"},
        {"engine"},
        {"mailbox", "wire"},
        {"client"},
        {"router", "passing_client", "child", "parent"},
        {"in_flight"},
        {"supervisor"},
        {"bounded_client", "counting_client"},
        {"child_client", "threads_client", "worker"},
        {"front", "monitored"},
        {"scoring"},
        {"llm", "async_llm"},
    ]
    level = {name: i for i, names in enumerate(order) for name in names}
    for name, own in level.items():
        for module in imports(PACKAGE / f"{name}.py"):
            parts = module.split(".")
            if (
                parts[0] == "llamabatch"
                and len(parts) > 1
                and parts[1] in level
                and parts[1] not in ("child_client", "threads_client", "bounded_client", "counting_client")
            ):
                assert level[parts[1]] <= own, f"{name} imports {parts[1]}"


def test_the_memory_arithmetic_is_pure():
    for name in ("memory", "weights", "graph_buffers", "model_facts", "capacity", "limits", "gpu_memory"):
        assert top_level(PACKAGE / f"{name}.py").isdisjoint({"llama_cpp", "numpy", "ctypes"}), name
        assert not any(m.startswith("llamabatch.llama") for m in imports(PACKAGE / f"{name}.py")), name


def test_policies_and_their_names():
    assert set(STRATEGIES) == set(POLICIES) | {"multi-instance", "auto"}
    assert all(policy.summary for policy in POLICIES.values())


@pytest.mark.parametrize("cwd", [None, PACKAGE, PACKAGE.parent / "tests"])
def test_no_test_starts_a_program_in_the_checkout(cwd, monkeypatch):
    if cwd is None:
        assert not Path.cwd().is_relative_to(PACKAGE.parent)
        monkeypatch.chdir(PACKAGE.parent)
    with pytest.raises(AssertionError, match="give it a cwd elsewhere"):
        subprocess.run([sys.executable, "-c", ""], cwd=cwd)


def test_importing_loads_no_library_starts_no_thread_and_prints_nothing():
    code = (
        "import sys, threading, llamabatch\n"
        "assert 'llama_cpp' not in sys.modules, 'llama_cpp'\n"
        "for name in ('matplotlib', 'prometheus_client', 'asyncio', 'jinja2', 'llguidance', 'huggingface_hub'):\n"
        "    assert name not in sys.modules, name\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_takes_time_to_import_waits_until_it_is_asked_for():
    """So that the command line has taken over signals by then."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import llamabatch.__main__\n"
        "ours = {name for name in set(sys.modules) - before if name.startswith('llamabatch')}\n"
        "assert ours == {'llamabatch', 'llamabatch.__main__', 'llamabatch.interrupts'}, ours\n"
        "for name in ('numpy', 'click', 'typing', 'ctypes', 'subprocess'):\n"
        "    assert name in before or name not in sys.modules, name\n"
        "import llamabatch\n"
        "assert llamabatch.errors.InputError is llamabatch.InputError, 'a module by its name'\n"
        "assert 'LLM' in dir(llamabatch)\n"
        "assert not hasattr(llamabatch, 'nothing') and not hasattr(llamabatch, '__wrapped__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_each_public_name_comes_from_where_the_type_checker_sees_it():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {
        alias.name: node.module.removeprefix("llamabatch.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module.startswith("llamabatch.")
        for alias in node.names
    }
    assert seen == llamabatch._HOMES
    assert set(seen) == set(llamabatch.__all__) - {"__version__"}
