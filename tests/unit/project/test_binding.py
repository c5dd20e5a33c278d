"""The rewriting of llama-cpp-python's files, tried on small files."""

import ast
import sys

import pytest

from llamabatch.native_build import binding
from llamabatch.native_build.tools import SetupFailure

CTYPES = 'def load_shared_library(lib_base_name: str, base_path):\n    """Load."""\n    return None\n'
CORE = """import os
import pathlib

from llama_cpp._ctypes_extensions import (
    load_shared_library,
)

_lib_base_name = "llama"
_override_base_path = os.environ.get("LLAMA_CPP_LIB_PATH")
_base_path = (
    pathlib.Path(os.path.abspath(os.path.dirname(__file__))) / "lib"
    if _override_base_path is None
    else pathlib.Path(_override_base_path)
)


class _lib:
    _name = str(_base_path / f"lib{_lib_base_name}.so")
    loaded = load_shared_library(_lib_base_name, _base_path)
"""


@pytest.fixture
def source(tmp_path):
    """A source package with a small binding that has all forms of import of the real one."""
    tree = tmp_path / "source"
    package = tree / "llama_cpp"
    (package / "server").mkdir(parents=True)
    (package / "lib").mkdir()
    files = {
        "__init__.py": "from .llama_cpp import *\nfrom . import llama_cache\n",
        "_ctypes_extensions.py": CTYPES,
        "llama_cpp.py": CORE,
        "llama_cache.py": "import llama_cpp.llama\n\nSTATE = llama_cpp.llama.STATE\n",
        "llama.py": 'def lazy():\n    """>>> import llama_cpp"""\n    import llama_cpp.llama_cache as cache, sys\n'
        "    return cache, sys\n\nSTATE = 7\n",
        "server/app.py": "import llama_cpp\n",
        "lib/libllama.so": "",
        "py.typed": "",
    }
    for name, text in files.items():
        (package / name).write_text(text)
    (tree / "vendor" / "llama.cpp").mkdir(parents=True)
    (tree / "vendor" / "llama.cpp" / "LICENSE").write_text("MIT, ggml authors")
    (tree / "LICENSE.md").write_text("MIT, of the binding")
    (tree / ".git").mkdir()
    (tree / ".git" / "HEAD").write_text("0123456789abcdef\n")
    return tree


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import llama_cpp", "from .. import _binding as llama_cpp"),
        ("import llama_cpp as l", "from .. import _binding as l"),
        ("import llama_cpp.llama", "from . import llama as _llama; from .. import _binding as llama_cpp"),
        ("import llama_cpp.llama as llama", "from . import llama as llama"),
        ("import os, llama_cpp.a.b as b", "import os; from .a import b as b"),
        ("from llama_cpp import Llama", "from . import Llama"),
        ("from llama_cpp.a import b as c, d", "from .a import b as c, d"),
        ("from llama_cpp.a import (\n    b,  # why\n)", "from .a import (\n    b,  # why\n)"),
        ("import llama_cpp_agent", "import llama_cpp_agent"),
        ("from . import llama_cpp", "from . import llama_cpp"),
        ("é = 1; import llama_cpp; x = 2", "é = 1; from .. import _binding as llama_cpp; x = 2"),
        ('"""\nimport llama_cpp\n"""', '"""\nimport llama_cpp\n"""'),
    ],
)
def test_imports_become_relative(before, after):
    assert binding.rewritten(before, "a.py") == after
    ast.parse(after)


def test_a_file_of_a_folder_goes_one_level_up():
    assert binding.rewritten("from llama_cpp.a import b", "sub/c.py", 2) == "from ..a import b"
    assert binding.rewritten("import llama_cpp", "sub/c.py", 2) == "from ... import _binding as llama_cpp"


@pytest.mark.parametrize(
    "line",
    ['importlib.import_module("llama_cpp.llama")', '__import__("llama_cpp")', 'os.environ["LLAMA_CPP_LIB_PATH"]'],
)
def test_what_is_not_understood_stops(line):
    with pytest.raises(SetupFailure, match=r"llama_cpp/new\.py still names llama_cpp in line 2: adapt"):
        binding.rewritten(f"x = 1\n{line}\n", "new.py")


@pytest.mark.parametrize("change", [('"lib"', '"libs"'), ("_lib_base_name = ", "_name = "), ('= "llama"', "= NAME")])
def test_another_way_to_the_libraries_stops(change):
    with pytest.raises(SetupFailure, match=r"llama_cpp/llama_cpp\.py finds its libraries in another way"):
        binding.rewritten(CORE.replace(*change), "llama_cpp.py")


def test_the_prefix_goes_before_each_name_of_a_library():
    text = CORE.replace('_lib_base_name = "llama"\n', "").replace("_library(_lib_base_name", '_library("ggml"')
    assert 'load_shared_library("llamabatch-ggml"' in binding.rewritten(text, "_ggml.py")
    assert 'load_shared_library("ggml"' in binding.rewritten(text, "_ggml.py", prefix="")


def test_the_package_is_whole_and_imports_nothing_of_the_name(source, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "elsewhere"))
    folder = tmp_path / "made" / "llamabatch_llama"
    libraries = binding.make_package(source, folder, "1.2.3", '{"key": "k"}\n')
    assert libraries == folder / "lib"
    assert list(libraries.iterdir()) == []
    assert {path.name for path in (folder / "_binding").iterdir()} == {
        *("__init__.py", "_ctypes_extensions.py", "llama_cpp.py", "llama_cache.py", "llama.py", "py.typed")
    }
    assert '__version__ = "1.2.3"' in (folder / "__init__.py").read_text()
    assert (folder / "llamabatch_build.json").read_text() == '{"key": "k"}\n'
    assert (folder / "licenses" / "llama.cpp.txt").read_text() == "MIT, ggml authors"
    assert (folder / "licenses" / "llama-cpp-python.txt").read_text() == "MIT, of the binding"
    assert "llama-cpp-python: commit 0123456789abcdef" in (folder / "licenses" / "UPSTREAM.txt").read_text()
    assert binding.prove(folder) == folder / "lib" / "libllamabatch-llama.so"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("import llama_cpp", r"does not load \(AssertionError: it imports llama_cpp\)"),
        (
            "raise ModuleNotFoundError(\"No module named 'typing_extensions'\")",
            f"install it with {sys.executable} -m pip install typing-extensions",
        ),
    ],
    ids=["it imports the name", "a package is missing"],
)
def test_a_package_that_does_not_load_is_found_out(source, tmp_path, line, told):
    folder = tmp_path / "made" / "llamabatch_llama"
    binding.make_package(source, folder, "1.2.3", "{}")
    (tmp_path / "made" / "llama_cpp.py").write_text("")
    with open(folder / "_binding" / "llama.py", "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(SetupFailure, match=told):
        binding.prove(folder)


def test_a_source_without_its_notice_is_refused(source, tmp_path):
    (source / "LICENSE.md").unlink()
    with pytest.raises(SetupFailure, match=r"llama-cpp-python has no LICENSE\.md"):
        binding.make_package(source, tmp_path / "made" / "llamabatch_llama", "1.2.3", "{}")


def test_what_is_no_binding_is_refused(tmp_path):
    with pytest.raises(SetupFailure, match="is no package llama_cpp"):
        binding.copy_binding(tmp_path, tmp_path / "out")
