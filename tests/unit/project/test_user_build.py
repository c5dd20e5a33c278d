"""`llamabatch build` without a compiler: the steps of a build, its failures, the files that it leaves, and the list."""

import errno
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from llamabatch.cli import build as command
from llamabatch.cli import cli
from llamabatch.native_build import binding, builds, machine, recipe, sampler_library, source, tools
from llamabatch.native_build.tools import SetupFailure
from llamabatch.utils.version import __version__
from tests.unit.project import test_binding
from tests.waiting import PATIENCE_S, until

make_source = test_binding.source
NINJA = "[1/4] Building CXX object a.o\n[2/4] Building CXX object b.o\n[4/4] Linking CXX shared library\n"


class Compiler:
    """Replaces run_logged: stores the commands, writes a recorded output, and makes empty libraries."""

    def __init__(self):
        self.commands, self.shown = [], []
        self.status, self.output, self.error = 0, NINJA, None
        self.cmake_cache = ""
        self.prefix = recipe.PREFIX

    def __call__(self, line, log, title, environment=None, display=None):
        line = [str(part) for part in line]
        self.commands.append(line)
        with open(log, "a") as file:
            file.write(f"$ {' '.join(line)}\n{self.output}")
        if "-B" in line:
            place = Path(line[line.index("-B") + 1])
            place.mkdir(parents=True, exist_ok=True)
            (place / "CMakeCache.txt").write_text(self.cmake_cache)
        if "--build" in line:
            if self.error:
                raise self.error
            libraries = Path(line[line.index("--build") + 1]) / "bin"
            libraries.mkdir()
            for name in ("llama", "ggml", "mtmd"):
                (libraries / f"lib{self.prefix}{name}.so").write_text(name)
            (libraries / "libother.so").touch()
            return self.status
        return 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    for name in ("CMAKE_ARGS", *machine._ENVIRONMENT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine, "_compiler", lambda: ("g++ 12", "#define __AVX2__ 1\n#define __FMA__ 1"))
    return tmp_path / "cache"


@pytest.fixture
def compiler(cache, make_source, monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(recipe, "run_logged", compiler)
    monkeypatch.setattr(builds, "run_logged", compiler)
    monkeypatch.setattr(builds, "require_space", lambda folder, gigabytes: None)
    monkeypatch.setattr(recipe, "with_cmake", lambda place, log, python: dict(os.environ))
    monkeypatch.setattr(binding, "NEEDED_PACKAGES", ("json",))
    monkeypatch.setattr(source, "patched_tree", lambda log, place, python: make_source)
    monkeypatch.setattr(sampler_library, "compile_library", lambda library: library.write_text("sampler") and "")
    with open(make_source / "llama_cpp" / "mtmd_cpp.py", "w") as file:
        file.write("import llama_cpp.llama_cpp as llama_cpp\n")
    return compiler


@pytest.fixture
def plan(cache):
    return machine.make_plan("cpu")


@pytest.fixture
def cuda_plan(cache, monkeypatch):
    monkeypatch.setattr(machine, "_nvcc_version", lambda: "cuda_13.0")
    monkeypatch.setenv("CUDAARCHS", "90")
    return machine.make_plan("cuda")


def left(cache):
    return sorted(path.name for path in (cache / "builds").iterdir())


def run(*arguments):
    return CliRunner().invoke(cli, ["build", *arguments], catch_exceptions=False)


def test_a_build_has_the_layout_of_the_package(compiler, cache):
    done = run()
    assert done.exit_code == 0, done.output
    package = Path(done.stdout.strip())
    assert package == cache / "builds" / package.parent.name / "llamabatch_llama"
    assert {"__init__.py", "_binding", "lib", "licenses", "llamabatch_build.json"} <= set(os.listdir(package))
    libraries = {"libllamabatch-llama.so", "libllamabatch-ggml.so", "libllamabatch-mtmd.so", sampler_library.LIBRARY}
    assert set(os.listdir(package / "lib")) == libraries
    marker = json.loads((package / "llamabatch_build.json").read_text())
    assert marker["key"] == package.parent.name
    assert marker["patches"].keys() == {path.name for path in source.patches()}
    assert (marker["release"], marker["cpu_flags"], marker["portable"]) == (__version__, ["avx2", "fma"], False)
    assert left(cache) == sorted([package.parent.name, "lock"])
    configure, compile_ = compiler.commands
    assert {"-DGGML_NATIVE=ON", "-DLLAVA_BUILD=ON", *recipe.names_flags()} <= set(configure)
    assert compile_[-2:] == ["llama", "mtmd"]


def test_a_build_is_made_once_and_asking_again_makes_it_the_newest(compiler, cache):
    first = Path(run().stdout.strip())
    second = Path(run("--portable").stdout.strip())
    assert [each.portable for each in builds.kept()] == [True, False]
    assert json.loads((second / "llamabatch_build.json").read_text())["cpu_flags"] in (list(machine._PORTABLE_X86), [])
    again = run()
    assert "This build existed already" in again.stderr
    assert Path(again.stdout.strip()) == first
    assert [each.key for each in builds.kept()] == [first.parent.name, second.parent.name]
    assert sum("--build" in line for line in compiler.commands) == 2


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus\n", "the compiler ran out of memory"),
        ("FAILED: something else\n", "see the end of the log"),
    ],
)
def test_a_failed_build_is_one_sentence_and_leaves_the_log(compiler, cache, output, reason):
    compiler.status, compiler.output = 1, output
    done = run()
    assert done.exit_code == 3
    assert done.stdout == ""
    assert "Error: The build of llama.cpp failed: " in done.stderr
    assert reason in done.stderr
    [log] = (cache / "logs").iterdir()
    assert str(log) in done.stderr
    assert output in log.read_text()
    assert left(cache) == ["lock"]


