"""Makes the package `llamabatch_llama`: the Python files of llama-cpp-python as `_binding`, and our libraries in `lib`.

    llamabatch_llama/__init__.py, _binding/, lib/, licenses/, llamabatch_build.json

The files are copied from the source package (or an installed or unpacked wheel). Relative imports replace imports of
`llama_cpp`, so that nothing of that name is imported or shadowed. The package's `lib` becomes the only folder of
libraries. The copy needs the same packages as llama-cpp-python: numpy, typing_extensions, diskcache and jinja2.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from llamabatch.native_build.plan import MARKER
from llamabatch.native_build.recipe import PREFIX
from llamabatch.native_build.tools import SetupFailure

PACKAGE = "llamabatch_llama"
BINDING = "_binding"
UPSTREAM = "llama_cpp"
NEEDED_PACKAGES = ("numpy", "typing_extensions", "diskcache", "jinja2")

_LEFT_OUT = ("server", "lib", "include", "__pycache__")
_LIBRARY_NAME = re.compile(r'(^_lib\w*base_name = |load_shared_library\()"(\w+)"', re.MULTILINE)
_FOLDER = 'os.path.dirname(__file__))) / "lib"'
_OUR_FOLDER = 'os.path.dirname(__file__))).parent / "lib"'
_OVERRIDE = 'os.environ.get("LLAMA_CPP_LIB_PATH")'
_OUR_OVERRIDE = f"None  # this binding is for the libraries of {PACKAGE} alone"
_LICENSES = {"llama-cpp-python": "LICENSE.md", "llama.cpp": "vendor/llama.cpp/LICENSE"}
_COMMITS = {"llama-cpp-python": ".git/HEAD", "llama.cpp": ".git/modules/vendor/llama.cpp/HEAD"}
_INIT = '''"""llama.cpp with the patches of llamabatch, for llamabatch. Importing this package loads nothing."""

__version__ = "{version}"
'''


def require_packages() -> None:
    """Raises SetupFailure if this Python lacks a package for the binding's imports. For use before compiling."""
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        names = " ".join(name.replace("_", "-") for name in missing)
        raise SetupFailure(f"The Python files of llama-cpp-python need more packages here: pip install {names}")


def make_package(tree: Path, folder: Path, version: str, marker: str, prefix: str = PREFIX) -> Path:
    """Writes the package without its libraries into `folder`, with an empty `lib` folder.

    Args:
        tree: the top folder of the unpacked source package of llama-cpp-python.
        folder: the folder of the package, named `llamabatch_llama`. It must not exist.
        version: the version of the package.
        marker: text of the marker, from `Plan.marker()`.
        prefix: first part of the libraries' names, as in libllamabatch-llama.so; "" for llama-cpp-python's own names.

    Returns:
        The `lib` folder for the libraries.

    Raises:
        SetupFailure: a source file has an import or a library folder that this module does not understand.
    """
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(_INIT.format(version=version), encoding="utf-8")
    (folder / MARKER).write_text(marker, encoding="utf-8")
    copy_binding(tree / UPSTREAM, folder / BINDING, prefix)
    copy_licenses(tree, folder / "licenses")
    libraries = folder / "lib"
    libraries.mkdir()
    return libraries


def copy_binding(package: Path, target: Path, prefix: str = PREFIX) -> None:
    """Copies the Python files of `package`, a folder `llama_cpp`, to the new folder `target`, with changed imports.

    Raises:
        SetupFailure: as make_package.
    """
    if not (package / "__init__.py").is_file():
        raise SetupFailure(f"{package} is no package {UPSTREAM}: it has no __init__.py.")
    for path in sorted(package.rglob("*")):
        place = path.relative_to(package)
        if place.parts[0] in _LEFT_OUT or path.suffix not in (".py", ".typed"):
            continue
        copy = target / place
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".py":
            text = rewritten(path.read_text(encoding="utf-8"), str(place), len(place.parts), prefix)
            copy.write_text(text, encoding="utf-8")
        else:
            shutil.copyfile(path, copy)


def rewritten(text: str, name: str, depth: int = 1, prefix: str = PREFIX) -> str:
    """Returns a file's text, changed to relative imports, our library folder and our names of libraries.

    Args:
        name: the file's name for messages.
        depth: 1 for a file of the package itself, 2 for a file in a subfolder.

    Raises:
        SetupFailure: as make_package.
    """
    lines = text.split("\n")
    for node in reversed(list(_imports(text))):
        changed = _changed(node, ast.get_source_segment(text, node) or "", depth)
        if changed is None:
            continue
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        head = lines[first].encode()[: node.col_offset].decode()
        tail = lines[last].encode()[node.end_col_offset :].decode()
        lines[first : last + 1] = (head + changed + tail).split("\n")
    text = "\n".join(lines)
    if re.search(r"load_shared_library\((?!lib_base_name: str)", text):  # matches a call, not the definition
        text, names = _LIBRARY_NAME.subn(rf'\g<1>"{prefix}\g<2>"', text)
        if text.count(_FOLDER) != 1 or names != 1:
            raise SetupFailure(f"{UPSTREAM}/{name} finds its libraries in another way than before: adapt binding.py.")
        text = text.replace(_FOLDER, _OUR_FOLDER).replace(_OVERRIDE, _OUR_OVERRIDE)
    if left := _left(text):
        raise SetupFailure(f"{UPSTREAM}/{name} still names {UPSTREAM} in line {left}: adapt binding.py.")
    return text


