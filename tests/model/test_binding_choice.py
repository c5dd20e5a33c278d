"""The order in which real builds of llama.cpp are chosen. They are packages made from the installed
llama-cpp-python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import llamabatch
from llamabatch.native_build import source
from llamabatch.native_build.binding import copy_binding
from llamabatch.planning.binding_choice import LIBRARIES_VARIABLE, MARKER, VARIABLE, installed
from llamabatch.sampling import native

ROOT = Path(llamabatch.__file__).parents[1]
INSTALLED = installed("llama_cpp")
ASKS = "[[{'role': 'user', 'content': 'What is the capital of France?'}]], {'max_tokens': 8, 'temperature': 0}"
USES = """
import json, sys
from llamabatch.llama import build_info, library
def where(): return str(build_info.library_dir(library.load()))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a package llamabatch_llama: the installed binding and libraries, and the marker of this release."""
    folder = tmp_path_factory.mktemp("made") / "llamabatch_llama"
    folder.mkdir()
    (folder / "__init__.py").write_text('__version__ = "1"\n')
    copy_binding(INSTALLED, folder / "_binding", prefix="")
    shutil.copytree(INSTALLED / "lib", folder / "lib", symlinks=True)
    hashes = {"patches": source.patches(), "kernels": source.kernels()}
    facts = {name: {file.name: source.sha256_of(file) for file in files} for name, files in hashes.items()}
    (folder / MARKER).write_text(json.dumps(facts | {"version": "9.9", "backend": "cpu", "compiler": "a compiler"}))
    return folder.parent


@pytest.fixture
def run(tmp_path):
    """`run.run` runs a program with a cache of its own. `run.builds` is the folder of builds in this cache, and
    `run.site` is on the program's path."""
    site, cache = tmp_path / "site", tmp_path / "cache"
    site.mkdir()
    (cache / "builds").mkdir(parents=True)

    def run(code, *, fails=False, **more):
        variables = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
        variables |= {"LLAMABATCH_CACHE": str(cache), "PYTHONPATH": os.pathsep.join((str(site), str(ROOT)))} | more
        command = [sys.executable, *(code if isinstance(code, list) else ["-c", USES + code])]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=240)
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stderr if fails else done.stdout

    return SimpleNamespace(run=run, site=site, builds=cache / "builds")


def test_what_llamabatch_build_made_is_used_by_all_processes_and_shadows_nothing(run, made, tmp_path):
    shutil.copytree(made, run.builds / "key", symlinks=True)
    told = run.run(
        "from llamabatch import LLM\n"
        f"with LLM('tiny', trial='on') as llm: first = llm.chat({ASKS})[0].text\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'llama_cpp']\n"
        f"with LLM('tiny', isolate=True) as llm:\n"
        "    pid = llm.heartbeats[0].pid\n"
        "    maps = open(f'/proc/{pid}/maps').read() if sys.platform == 'linux' else where()\n"
        f"    second = llm.chat({ASKS})[0].text\n"
        "import llama_cpp\n"
        "print(json.dumps([where(), first, second, maps, llama_cpp.__file__]))"
    )
    folder, first, second, maps, foreign = json.loads(told)
    assert folder == str((run.builds / "key" / "llamabatch_llama" / "lib").resolve())
    assert folder in maps
    assert "site-packages/llama_cpp/lib" not in maps
    assert "Paris" in first
    assert first == second
    assert Path(foreign).parent == INSTALLED


