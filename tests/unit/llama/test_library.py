"""Loading llama_cpp, without llama_cpp: the environment, the layout check, the verdict on extra buffers."""

import ctypes
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamabatch.errors import SetupError
from llamabatch.llama import abi_check, build_info, environment, extra_buffers, library, probe_runs
from llamabatch.planning import binding_choice
from llamabatch.planning.binding_choice import Build, Origin

MB = 1 << 20


@pytest.mark.parametrize(("size", "spins"), [(3 * MB, "3000"), (600 * MB, "1000"), (None, "1000")])
def test_spins_follow_the_size_of_the_model(size, spins):
    assert environment.environment_defaults(size) == {"GOMP_SPINCOUNT": spins, "GGML_NO_BACKTRACE": "1"}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, {"GOMP_SPINCOUNT", "GGML_NO_BACKTRACE"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GGML_NO_BACKTRACE"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"GGML_NO_BACKTRACE"}),
        ({"GGML_NO_BACKTRACE": ""}, {"GOMP_SPINCOUNT"}),
    ],
)
def test_what_the_user_has_set_stays(given, missing, monkeypatch):
    assert set(environment.undecided(None, given)) == missing
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "GGML_NO_BACKTRACE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with environment.prepared(None):
        added = {name: value for name, value in os.environ.items() if name not in before}
        assert {name: os.environ[name] for name in given} == given
    assert set(added) == missing
    assert set(os.environ) - set(before) == missing - {"GOMP_SPINCOUNT"}  # read at load; children choose again
    if "GGML_NO_BACKTRACE" in added:
        monkeypatch.delenv("GGML_NO_BACKTRACE")


def test_a_libgomp_that_came_first_is_reported(monkeypatch, caplog):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(environment, "is_mapped", lambda name: True)
    with caplog.at_level(logging.DEBUG, environment.__name__), environment.prepared(None):
        pass
    assert "too late" in caplog.text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'diskcache'", name="diskcache"), "pip install diskcache"),
        (RuntimeError("Failed to load shared library:\nlibcudart.so.12"), "cannot load its library.*libcudart"),
        (AttributeError("undefined symbol: llama_new"), "differ.*llama_new"),
    ],
)
def test_a_missing_or_broken_library_is_one_sentence(error, words, monkeypatch):
    def fail(name):
        raise error

    folder = Path("/site/llama_cpp")
    monkeypatch.setattr(library, "_module", None)
    monkeypatch.setattr(
        binding_choice, "_in_order", lambda: iter([(Build(Origin.INSTALLED, folder, folder / "lib"), "")])
    )
    monkeypatch.setattr(library, "_is_on_path", lambda build: True)
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    monkeypatch.setattr(importlib, "import_module", fail)
    binding_choice.forget()
    with pytest.raises(SetupError, match=f"{words}.*make setup") as caught:
        library.load()
    assert "\n" not in str(caught.value)
    assert "the installed llama-cpp-python (/site/llama_cpp)" in str(caught.value)


def test_a_wrong_name_of_a_variant_is_an_error_and_no_reason_to_take_another_build(monkeypatch):
    builds = [
        Build(origin, Path(origin.name), Path(origin.name) / "lib") for origin in (Origin.WHEEL, Origin.INSTALLED)
    ]

    def load_cpu(module, folder):
        raise SetupError("no variant runs here")

    monkeypatch.setattr(library, "_module", None)
    monkeypatch.setattr(binding_choice, "_in_order", lambda: iter([(build, "") for build in builds]))
    monkeypatch.setattr(binding_choice, "_problem", lambda build, is_last: "")
    monkeypatch.setattr(library, "import_build", lambda build: SimpleNamespace())
    monkeypatch.setattr(library.log, "forward", lambda module: None)
    monkeypatch.setattr(library, "library_dir", lambda module: Path("lib"))
    monkeypatch.setattr(library.backends, "load_cpu", load_cpu)
    for forced, words in ((True, "^no variant runs here$"), (False, "llamabatch-llama .*; the installed llama-cpp-")):
        binding_choice.forget()
        monkeypatch.setenv("LLAMABATCH_CPU_VARIANT", "zen9" if forced else "")
        with pytest.raises(SetupError, match=words):
            library.load()


@pytest.fixture(autouse=True)
def choose_anew():
    yield
    binding_choice.forget()