def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    return sorted(found, key=lambda node: (node.lineno, node.col_offset))


def _changed(node: ast.Import | ast.ImportFrom, statement: str, depth: int) -> str | None:
    """Returns the changed import statement, or None if the statement does not import llama_cpp."""
    own, above = "." * depth, "." * (depth + 1)
    if isinstance(node, ast.ImportFrom):
        if node.level or (node.module or "").split(".")[0] != UPSTREAM:
            return None
        return re.sub(rf"^from\s+{UPSTREAM}\.?", f"from {own}", statement)
    if not any(alias.name.split(".")[0] == UPSTREAM for alias in node.names):
        return None
    parts = []
    for alias in node.names:
        root, _, rest = alias.name.partition(".")
        if root != UPSTREAM:
            parts.append(f"import {alias.name} as {alias.asname}" if alias.asname else f"import {alias.name}")
            continue
        folder, _, module = rest.rpartition(".")
        if rest and alias.asname:
            parts.append(f"from {own}{folder} import {module} as {alias.asname}")
            continue
        if rest:  # `import a.b` binds a but also imports b
            parts.append(f"from {own}{folder} import {module} as _{module}")
        parts.append(f"from {above} import {BINDING} as {alias.asname or UPSTREAM}")
    return "; ".join(parts)


def _left(text: str) -> int | None:
    """Returns the number of a line that imports llama_cpp or names LLAMA_CPP_LIB_PATH, or None."""
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Call):  # a call of __import__ or import_module may import llama_cpp
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                names = [str(argument.value) for argument in node.args if isinstance(argument, ast.Constant)]
        elif isinstance(node, ast.Constant) and node.value == "LLAMA_CPP_LIB_PATH":
            return node.lineno
        if any(name.split(".")[0] == UPSTREAM for name in names):
            return int(getattr(node, "lineno", 0))
    return None


def copy_licenses(tree: Path, folder: Path) -> None:
    """Copies the licences of llama.cpp and llama-cpp-python to `folder`, and writes their commits to UPSTREAM.txt.

    Raises:
        SetupFailure: a notice is missing in `tree`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = []
    for project, notice in _LICENSES.items():
        if not (tree / notice).is_file():
            raise SetupFailure(f"The source of {project} has no {notice}: without its notice it may not be passed on.")
        shutil.copyfile(tree / notice, folder / f"{project}.txt")
        commit = tree / _COMMITS[project]
        known = commit.read_text(encoding="utf-8").strip() if commit.is_file() else "unknown"
        facts.append(f"{project}: commit {known}, changed by llamabatch, licence in {project}.txt\n")
    (folder / "UPSTREAM.txt").write_text("".join(facts), encoding="utf-8")


_PROOF = f"""
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import {PACKAGE}.{BINDING} as binding
library = binding.llama_cpp._lib._name
if any("mtmd" in path.name for path in pathlib.Path(library).parent.iterdir()):
    import {PACKAGE}.{BINDING}.mtmd_cpp
names = [name for name in sys.modules if name.split(".")[0] == "{UPSTREAM}"]
assert not names, "it imports " + ", ".join(sorted(names))
for module in list(sys.modules.values()):
    name = getattr(module, "__name__", "")
    if name.startswith("{PACKAGE}"):
        assert module.__file__.startswith(sys.argv[1]), module.__file__ + " is another one"
assert library.startswith(sys.argv[1]), library + " is another library"
print(library)
"""


def prove(folder: Path, python: str = sys.executable) -> Path:
    """Imports the package at `folder` in a separate process. Returns the path of the libllama that was loaded.

    Raises:
        SetupFailure: the package does not load, imports something named `llama_cpp`, or imports files from another
            place.
    """
    place = str(folder.resolve().parent)
    command = [python, "-c", _PROOF, place]
    environment = {name: value for name, value in os.environ.items() if name != "LLAMA_CPP_LIB_PATH"}
    try:
        done = subprocess.run(
            command, cwd=place, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=120,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupFailure(f"The package in {folder} could not be tried: {error}.") from error
    if done.returncode != 0:
        complaint = (done.stderr.strip().splitlines() or [f"Python ended with status {done.returncode}"])[-1]
        missing = [name for name in NEEDED_PACKAGES if f"No module named '{name}'" in complaint]
        cure = f": install it with {python} -m pip install {missing[0].replace('_', '-')}" if missing else ""
        raise SetupFailure(f"The package in {folder} does not load ({complaint}){cure}.")
    return Path(done.stdout.strip())