def test_an_interrupted_build_leaves_nothing(compiler, cache, plan, capsys):
    compiler.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        builds.make(plan, __version__)
    assert "stopping: the unfinished build is removed" in capsys.readouterr().err
    assert left(cache) == ["lock"]
    compiler.error = None
    assert builds.make(plan, __version__)[1]


def test_what_a_killed_build_left_goes_with_the_next_one(compiler, cache, plan):
    (cache / "builds" / "build-killed" / "ready").mkdir(parents=True)
    (cache / "builds" / plan.key / "llamabatch_llama").mkdir(parents=True)  # the package has no marker
    assert builds.kept()[0].made == 0
    builds.make(plan, __version__)
    assert left(cache) == sorted([plan.key, "lock"])
    assert builds.is_complete(plan.key)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None])
def test_a_stopped_build_for_gpus_goes_on_where_it_was(error, compiler, cache, plan, cuda_plan, monkeypatch, capsys):
    sources = []
    real = source.patched_tree
    monkeypatch.setattr(source, "patched_tree", lambda *given: sources.append(given) or real(*given))
    compiler.error, compiler.status = error, 1
    with pytest.raises((KeyboardInterrupt, SetupFailure)):
        builds.make(cuda_plan, __version__)
    place = cache / "builds" / f"build-{cuda_plan.key}"
    assert f"compiled files stay in {place}" in capsys.readouterr().err
    assert left(cache) == [place.name, "lock"]
    assert builds.kept() == []
    compiler.error, compiler.status = None, 0
    shutil.rmtree(place / "build", ignore_errors=True)  # the compiler makes the folder again
    package, built = builds.make(cuda_plan, __version__)
    assert built
    assert package.is_dir()
    assert "going on with what an earlier run compiled" in capsys.readouterr().err
    assert len(sources) == 1
    assert len({line[line.index("--build") + 1] for line in compiler.commands if "--build" in line}) == 1
    assert left(cache) == sorted([cuda_plan.key, "lock"])


def test_a_cuda_build_finds_its_toolkit_wherever_it_lies(compiler, cache, cuda_plan, plan, tmp_path):
    library = tmp_path / "CUDA 13" / "lib64" / "libcublas.so"
    library.parent.mkdir(parents=True)
    library.touch()
    compiler.cmake_cache = (
        f"// of CUDA\nCUDA_cublas_LIBRARY:FILEPATH={library}\nCUDA_cudart_LIBRARY:FILEPATH={library}\n"
        "CMAKE_SHARED_LINKER_FLAGS:STRING=-Wl,-O1\nCUDA_nppc_LIBRARY:FILEPATH=CUDA_nppc_LIBRARY-NOTFOUND\n"
    )
    builds.make(cuda_plan, __version__)
    [flag] = [part for line in compiler.commands for part in line if "SHARED_LINKER_FLAGS" in part]
    assert flag == f"-DCMAKE_SHARED_LINKER_FLAGS=-Wl,-O1 '-Wl,-rpath,{library.parent}'"
    known = compiler.cmake_cache.replace("-Wl,-O1", flag.partition("=")[2])
    assert recipe.toolkit_flag(known) == flag  # a build that is continued links nothing again
    compiler.commands.clear()
    builds.make(plan, __version__)
    assert not [part for line in compiler.commands for part in line if "SHARED_LINKER_FLAGS" in part]