def test_importing_the_room_does_not_import_llama_cpp():
    code = (
        "import sys; from llamabatch.llama import abi_check, environment, extra_buffers, library\n"
        "assert 'llama_cpp' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def fake_binding(**changed):
    """Returns a binding whose structs have the fields that we use, and whose functions need no library."""

    def struct(name):
        return type(name, (ctypes.Structure,), {"_fields_": [(f, ctypes.c_int) for f in abi_check._FIELDS[name]]})

    names = {name: struct(name) for name in abi_check._FIELDS} | dict.fromkeys(abi_check._FUNCTIONS, print)
    return SimpleNamespace(**(names | {"__version__": "0.3.99"} | changed))


def test_a_missing_function_is_named():
    binding = fake_binding()
    del binding.llama_decode
    with pytest.raises(SetupError, match=r"llama-cpp-python 0\.3\.99 has no llama_decode$"):
        abi_check.check_layout(binding)


def test_a_missing_field_is_named():
    class Batch(ctypes.Structure):
        _fields_ = (("n_tokens", ctypes.c_int32),)

    with pytest.raises(SetupError, match="llama_batch without token"):
        abi_check.check_layout(fake_binding(llama_batch=Batch))


@pytest.mark.parametrize(("n_batch", "words"), [(7, r"n_batch is 7, not in 32\.\.65536"), (2048, None)])
def test_a_default_out_of_its_range_is_named(n_batch, words, monkeypatch):
    class Params(ctypes.Structure):
        _fields_ = (("n_batch", ctypes.c_uint32),)

    monkeypatch.setattr(abi_check, "_same_size", lambda *_: True)
    monkeypatch.setattr(abi_check, "_call_padded", lambda *_: Params(n_batch))
    check = (SimpleNamespace(p=Params), "p", "defaults", {"n_batch": (32, 65536)})
    if words is None:
        abi_check._check_defaults(*check)
    else:
        with pytest.raises(SetupError, match=words):
            abi_check._check_defaults(*check)


@pytest.mark.parametrize(
    ("libraries", "marker", "found"),
    [
        ("site/llama_cpp/lib", "site/llama_cpp", True),
        ("elsewhere/llama_cpp/lib", "elsewhere/llama_cpp", True),  # in the folder of LLAMA_CPP_LIB_PATH
        ("built", "built", True),
        ("built", "", False),
        ("site/llama_cpp/lib", None, False),
    ],
)
def test_the_marker_of_a_build_stands_with_its_libraries(libraries, marker, found, tmp_path):
    (tmp_path / libraries).mkdir(parents=True)
    if marker is not None:
        (tmp_path / marker / binding_choice.MARKER).write_text('{"patches": {"0001": "hash"}}')
    binding = SimpleNamespace(
        __file__=str(tmp_path / "site" / "llama_cpp" / "__init__.py"),
        llama_cpp=SimpleNamespace(_lib=SimpleNamespace(_name=str(tmp_path / libraries / "libllama.so"))),
    )
    assert (build_info.build_marker(binding) is not None) == found


@pytest.fixture
def variants(tmp_path):
    """Returns a binding without ggml, whose libllama is in a folder with a ggml-cpu library for each kind of CPU."""
    folder = tmp_path / "lib"
    folder.mkdir()
    for name in ("libggml-cpu-alderlake.so", "libggml-cpu-haswell.so", "libllama.so"):
        (folder / name).touch()
    return SimpleNamespace(llama_cpp=SimpleNamespace(_lib=SimpleNamespace(_name=str(folder / "libllama.so"))))


def test_the_cpu_library_is_the_mapped_one_of_its_folder(variants, tmp_path, monkeypatch):
    folder, other = tmp_path / "lib", tmp_path / "other" / "libggml-cpu-zen4.so"
    lines = [
        "7f00-7f01 r--p 00000000 08:01 17                         /usr/lib/libm.so.6",
        f"7f02-7f03 r-xp 00000000 08:01 18 {other}",
        f"7f04-7f05 r-xp 00000000 08:01 19 {folder / 'libggml-cpu-haswell.so'}",
        "7f06-7f07 rw-p 00000000 00:00 0",
    ]
    monkeypatch.setattr(build_info, "_mapped_files", lambda: lines)
    assert build_info.cpu_library(variants) == folder / "libggml-cpu-haswell.so"


def test_where_nothing_tells_the_mapped_files_the_names_count(variants, tmp_path, monkeypatch):
    monkeypatch.setattr(build_info, "_mapped_files", list)
    assert build_info.cpu_library(variants).name == "libggml-cpu-alderlake.so"
    for path in (tmp_path / "lib").glob("*cpu*"):
        path.unlink()
    assert build_info.cpu_library(variants).name == "libllama.so"


@pytest.fixture
def amx_machine(tmp_path, monkeypatch):
    """A stock build on a CPU with AMX. `runs` collects the probes. `ends_with` is their exit code or exception."""
    cpu_library = tmp_path / "libggml-cpu.so"
    cpu_library.write_bytes(b"machine code")
    machine = SimpleNamespace(runs=[], ends_with=-signal.SIGSEGV, marker=None, library=cpu_library)

    def run(command, **_):
        machine.runs.append(command)
        if isinstance(machine.ends_with, Exception):
            raise machine.ends_with
        return SimpleNamespace(returncode=machine.ends_with, stdout=b"")

    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(extra_buffers, "_verdicts", {})
    monkeypatch.setattr(extra_buffers, "_cpu_has_amx", lambda: True)
    monkeypatch.setattr(build_info, "cpu_library", lambda module: cpu_library)
    monkeypatch.setattr(build_info, "build_marker", lambda module: machine.marker)
    monkeypatch.setattr(probe_runs.paths, "bundled_model", lambda: cpu_library)
    monkeypatch.setattr(probe_runs, "run_program", run)
    machine.module = SimpleNamespace(llama_print_system_info=lambda: b"AVX2 = 1 | AMX_INT8 = 1 | ")
    return machine


def new_process():
    extra_buffers._verdicts.clear()


def test_a_crash_turns_them_off_says_so_once_and_is_kept(amx_machine, caplog):
    assert [extra_buffers.safe(amx_machine.module) for _ in range(3)] == [False] * 3
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "make setup" in caplog.text
    new_process()
    assert not extra_buffers.safe(amx_machine.module)
    assert len(amx_machine.runs) == 1


def test_another_library_is_tried_again(amx_machine):
    assert not extra_buffers.safe(amx_machine.module)
    new_process()
    amx_machine.library.write_bytes(b"better code")
    amx_machine.ends_with = 0
    assert extra_buffers.safe(amx_machine.module)
    assert len(amx_machine.runs) == 2


def test_a_kept_verdict_is_honoured(amx_machine):
    extra_buffers._keep(amx_machine.library, True)
    assert extra_buffers.safe(amx_machine.module)
    assert amx_machine.runs == []


def test_a_broken_verdict_is_no_verdict(amx_machine):
    extra_buffers._keep(amx_machine.library, True)
    (kept,) = (amx_machine.library.parent / "cache" / "verdicts").iterdir()
    for text in ("", "[]", json.dumps({"safe": "yes"})):
        kept.write_text(text)
        assert extra_buffers.kept_verdict(amx_machine.library) is None


@pytest.mark.parametrize("end", [3, -signal.SIGKILL, subprocess.TimeoutExpired("probe", 60), OSError("no fork")])
def test_no_answer_is_caution_and_not_kept(amx_machine, end, caplog):
    amx_machine.ends_with = end
    assert not extra_buffers.safe(amx_machine.module)
    assert "no result" in caplog.text
    assert extra_buffers.kept_verdict(amx_machine.library) is None


def test_a_cache_that_cannot_be_written_costs_a_probe_a_process(amx_machine, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        assert not extra_buffers.safe(amx_machine.module)
        new_process()
    assert len(amx_machine.runs) == 2


def test_the_patched_build_needs_no_probe(amx_machine, caplog):
    amx_machine.marker = {"patches": {extra_buffers.PATCH: "hash"}}
    assert extra_buffers.safe(amx_machine.module)
    amx_machine.marker = {"patches": {"0002-other.patch": "hash"}}
    assert not extra_buffers.safe(amx_machine.module)
    assert len(amx_machine.runs) == 1


def test_without_amx_there_is_no_risk(amx_machine, monkeypatch):
    amx_machine.module.llama_print_system_info = lambda: b"AVX2 = 1 | "
    assert extra_buffers.safe(amx_machine.module)
    amx_machine.module.llama_print_system_info = lambda: b"AMX_INT8 = 1 | "
    monkeypatch.setattr(extra_buffers, "_cpu_has_amx", lambda: False)
    assert extra_buffers.safe(amx_machine.module)
    assert amx_machine.runs == []


@pytest.mark.parametrize(
    ("cpu", "wide"),
    [
        ({"AVX2", "FMA", "F16C"}, {"wide8"}),
        ({"AVX2", "FMA", "F16C", "AVX_VNNI"}, {"wide8"}),
        ({"AVX2", "F16C"}, set()),
        ({"AVX2", "FMA", "F16C", "AVX512"}, {"wide"}),
        ({"AVX2", "FMA", "F16C", "AVX512", "AVX512_VNNI"}, {"wide"}),
    ],
)
def test_the_width_of_strips_follows_from_what_the_build_has(cpu, wide, monkeypatch):
    monkeypatch.setattr(library, "_system_features", lambda: dict.fromkeys(cpu | {"REPACK"}, "1"))
    monkeypatch.setattr(library, "_has_patch", lambda name: name == library.WIDE_PATCH)
    assert library.repack_features() & {"wide", "wide8"} == wide


@pytest.mark.parametrize(
    ("lacks", "amx", "prompts"),
    [(set(), True, True), ({"AVX512_BF16"}, True, False), ({"AMX_INT8"}, True, False), (set(), False, False)],
)
def test_rows_of_prompts_have_kernels_of_their_own_where_tiles_of_bf16_are(lacks, amx, prompts, monkeypatch):
    cpu = {"AVX2", "AVX512", "AVX512_BF16", "AMX_INT8", "REPACK"} - lacks
    monkeypatch.setattr(library, "_system_features", lambda: dict.fromkeys(cpu, "1"))
    monkeypatch.setattr(library, "_has_patch", lambda name: True)
    monkeypatch.setattr(library, "_cpu_has_amx", lambda: amx)
    monkeypatch.setattr(library, "_amx_off", False)
    assert ("prompts" in library.repack_features()) is prompts