def test_a_broken_build_gives_way_to_the_installed_one_and_doctor_says_so(run, made):
    folder = run.builds / "key" / "llamabatch_llama"
    shutil.copytree(made, run.builds / "key", symlinks=True)
    for file in (folder / "lib").glob("libllama.*"):
        file.unlink()
    (folder / "lib" / "libllama.so").write_bytes(b"no library")
    told = json.loads(run.run(["-m", "llamabatch", "doctor", "--json"]))
    checks = {check["name"]: check for check in told["checks"]}
    assert told["facts"]["origin"] == "installed"
    assert told["facts"]["library_dir"] == str((INSTALLED / "lib").resolve())
    assert "llamabatch-llama cannot load its library" in checks["passed over"]["detail"]
    assert "llamabatch build" in checks["passed over"]["cure"]
    named = run.run("where()", fails=True, **{VARIABLE: str(folder)})
    assert "SetupError: the llama.cpp that LLAMABATCH_LLAMA names" in named
    assert "cannot load its library" in named


def test_a_binding_of_another_release_is_passed_over(run, made):
    shutil.copytree(made, run.builds / "key", symlinks=True)
    file = run.builds / "key" / "llamabatch_llama" / "_binding" / "llama_cpp.py"
    file.write_text(file.read_text().replace('("n_seq_max", ctypes.c_uint32)', '("n_seq_most", ctypes.c_uint32)'))
    told = json.loads(run.run(["-m", "llamabatch", "doctor", "--json"]))
    [reason] = told["facts"]["passed_over"].values()
    assert "llama_context_params without n_seq_max" in reason
    assert told["facts"]["origin"] == "installed"


def test_the_installed_package_comes_before_a_stock_build_and_brings_its_sampler(run, made):
    if native.file() is None:
        pytest.skip("no sampler is compiled here")
    shutil.copytree(made, run.site, symlinks=True, dirs_exist_ok=True)
    shutil.copy(native.file(), run.site / "llamabatch_llama" / "lib")
    told = run.run(
        "from llamabatch.sampling import native\n"
        "from llamabatch.planning import binding_choice\n"
        "native.PATH = native.PATH.parent / 'elsewhere' / native.PATH.name  # as where none was compiled\n"
        "print(json.dumps([where(), str(native.file()), binding_choice.choose().build.origin.name]))"
    )
    libraries = str(run.site / "llamabatch_llama" / "lib")
    assert json.loads(told) == [libraries, str(Path(libraries) / native.PATH.name), "WHEEL"]


def test_the_loop_of_compare_runs_on_the_same_build(run, made):
    shutil.copytree(made, run.site, symlinks=True, dirs_exist_ok=True)
    told = run.run(
        "from llamabatch.tools.compare.baseline import Loop\n"
        "from llamabatch.config import EngineConfig\n"
        "loop = Loop(EngineConfig(model='tiny', n_ctx=64, n_threads=1, n_threads_batch=1))\n"
        "print(json.dumps([type(loop._llama).__module__, where()]))"
    )
    assert json.loads(told) == ["llamabatch_llama._binding.llama", str(run.site / "llamabatch_llama" / "lib")]


def test_an_imported_llama_cpp_is_used_as_it_is(run, made):
    shutil.copytree(made, run.site, symlinks=True, dirs_exist_ok=True)
    told = run.run("import llama_cpp\nassert library.load() is llama_cpp\nprint(where())")
    assert told.strip() == str((INSTALLED / "lib").resolve())


def test_a_named_package_is_used_in_this_process_and_its_children(run, made):
    told = run.run(
        "import os; os.chdir('/')\n"
        "from llamabatch.planning.binding_choice import choose, for_children\n"
        "print(json.dumps([where(), for_children(), choose().build.origin.name]))",
        **{VARIABLE: str(made / "llamabatch_llama")},
    )
    assert json.loads(told) == [
        str(made / "llamabatch_llama" / "lib"), {VARIABLE: str(made / "llamabatch_llama")}, "NAMED"
    ]  # fmt: skip


def test_libraries_that_were_named_after_the_import_are_refused(run, made):
    libraries = str(made / "llamabatch_llama" / "lib")
    told = run.run(
        f"import os, llama_cpp\nos.environ['{LIBRARIES_VARIABLE}'] = {libraries!r}\nlibrary.load()", fails=True
    )
    assert "llama_cpp was imported before, with the libraries in" in told
