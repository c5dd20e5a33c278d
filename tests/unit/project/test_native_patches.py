"""The build of the native library, without building: patches, cache key, and failures told in one sentence."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from llamabatch.llama import extra_buffers, library
from llamabatch.native_build import machine, recipe, source, tools
from llamabatch.native_build.plan import MARKER
from llamabatch.utils import paths
from native_patches import bootstrap, local_wheel
from tests.waiting import until

ROOT = Path(__file__).parents[3]
FORMATTER = shutil.which("clang-format", path=str(Path(sys.executable).parent))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tree(tmp_path):
    """A source tree with one file, inside a git repository. `git apply` skips files silently there."""
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "hello.c").write_text("one\ntwo\nthree\n")
    return tree


def make_patch(folder, removed="two"):
    patch = folder / "0009-hello.patch"
    patch.write_text(
        "Without it: hello is not polite.\n\n"
        f"--- a/hello.c\n+++ b/hello.c\n@@ -1,3 +1,3 @@\n one\n-{removed}\n+please\n three\n"
    )
    return patch


@pytest.mark.parametrize("patch", source.patches(), ids=lambda patch: patch.name)
def test_every_patch_says_what_it_is_for_and_is_a_hook(patch):
    """No patch adds a whole file: new files are in native_patches/kernels."""
    header, text = source.header(patch), patch.read_text(encoding="utf-8")
    assert all(words in header for words in ("Without it:", "Upstream:", "Merged when:"))
    assert "+++" not in header
    assert source._changed_files(patch)
    assert "--- /dev/null" not in text
    assert len(re.findall(r"^\+(?!\+\+ )", text, flags=re.MULTILINE)) <= 80


def test_every_build_defines_once_what_clang_finds_twice(tmp_path, monkeypatch):
    """With Clang, `llamabatch build` links repack.cpp and repack-rows.cpp, which both include repack-any-rows.h."""
    for folder in source.KERNELS.values():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    counted = source.patches()
    real = source.patches
    monkeypatch.setattr(source, "fetch", lambda log, python: tmp_path)
    monkeypatch.setattr(source, "unpack", lambda package, folder: folder)
    monkeypatch.setattr(source, "patches", lambda *folder: real(*folder) if folder else [])
    tree = source.patched_tree(tmp_path / "log", tmp_path)
    header = (tree / source.KERNELS["repack-any-rows.h"] / "repack-any-rows.h").read_text()
    assert len(re.findall(r"^template <> inline constexpr bool any_rows<", header, flags=re.MULTILINE)) == 4
    assert not re.search(r"^template <> constexpr", header, flags=re.MULTILINE)
    held = [path.relative_to(source.PATCH_FOLDER).parts[0] for path in source.build_files()]
    assert source.UNCOUNTED_FOLDER.name in held  # a pip install also builds
    assert not {path.name for path in real(source.UNCOUNTED_FOLDER)} & {path.name for path in counted}


def test_each_kernel_has_a_place_in_the_source():
    found = {path.name for path in source.KERNEL_FOLDER.iterdir() if path.is_file()}
    assert found == set(source.KERNELS) == {path.name for path in source.kernels()}


def test_kernels_are_copied_and_replace_nothing(tmp_path):
    for folder in source.KERNELS.values():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    source.copy_kernels(tmp_path)
    for name, folder in source.KERNELS.items():
        assert (tmp_path / folder / name).read_bytes() == (source.KERNEL_FOLDER / name).read_bytes()
    with pytest.raises(tools.SetupFailure, match=r"has a file \S+ of its own: rename native_patches/kernels/"):
        source.copy_kernels(tmp_path)


@pytest.mark.skipif(FORMATTER is None, reason="clang-format is not installed")
def test_native_code_is_formatted():
    sources = [path for ending in ("cpp", "hpp", "h") for path in source.PATCH_FOLDER.rglob(f"*.{ending}")]
    command = [FORMATTER, "--dry-run", "--Werror", *map(str, sorted(sources))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_package_knows_patches_by_their_names():
    names = [value for name, value in vars(library).items() if name.endswith("_PATCH")]
    assert len(names) >= 7
    assert all((source.PATCH_FOLDER / name).is_file() for name in (extra_buffers.PATCH, *names))


@pytest.mark.parametrize("tool", ["git", "patch"])
def test_a_patch_applies_or_stops_with_its_header(tool, tree, tmp_path, monkeypatch):
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name: found(name) if name == tool else None)
    with pytest.raises(tools.SetupFailure, match=r"0009-hello\.patch does not apply(?s:.*)hello is not polite"):
        source.apply(make_patch(tmp_path, removed="something else"), tree)
    assert (tree / "hello.c").read_text() == "one\ntwo\nthree\n"
    source.apply(make_patch(tmp_path), tree)
    assert (tree / "hello.c").read_text() == "one\nplease\nthree\n"


def test_without_git_and_patch_the_sentence_says_what_to_install(tree, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(tools.SetupFailure, match="install git"):
        source.apply(make_patch(tmp_path), tree)


def test_the_source_package_is_verified_and_downloaded_once(cache, monkeypatch, tmp_path):
    calls = []

    def download(command, log, title, environment=None):
        calls.append(command)
        Path(command[command.index("--dest") + 1], source.FILE_NAME).write_bytes(b"the package")
        return 0

    monkeypatch.setattr(source, "run_logged", download)
    with pytest.raises(tools.SetupFailure, match="not the file that llamabatch was made with"):
        source.fetch(tmp_path / "log")
    assert list((cache / "sources").iterdir()) == []
    monkeypatch.setattr(source, "sha256_of", lambda path: source.SHA256)
    assert source.fetch(tmp_path / "log") == source.fetch(tmp_path / "log")
    assert len(calls) == 2


def test_no_network_is_said_so(cache, monkeypatch, tmp_path):
    def download(command, log, title, environment=None):
        log.write_text("$ pip download\nFailed to establish a new connection: [Errno -2] Name or service not known\n")
        return 1

    monkeypatch.setattr(source, "run_logged", download)
    with pytest.raises(tools.SetupFailure, match="the package index cannot be reached"):
        source.fetch(tmp_path / "log")


@pytest.fixture
def plan(cache, monkeypatch):
    for name in ("CMAKE_ARGS", *machine._ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_compiler", lambda: ("g++ 12", "#define __AVX2__ 1"))
    return machine.make_plan("cpu")


def test_the_same_machine_gives_the_same_key(plan):
    assert machine.make_plan("cpu") == plan
    assert machine.make_plan("cpu").key == plan.key
    assert plan.version == f"{source.VERSION}+llamabatch.{plan.key[:8]}"


def test_the_key_follows_the_patches(plan, tmp_path):
    (tmp_path / "0001-other.patch").write_text("Without it: nothing.\n")
    assert machine.make_plan("cpu", tmp_path).key != plan.key
    (tmp_path / "0001-other.patch").write_text("Without it: something.\n")
    changed = machine.make_plan("cpu", tmp_path)
    assert changed.key not in {plan.key, machine.make_plan("cpu", source.PATCH_FOLDER / "nowhere").key}


def test_the_key_follows_the_kernels(plan, tmp_path):
    shutil.copytree(source.KERNEL_FOLDER, tmp_path / "kernels")
    assert machine.make_plan("cpu", kernel_folder=tmp_path / "kernels").key == plan.key
    with open(tmp_path / "kernels" / "fattn-few.h", "a") as file:
        file.write("// more\n")
    assert machine.make_plan("cpu", kernel_folder=tmp_path / "kernels").key != plan.key


def test_the_key_follows_flags_compiler_cpu_and_environment(plan, monkeypatch):
    keys = {plan.key}
    monkeypatch.setenv("CMAKE_ARGS", "-DGGML_BLAS=ON '-DX=a b'")
    with_flags = machine.make_plan("cpu")
    assert with_flags.flags[-2:] == ("-DGGML_BLAS=ON", "-DX=a b")
    keys.add(with_flags.key)
    monkeypatch.delenv("CMAKE_ARGS")
    monkeypatch.setattr(machine, "_compiler", lambda: ("g++ 13", "#define __AVX2__ 1"))
    keys.add(machine.make_plan("cpu").key)
    monkeypatch.setattr(machine, "_compiler", lambda: ("g++ 12", "#define __AVX512F__ 1"))
    keys.add(machine.make_plan("cpu").key)
    monkeypatch.setenv("CXXFLAGS", "-O2")
    keys.add(machine.make_plan("cpu").key)
    assert len(keys) == 5


def test_a_wheel_in_the_cache_is_not_built_again_unless_forced(plan, monkeypatch):
    local_wheel.folder(plan).mkdir(parents=True)
    (local_wheel.folder(plan) / "llama.whl").touch()
    built = []
    monkeypatch.setattr(local_wheel, "_build", lambda plan, python: built.append(plan))
    assert local_wheel.wheel(plan) == local_wheel.folder(plan) / "llama.whl"
    assert built == []
    local_wheel.wheel(plan, force=True)
    assert built == [plan]


def test_the_wheel_has_the_version_the_marker_and_the_libraries(plan, tmp_path):
    tree, out = tmp_path / "tree", tmp_path / "out"
    (tree / "llama_cpp" / "server").mkdir(parents=True)
    out.mkdir()
    (tree / "llama_cpp" / "__init__.py").write_text(f'from .llama_cpp import *\n\n__version__ = "{source.VERSION}"\n')
    (tree / "llama_cpp" / "server" / "app.py").touch()
    (tree / "llama_cpp" / "notes.txt").touch()
    (tree / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: llama_cpp_python\nVersion: {source.VERSION}\n\nText")
    (tree / "LICENSE.md").write_text("MIT")
    library = tmp_path / "libllama.so"
    library.write_bytes(b"a library")
    wheel = local_wheel.pack(tree, [library], plan, out)
    with zipfile.ZipFile(wheel) as archive:
        contents = {name: archive.read(name).decode() for name in archive.namelist()}
    facts = f"llama_cpp_python-{plan.version}.dist-info"
    assert wheel.name.startswith(f"llama_cpp_python-{plan.version}-py3-none-")
    assert f'__version__ = "{plan.version}"' in contents["llama_cpp/__init__.py"]
    assert f"\nVersion: {plan.version}\n" in contents[f"{facts}/METADATA"]
    assert extra_buffers.PATCH in contents[f"llama_cpp/{MARKER}"]
    assert plan.key in contents[f"llama_cpp/{MARKER}"]
    assert contents["llama_cpp/lib/libllama.so"] == "a library"
    recorded = [line.split(",")[0] for line in contents[f"{facts}/RECORD"].splitlines()]
    assert sorted(recorded) == sorted(contents)
    assert "llama_cpp/notes.txt" not in contents


def test_a_failed_build_is_one_sentence_and_leaves_only_the_log(plan, cache, monkeypatch, capsys):
    monkeypatch.setattr(local_wheel, "require_space", lambda folder, gigabytes: None)
    monkeypatch.setattr(source, "fetch", lambda log, python: Path("package"))
    monkeypatch.setattr(source, "unpack", lambda package, folder: folder)
    monkeypatch.setattr(source, "copy_kernels", lambda tree: None)
    monkeypatch.setattr(source, "apply", lambda patch, tree: None)
    monkeypatch.setattr(recipe, "with_cmake", lambda place, log, python: dict(os.environ))

    def compile_(command, log, title, environment=None, display=None):
        assert "-DGGML_NATIVE=ON" in command
        log.write_text("$ cmake\nc++: fatal error: Killed signal terminated program cc1plus\n")
        return 1

    monkeypatch.setattr(recipe, "run_logged", compile_)
    assert tools.main_guard(lambda: print(local_wheel.wheel(plan))) == 1
    err = capsys.readouterr().err
    assert re.search(r"Set-up failed: The build of llama.cpp failed: the compiler ran out of memory.*log: .*\.log", err)
    assert [path.name for path in (cache / "wheels").iterdir()] == ["lock"]


@pytest.mark.parametrize(
    ("cards", "variables", "nvcc", "wanted"),
    [
        ("9.0\n9.0\n", {}, "13.0", "90"),
        ("8.9\n10.0\n", {}, "12.8", "89;100"),
        (None, {}, "13.0", "75-virtual;80-virtual;86-real;89-real;90-virtual;120a-real;121a-real"),
        ("", {}, "12.8", "50-virtual;61-virtual;70-virtual;75-virtual;80-virtual;86-real;89-real;90-virtual;120a-real"),
        (None, {}, "11.6", "50-virtual;61-virtual;70-virtual;75-virtual;80-virtual;86-real"),
        ("9.0\n", {"CUDAARCHS": "80;86"}, "13.0", "80;86"),
        (None, {"CMAKE_ARGS": "-DCMAKE_CUDA_ARCHITECTURES=86"}, "13.0", "86"),
    ],
)
def test_a_cuda_build_names_its_architectures_with_and_without_a_gpu(
    cards, variables, nvcc, wanted, plan, monkeypatch, capsys
):
    """Without named architectures ggml asks CMake for "native", and a build of a container without a GPU fails."""
    told = {"nvidia-smi": cards, "nvcc": f"Cuda compiler driver\nBuild cuda_{nvcc}.r{nvcc}/compiler.1\n"}
    real = machine._output
    monkeypatch.setattr(machine, "_output", lambda line: told[line[0]] if line[0] in told else real(line))
    for name in ("CUDAARCHS", "CMAKE_ARGS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    flags = [flag for flag in machine.make_plan("cuda").flags if "CUDA_ARCHITECTURES" in flag]
    assert flags == [f"-DCMAKE_CUDA_ARCHITECTURES={wanted}"]
    explained = "No GPU is visible here" in capsys.readouterr().err
    assert explained == (not cards and not variables)


def test_cuda_is_the_default_only_where_a_gpu_answers(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(machine, "_output", lambda command: "GPU 0: a card" if command[0] == "nvidia-smi" else None)
    assert machine.default_backend() == "cuda"
    monkeypatch.setattr(machine, "_output", lambda command: None)
    assert machine.default_backend() == "cpu"


def test_both_sides_agree_on_the_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("LLAMABATCH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tools.cache_dir() == paths.cache_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tools.cache_dir() == paths.cache_dir()
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "own"))
    assert tools.cache_dir() == paths.cache_dir() == tmp_path / "own"


def test_too_little_space_is_said_so(tmp_path):
    with pytest.raises(tools.SetupFailure, match="LLAMABATCH_CACHE"):
        tools.require_space(tmp_path, 1e9)


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(tools.SetupFailure, match="LLAMABATCH_CACHE"):
        tools.make_folder(tmp_path / "file" / "cache")


def test_run_logged_shows_life_and_keeps_the_output(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tools.Heartbeat, "PLAIN_INTERVAL_S", 0.0)
    beat, seen = tools.Heartbeat.beat, tmp_path / "seen"
    monkeypatch.setattr(
        tools.Heartbeat, "beat", lambda self, progress: (beat(self, progress), progress and seen.touch())
    )
    code = (
        "import os, time; print('[7/83] compiling', flush=True)\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
        "raise SystemExit(3)"
    )
    assert tools.run_logged([sys.executable, "-c", code], tmp_path / "log", "building") == 3
    assert re.search(r"building: \d:\d\d \[7/83\]", capsys.readouterr().err)
    assert "[7/83] compiling" in (tmp_path / "log").read_text()


def test_only_the_last_command_explains_a_failure(tmp_path):
    log = tmp_path / "log"
    log.write_text("$ first\nNo space left on device\n$ second\nsomething else\n")
    assert tools.explain(log, "unknown") == "unknown"
    log.write_text("$ first\nNo space left on device\n")
    assert "disk is full" in tools.explain(log, "unknown")


def test_failures_end_in_one_sentence(capsys):
    def interrupted():
        raise KeyboardInterrupt

    def full():
        raise OSError(28, "No space left on device", "a/file")

    assert tools.main_guard(interrupted) == 130
    assert tools.main_guard(full) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert "No space left on device (a/file)" in err


def test_a_missing_venv_module_is_said_so(monkeypatch):
    monkeypatch.setattr(bootstrap.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(tools.SetupFailure, match="lacks venv and ensurepip"):
        bootstrap.require_python()


def test_the_stamp_follows_project_wheel_and_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    (tmp_path / "pyproject.toml").write_text("a")
    first = bootstrap.stamp_text(Path("a.whl"))
    assert bootstrap.stamp_text(Path("b.whl")) != first
    (tmp_path / "pyproject.toml").write_text("b")
    assert bootstrap.stamp_text(Path("a.whl")) != first


def test_a_strange_venv_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(bootstrap, "VENV", tmp_path)
    monkeypatch.setattr(bootstrap, "PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr(bootstrap, "STAMP", tmp_path / "stamp")
    (tmp_path / "precious").touch()
    with pytest.raises(tools.SetupFailure, match="remove it"):
        bootstrap.make_venv(tmp_path / "log")
    assert (tmp_path / "precious").exists()


@pytest.mark.skipif(not (ROOT / "Makefile").is_file(), reason="not in a checkout")
def test_make_refuses_an_old_python(tmp_path):
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    command = ["make", "-C", ROOT, "setup", f"PYTHON={old}"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""})
    assert done.returncode != 0
    assert "Python 3.10 or newer" in done.stderr


@pytest.mark.parametrize("prefix", ["", recipe.PREFIX])
def test_the_libraries_of_a_build_are_found_with_and_without_a_prefix(tmp_path, prefix):
    for folder, name in (("bin", "llama"), ("bin", "ggml-base"), ("vendor/llama.cpp/tools/mtmd", "mtmd")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / f"lib{prefix}{name}.so").touch()
    (tmp_path / "CMakeFiles").mkdir()
    (tmp_path / "CMakeFiles" / f"lib{prefix}trial.so").touch()
    found = [path.name for path in recipe.libraries(tmp_path, prefix)]
    assert sorted(found) == [f"lib{prefix}{name}.so" for name in ("ggml-base", "llama", "mtmd")]


@pytest.mark.skipif(sys.platform == "win32", reason="no process groups")
def test_a_set_up_that_is_terminated_takes_its_compilers_with_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from llamabatch.native_build import tools\n"
        "child = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "line = [sys.executable, '-c', child]\n"
        "sys.exit(tools.main_guard(lambda: tools.run_logged(line, Path(sys.argv[1]), 'a title')))"
    )
    log = tmp_path / "log"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(log)], env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL
    )
    found = until(lambda: re.search(r"^(\d+)$", log.read_text() if log.exists() else "", flags=re.MULTILINE))
    process.terminate()
    assert process.wait(60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[1]), 0)