def test_a_source_that_was_not_whole_is_made_anew(compiler, cache, cuda_plan, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as first:
        first.setattr(source, "patched_tree", stopped)
        with pytest.raises(KeyboardInterrupt):
            builds.make(cuda_plan, __version__)
    half = cache / "builds" / f"build-{cuda_plan.key}" / source.FOLDER / "half"
    half.mkdir(parents=True)
    real = source.patched_tree
    monkeypatch.setattr(source, "patched_tree", lambda *given: half.exists() or real(*given))
    assert builds.make(cuda_plan, __version__)[1]


def test_another_build_removes_a_stopped_one(compiler, cache, plan, cuda_plan):
    compiler.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        builds.make(cuda_plan, __version__)
    compiler.error = None
    builds.make(plan, __version__)
    assert left(cache) == sorted([plan.key, "lock"])


@pytest.mark.parametrize(("missing", "accepted"), [("libcuda.so.1", True), ("libcublas.so.13", False)])
def test_a_build_without_the_driver_of_the_gpu_is_kept(
    missing, accepted, compiler, cache, cuda_plan, monkeypatch, capsys
):
    """As when a container is built: the toolkit has a stub library for linking, but no driver to load."""
    complaint = f"RuntimeError: Failed to load shared library: {missing}: cannot open shared object file"

    def prove(folder):
        raise SetupFailure(f"The package in {folder} does not load ({complaint}).")

    monkeypatch.setattr(binding, "prove", prove)
    if accepted:
        assert builds.make(cuda_plan, __version__)[1]
        assert "not loaded here: libcuda.so.1 of NVIDIA's driver is missing" in capsys.readouterr().err
    else:
        with pytest.raises(SetupFailure, match="does not load"):
            builds.make(cuda_plan, __version__)


def test_without_git_nothing_is_downloaded(compiler, cache, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    done = run()
    assert done.exit_code == 3
    assert "Neither git nor patch is installed: install git" in done.stderr
    assert compiler.commands == []


def test_packages_of_the_binding_are_asked_for_first(compiler, cache, monkeypatch):
    monkeypatch.setattr(binding, "NEEDED_PACKAGES", ("json", "not_there", "nor_this"))
    assert "pip install not-there nor-this" in run().stderr
    assert compiler.commands == []


def test_a_full_disk_is_said_so(compiler, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "lib/libllama.so")

    monkeypatch.setattr(shutil, "copy2", full)
    done = run()
    assert done.exit_code == 3
    assert "No space left on device (lib/libllama.so): check the disk" in done.stderr
    assert left(cache) == ["lock"]


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_a_second_build_waits_and_takes_the_first(compiler, cache, plan, capsys):
    (cache / "builds").mkdir(parents=True)
    found = []
    with tools.lock(cache / "builds" / "lock"):
        waiting = threading.Thread(target=lambda: found.append(builds.make(plan, __version__)))
        waiting.start()
        until(lambda: "another build is under way, waiting for it" in capsys.readouterr().err)
        assert waiting.is_alive()
        (builds.package_of(plan.key)).mkdir(parents=True)
        (builds.package_of(plan.key) / "llamabatch_build.json").write_text("{}")
    waiting.join(PATIENCE_S)
    assert found == [(builds.package_of(plan.key), False)]
    assert compiler.commands == []


def test_a_build_without_libllama_is_refused(compiler, cache, plan):
    compiler.prefix = "renamed-"
    with pytest.raises(SetupFailure, match="made no library llamabatch-llama"):
        builds.make(plan, __version__)
    assert left(cache) == ["lock"]


def test_a_sampler_that_does_not_compile_stops_nothing(compiler, cache, plan, monkeypatch, capsys):
    monkeypatch.setattr(sampler_library, "compile_library", lambda library: "an old compiler")
    package, built = builds.make(plan, __version__)
    assert built
    assert not (package / "lib" / sampler_library.LIBRARY).exists()
    assert "the sampler was not compiled, numpy takes its place: an old compiler" in capsys.readouterr().err


def test_without_pip_an_environment_lends_its_own(compiler, cache, plan, monkeypatch):
    monkeypatch.setattr(builds.importlib.util, "find_spec", lambda name: None if name == "pip" else name)
    given = []
    monkeypatch.setattr(recipe, "with_cmake", lambda place, log, python: given.append(python) or dict(os.environ))
    builds.make(plan, __version__)
    assert compiler.commands[0][1:3] == ["-m", "venv"]
    assert Path(given[0]).parents[1].name == "python"


def test_the_list_and_removal(compiler, cache):
    assert "No builds are kept" in run("--list").stderr
    first, second = (Path(run(*arguments).stdout.strip()).parent for arguments in ((), ("--portable",)))
    listed = run("--list").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [[second.name, "cpu"], [first.name, "cpu"]]
    unknown = run("--remove", "xyz")
    assert unknown.exit_code == 2
    assert "No build has the key 'xyz'; there are: " in unknown.stderr
    assert first.name in unknown.stderr
    assert run("--remove", first.name[:6]).exit_code == 0
    assert left(cache) == sorted([second.name, "lock"])
    assert "No build has the key ''" in run("--remove", "").stderr


def test_a_beginning_of_two_keys_is_refused(cache):
    for key in ("abc1", "abc2", "abc"):
        (cache / "builds" / key).mkdir(parents=True)
    with pytest.raises(SetupFailure, match=r"3 builds begin with 'ab': .* abc, abc1, abc2\."):
        builds.remove("ab")
    assert builds.remove("abc").name == "abc"
    assert left(cache) == ["abc1", "abc2"]


@pytest.mark.parametrize(
    "wrong", [("--list", "--portable"), ("--list", "--remove", "a"), ("--remove", "a", "--backend", "cpu")]
)
def test_options_that_do_not_go_together_are_refused(cache, wrong):
    done = run(*wrong)
    assert done.exit_code == 2
    assert "go without other options" in done.output


def test_a_backend_that_cannot_be_built_is_refused_with_what_is_missing(cache, monkeypatch):
    monkeypatch.setattr(machine, "_output", lambda line: None)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(sys, "platform", "linux")
    for backend, words in (("cuda", "nvcc"), ("vulkan", "glslc, the Vulkan headers"), ("metal", "macOS only")):
        done = run("--backend", backend)
        assert done.exit_code == 3
        assert words in done.stderr
    assert "'auto', 'cpu', 'cuda', 'metal', 'rpc', 'vulkan'" in run("--backend", "opencl").output


@pytest.fixture
def sdk(cache, tmp_path, monkeypatch):
    """A Vulkan SDK with the files that the build checks."""
    if sys.platform == "win32" or not sampler_library.find_compiler():
        pytest.skip("no compiler of POSIX")
    sdk = tmp_path / "sdk"
    for header in machine._VULKAN_HEADERS.values():
        (sdk / "include" / header).parent.mkdir(parents=True)
        (sdk / "include" / header).touch()
    (sdk / "include" / "vulkan" / "vulkan.hpp").write_text(
        "#define VK_HEADER_VERSION 275\n#define VK_EXT_layer_settings 1\n"
    )
    (sdk / "bin").mkdir()
    (sdk / "bin" / "glslc").write_text("#!/bin/sh\necho shaderc v2024.1\n")
    (sdk / "bin" / "glslc").chmod(0o755)
    (sdk / "lib").mkdir()
    empty = ["-shared", "-fPIC", "-x", "c++", os.devnull, "-o", str(sdk / "lib" / "libvulkan.so")]
    subprocess.run([*sampler_library.find_compiler(), *empty], check=True)
    monkeypatch.delenv("CMAKE_ARGS", raising=False)
    monkeypatch.delenv("CMAKE_PREFIX_PATH", raising=False)
    monkeypatch.setenv("VULKAN_SDK", str(sdk))
    return sdk


def test_vulkan_is_looked_for_with_the_compiler(sdk, monkeypatch):
    plan = machine.make_plan("vulkan")
    assert "-DGGML_VULKAN=ON" in plan.flags
    assert plan.compiler.endswith("; shaderc v2024.1")  # another shader compiler makes other shaders
    monkeypatch.setenv("CMAKE_PREFIX_PATH", str(sdk))
    monkeypatch.delenv("VULKAN_SDK")
    assert machine.make_plan("vulkan") == plan
    (sdk / "include" / "vulkan" / "vulkan.hpp").write_text("#error no\n")
    with pytest.raises(SetupFailure, match="lacks the Vulkan headers: install"):
        machine.make_plan("vulkan")
    monkeypatch.setenv("CMAKE_ARGS", "-DVulkan_INCLUDE_DIR=/mine")  # nobody looks for what the user gives CMake
    assert "-DVulkan_INCLUDE_DIR=/mine" in machine.make_plan("vulkan").flags


def test_what_vulkan_lacks_is_named_before_the_compile(sdk):
    (sdk / "include" / "vulkan" / "vulkan.hpp").write_text(
        "#define VK_HEADER_VERSION 239\n"
        "#define VK_HEADER_VERSION_COMPLETE VK_MAKE_API_VERSION(0, 1, 3, VK_HEADER_VERSION)\n"
    )
    (sdk / "lib" / "libvulkan.so").unlink()
    (sdk / "bin" / "glslc").unlink()
    with pytest.raises(SetupFailure) as failure:
        machine.make_plan("vulkan")
    lacks = str(failure.value).partition(": install")[0]
    if not shutil.which("glslc"):
        assert "the shader compiler glslc" in lacks
    assert "the Vulkan headers of 1.3.275 or newer (those here are of 1.3.239)" in lacks
    assert all(words in str(failure.value) for words in ("apt install", "dnf install", "brew install", "VULKAN_SDK"))


def test_rpc_is_a_backend_beside_the_cpu(cache):
    plan = machine.make_plan("rpc")
    assert "-DGGML_RPC=ON" in plan.flags
    assert plan.key != machine.make_plan("cpu").key


def test_a_portable_build_does_not_depend_on_the_cpu(cache, monkeypatch):
    one = machine.make_plan("cpu", portable=True)
    monkeypatch.setattr(machine, "_compiler", lambda: ("g++ 12", "#define __AVX512F__ 1"))
    assert machine.make_plan("cpu", portable=True) == one
    assert "-DGGML_NATIVE=OFF" in one.flags
    assert one.key != machine.make_plan("cpu").key


def test_instruction_sets_of_the_compiler_in_linux_names():
    macros = "#define __AVX512VNNI__ 1\n#define __AMX_TILE__ 1\n#define __SSE__ 1\n#define __AVX512F__ 1"
    assert machine.cpu_flags(macros) == ("amx_tile", "avx512_vnni", "avx512f")


@pytest.mark.parametrize(
    ("progress", "share"), [("[7/28]", 0.25), ("[ 45%]", 0.45), ("[100%]", 1.0), ("[0/0]", 0.0), ("", None)]
)
def test_the_share_that_is_compiled(progress, share):
    assert command.fraction(progress) == share


def test_the_bar_follows_the_output_of_the_compilers(tmp_path):
    screen = io.StringIO()
    bar = command.Bar(Console(file=screen, force_terminal=True, width=80), "building llama.cpp (cpu)")
    beat, seen = bar.beat, tmp_path / "seen"
    bar.beat = lambda progress: (beat(progress), progress and seen.touch())
    line = "[ 50%] Building CXX object b.o"
    code = f"import os, time; print({line!r}, flush=True)\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.01)"
    assert tools.run_logged([sys.executable, "-c", code], tmp_path / "log", "building", display=bar) == 0
    assert "building llama.cpp (cpu)" in screen.getvalue()
    assert "50%" in screen.getvalue()


def fake_cmake(folder, version):
    folder.mkdir()
    (folder / "cmake").write_text(f"#!/bin/sh\necho cmake version {version}\n")
    (folder / "cmake").chmod(0o755)
    return str(folder)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX shells")
def test_an_old_cmake_is_replaced_in_the_build_alone(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(recipe, "run_logged", lambda line, *_: lines.append([str(part) for part in line]) or 0)
    monkeypatch.setenv("PATH", fake_cmake(tmp_path / "new", "3.21.0"))
    assert recipe.with_cmake(tmp_path, tmp_path / "log") == dict(os.environ)
    assert lines == []
    monkeypatch.setenv("PATH", fake_cmake(tmp_path / "old", "3.16.3"))
    environment = recipe.with_cmake(tmp_path, tmp_path / "log", "a-python")
    assert lines[0][0] == "a-python"
    assert lines[0][-4:] == ["--target", str(tmp_path / "cmake"), "cmake", "ninja"]
    assert environment["PATH"] == f"{tmp_path / 'cmake' / 'bin'}{os.pathsep}{tmp_path / 'old'}"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path / "cmake")
    monkeypatch.setattr(recipe, "run_logged", lambda line, log, title: log.write_text("$ pip\n") and 1)
    with pytest.raises(SetupFailure, match=r"cmake 3\.21 or newer is missing and could not be installed: pip failed"):
        recipe.with_cmake(tmp_path, tmp_path / "log")


def test_no_compiler_names_what_to_install(cache, monkeypatch):
    monkeypatch.undo()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    done = run()
    assert done.exit_code == 3
    for words in ("apt install build-essential", "dnf install gcc-c++", "apk add build-base", "xcode-select"):
        assert words in done.stderr


def test_the_builder_runs_on_a_bare_python():
    """The module is imported without any package of the environment."""
    code = "import llamabatch.native_build.builds"
    environment = {**os.environ, "PYTHONPATH": str(Path(source.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
