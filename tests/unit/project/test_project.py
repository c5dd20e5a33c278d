"""The shape of the project: public names, the rooms and their imports, and the cost of importing."""

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

import llamabatch
from llamabatch.scheduler.policies import POLICIES, STRATEGIES

PACKAGE = Path(llamabatch.__file__).parent
REPOSITORY = Path(__file__).parents[3]

# A room imports itself and the rooms in lines above its own. docs/architecture.md has both tables.
TABLE = (
    ("errors", "native_build"),
    ("utils",),
    ("request",),
    ("chat",),
    ("media",),
    ("gguf",),
    ("scheduler",),
    ("config",),
    ("planning",),
    ("sampling",),
    ("llama",),
    ("engine",),
    ("client",),
    ("monitor",),
    ("entrypoints",),
    ("compat", "testing"),
    ("jobs",),
    ("columns",),
    ("server",),
    ("integrations",),
    ("tools",),
    ("cli",),
    ("__init__", "__main__"),
)
LEVEL = {room: level for level, rooms in enumerate(TABLE) for room in rooms}
# The table of the server's rooms: a dialect imports no other dialect, and batches know no dialect.
SERVER = (
    ("options",),
    ("http",),
    ("serving",),
    ("monitor", "request", "batches"),
    ("response",),
    ("openai", "vllm", "llama_server", "anthropic", "ollama", "page"),
    ("openapi", "vertex", "pool"),
    ("application",),
    ("run", "__init__"),
)
DATA = "bundled"  # the room of the bundled model, which has no code
NATIVE = {"llama_cpp", "numpy", "ctypes"}


def module_of(path: Path, root: Path = PACKAGE.parent) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(*folders: str) -> dict[str, Path]:
    """Returns module name -> file, for all Python files below these folders of the repository."""
    return {module_of(path, REPOSITORY): path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")}


def imports(path: Path) -> set[str]:
    """Returns the modules that a file names in any import, also inside functions. `from a import b` names a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports by dots"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_files(path: Path, known: dict[str, Path]) -> set[str]:
    """Returns the modules of `known` that a file imports. `from a import b` counts as a.b only if that is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else str(node.module))
    return found & set(known)


def room_of(module: str, depth: int = 1) -> str:
    parts = module.split(".")
    return parts[depth] if len(parts) > depth else "__init__"


def upward(known: dict[str, Path], table: Sequence[Sequence[str]], depth: int = 1) -> list[str]:
    """Returns the imports between rooms that do not go to a line above in the table. `depth` counts folders."""
    level = {room: place for place, rooms in enumerate(table) for room in rooms} | {DATA: -1}
    return [
        f"{path.relative_to(REPOSITORY)} imports {other}"
        for module, path in known.items()
        for other in imported_files(path, known)
        if (room := room_of(other, depth)) != (own := room_of(module, depth)) and level[room] >= level[own]
    ]


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def test_public_names():
    assert llamabatch.__all__ == sorted(llamabatch.__all__, key=lambda n: (not n.isupper(), n.startswith("_"), n))
    assert all(hasattr(llamabatch, name) for name in llamabatch.__all__)


def test_the_listing_shows_the_rooms_of_the_table():
    shown = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or list(path.glob("*.py"))}
    assert shown <= set(LEVEL) | {DATA}


def test_each_room_says_what_it_is():
    for folder in (path for path in PACKAGE.rglob("*") if path.is_dir() and list(path.glob("*.py"))):
        text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
        assert text, f"{folder} has no docstring"


def test_imports_go_down_the_table():
    assert upward(sources("llamabatch"), TABLE) == []


def test_imports_within_the_server_go_down_its_table():
    known = sources("llamabatch/server")
    assert upward(known, SERVER, depth=2) == []
    assert {room_of(module, 2) for module in known} == {room for rooms in SERVER for room in rooms}


def test_no_circle_of_files():
    known = sources("llamabatch", "native_patches", "benchmarks", "tests", "models", "docs", "examples")
    edges = {module: imported_files(path, known) - {module} for module, path in known.items()}
    assert circles(edges) == []


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Returns groups of files in which each file reaches all others by imports."""
    reach = {}
    for start in edges:
        seen, todo = set(), [start]
        while todo:
            for other in edges[todo.pop()] - seen:
                seen.add(other)
                todo.append(other)
        reach[start] = seen
    groups = defaultdict(list)
    for module in edges:
        if module in reach[module]:
            groups[frozenset(m for m in reach[module] if module in reach[m])].append(module)
    return sorted(sorted(group) for group in groups.values())


def test_only_the_llama_room_and_the_baseline_touch_llama_cpp():
    touching = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if "llama_cpp" in top_level(p)}
    assert {name for name in touching if not name.startswith("llama/")} <= {"tools/compare/baseline.py"}


@pytest.mark.parametrize("room", ["scheduler", "request", "gguf"])
def test_deciding_a_step_needs_nothing_native(room):
    for path in (PACKAGE / room).rglob("*.py"):
        assert top_level(path).isdisjoint(NATIVE), path


def test_the_memory_arithmetic_is_pure():
    facts = ("weights", "placement", "passes", "compute_buffers", "model_facts", "machine")
    for name in ("memory", "plan", "kv_cache", "context_length", "capacity", *facts):
        assert top_level(PACKAGE / "planning" / f"{name}.py").isdisjoint(NATIVE), name


def test_reading_a_job_needs_no_engine():
    for path in [PACKAGE / "jobs" / "rows.py", *(PACKAGE / "jobs" / "input").glob("*.py")]:
        named = imports(path)
        assert {module.split(".")[0] for module in named}.isdisjoint(NATIVE), path
        rooms = {room_of(module) for module in named if module.startswith("llamabatch.")}
        assert rooms.isdisjoint({"llama", "engine", "client"}), path


def test_the_set_up_needs_the_standard_library_alone():
    """`python -m native_patches.bootstrap` runs before anything is installed."""
    allowed = {*sys.stdlib_module_names, "llamabatch", "native_patches"}
    bootstrap = [REPOSITORY / "native_patches" / name for name in ("bootstrap.py", "local_wheel.py")]
    for path in (*(PACKAGE / "native_build").rglob("*.py"), *bootstrap):
        assert top_level(path) <= allowed, path
        assert {room_of(name) for name in imports(path) if name.startswith("llamabatch.")} <= {"native_build"}, path


def test_policies_and_their_names():
    assert set(STRATEGIES) == set(POLICIES) | {"multi-instance", "auto"}
    assert all(policy.summary for policy in POLICIES.values())


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
    """The command line must handle signals before the slow imports."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "import llamabatch.__main__\n"
        "ours = {name for name in set(sys.modules) - before if name.startswith('llamabatch')}\n"
        "few = {'__main__', 'utils', 'utils.interrupts', 'utils.version'}\n"
        "assert ours == {'llamabatch', *('llamabatch.' + module for module in few)}, ours\n"
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
    assert seen.pop("__version__") == "utils.version"
    assert seen == llamabatch._HOMES
    assert set(seen) == set(llamabatch.__all__) - {"__version__"}
