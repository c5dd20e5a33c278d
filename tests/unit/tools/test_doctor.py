"""The doctor's findings on a made-up library and environment."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from llamabatch.cli import cli
from llamabatch.errors import SetupError
from llamabatch.llama import library
from llamabatch.llama.library import DeviceInfo, LibraryInfo
from llamabatch.native_build import source
from llamabatch.planning.binding_choice import NO_GPU, Build, Choice, Origin, PassedOver
from llamabatch.tools import doctor
from llamabatch.tools.doctor import Status
from llamabatch.utils import cures, disk_cache
from llamabatch.utils.version import __version__

MARKER = {
    "patches": {path.name: source.sha256_of(path) for path in source.patches()},
    "kernels": {path.name: source.sha256_of(path) for path in source.kernels()},
    "backend": "cpu",
    "compiler": "g++ 12",
}


def info(**changed):
    facts = {
        "choice": Choice(Build(Origin.INSTALLED, Path("/site/llama_cpp"), Path("/site/llama_cpp/lib")), (), ()),
        "binding_version": "0.3.36",
        "llama_version": "0.5.0",
        "library_dir": Path("lib"),
        "libraries": (),
        "marker": MARKER,
        "cpu_variant": None,
        "system_info": "CPU : AVX2 = 1 | FMA = 1 | AVX512 = 1 | AMX_INT8 = 1",
        "devices": (DeviceInfo("CPU", "a CPU", "cpu", 8 << 30, 8 << 30),),
        "supports_gpu_offload": False,
        "max_parallel_sequences": 256,
    }
    return LibraryInfo(**(facts | changed))


@pytest.fixture
def machine(monkeypatch):
    """A quiet machine with AMX and the patched build. Tests change `machine.info` or `machine.safe`."""
    machine = SimpleNamespace(info=info(), safe=True)
    monkeypatch.setattr(library, "library_info", lambda: machine.info)
    monkeypatch.setattr(library, "extra_bufts_safe", lambda: machine.safe)
    monkeypatch.setattr(doctor, "cpu_flags", lambda: frozenset({"avx2", "fma", "avx512f", "amx_int8"}))
    monkeypatch.setattr(doctor, "command_output", lambda *command: "")
    monkeypatch.setattr(doctor.native, "why_not", lambda: "")
    monkeypatch.setattr(doctor.psutil, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(doctor, "_gib", lambda n_bytes: "8.0 GiB")  # free memory would change from call to call
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: object())
    return machine


def finding(name, environment=None):
    report = doctor.examine(environment or {})
    return next(check for check in report.checks if check.name == name)


def test_the_cpu_variant_in_use_is_named(machine):
    assert finding("compiled for").detail.startswith("CPU : ")
    machine.info = info(cpu_variant="haswell")
    assert finding("compiled for").detail.startswith("haswell of several kinds of CPU: CPU : ")
    assert doctor.examine({}).facts["cpu_variant"] == "haswell"


def test_a_sound_machine_has_no_findings(machine):
    report = doctor.examine({})
    assert report.ok
    assert [check for check in report.checks if check.status is not Status.OK] == []
    assert report.facts["llama_cpp_python"] == "0.3.36"


def test_trial_loads_are_counted_and_their_folder_named(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    assert "none" in finding("trial loads").detail
    for key, loads in (("a", True), ("b", True), ("c", False)):
        disk_cache.keep("model", key, {"loads": loads})
    assert finding("trial loads").detail == f"2 files known to load, 1 refused; to forget: {tmp_path / 'verdicts'}"


def test_every_finding_has_a_cure(machine):
    machine.info = info(marker=None, system_info="CPU : AVX2 = 1", devices=(), max_parallel_sequences=1)
    machine.safe = False
    report = doctor.examine({"OMP_WAIT_POLICY": "ACTIVE", "OMP_PROC_BIND": "close", "OMP_THREAD_LIMIT": "0"})
    bad = {check.name for check in report.checks if check.status is not Status.OK}
    assert bad == {
        "devices", "sequences", "patches", "instructions", "extra buffers",
        "$OMP_WAIT_POLICY", "$OMP_PROC_BIND", "$OMP_THREAD_LIMIT",
    }  # fmt: skip
    assert all(bool(check.cure) == (check.status is not Status.OK) for check in report.checks)
    assert not report.ok


def test_no_library_is_an_error_and_the_rest_is_still_told(machine, monkeypatch):
    def fail():
        raise SetupError("llama-cpp-python is not installed: install it.")

    monkeypatch.setattr(library, "library_info", fail)
    report = doctor.examine({})
    errors = [check for check in report.checks if check.status is Status.ERROR]
    assert [check.detail for check in errors] == ["llama-cpp-python is not installed: install it."]
    assert {"cpu", "memory", "environment", "bundled model"} <= {check.name for check in report.checks}


def test_unused_instructions_are_named(machine):
    machine.info = info(system_info="CPU : AVX2 = 1 | FMA = 1")
    check = finding("instructions")
    assert (check.status, check.detail) == (Status.WARN, "not used by this build: AVX-512, AMX-INT8")


def test_a_gpu_that_the_build_ignores(machine, monkeypatch):
    monkeypatch.setattr(doctor, "command_output", lambda *command: "GPU 0: a card")
    assert "BACKEND=cuda" in finding("gpu").cure
    card = DeviceInfo("CUDA0", "a card", "gpu", 1 << 30, 8 << 30)
    machine.info = info(supports_gpu_offload=True, devices=(*machine.info.devices, card))
    assert (finding("gpu").status, finding("gpu").detail) == (Status.OK, "layers are offloaded to CUDA0")


def test_a_build_for_gpus_that_finds_none(machine, monkeypatch):
    monkeypatch.setattr(doctor.binding_choice, "gpu_backend", lambda build: "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine.info = info(supports_gpu_offload=True)
    assert finding("gpu").status is Status.WARN
    assert "but finds none" in finding("gpu").detail
    assert "docker run --gpus all" in finding("gpu").cure
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert finding("gpu").cure == "CUDA_VISIBLE_DEVICES hides all of them: unset it"
    monkeypatch.setattr(doctor.binding_choice, "gpu_backend", lambda build: "vulkan")
    monkeypatch.delenv("GGML_VK_VISIBLE_DEVICES", raising=False)
    assert "mesa-vulkan-drivers" in finding("gpu").cure  # CUDA's variable does not count for Vulkan
    monkeypatch.setenv("GGML_VK_VISIBLE_DEVICES", "7")
    assert finding("gpu").cure.startswith("GGML_VK_VISIBLE_DEVICES=7 may name none that is here: unset it; or install")


def test_a_missing_driver_is_the_cure(machine, monkeypatch):
    def no_driver():
        raise SetupError("llama-cpp-python cannot load its library (libcuda.so.1: cannot open shared object file)")

    unused = PassedOver(Build(Origin.GPU, Path("/site/llama_cpp"), Path("/site/llama_cpp/lib")), NO_GPU)
    machine.info = info(choice=Choice(machine.info.choice.build, (unused,), ()))
    assert finding("passed over").cure == "install the driver of the GPU"
    monkeypatch.setattr(library, "library_info", no_driver)
    assert finding("library").status is Status.ERROR
    assert "install NVIDIA's driver" in finding("library").cure


@pytest.mark.parametrize(
    ("reason", "cure"),
    [
        ("missing: llamabatch was installed without it", "install a C++ compiler"),
        ("LLAMABATCH_NATIVE is 0", "unset"),
    ],
)
def test_sampling_with_numpy_is_told(machine, monkeypatch, reason, cure):
    assert finding("sampler").status is Status.OK
    monkeypatch.setattr(doctor.native, "why_not", lambda: reason)
    check = finding("sampler")
    assert (check.status, reason in check.detail, check.cure.startswith(cure)) == (Status.WARN, True, True)


def test_the_build_in_use_is_told_with_those_before_and_after_it(machine):
    built = Build(Origin.BUILT, Path("/cache/builds/1/llamabatch_llama"), Path("/cache/builds/1/llamabatch_llama/lib"))
    wheel = Build(Origin.WHEEL, Path("/site/llamabatch_llama"), Path("/site/llamabatch_llama/lib"))
    stock = machine.info.choice.build
    machine.info = info(choice=Choice(wheel, (PassedOver(built, "it kills the process"),), (stock,)))
    told = finding("build")
    assert told.status is Status.OK
    used, _, unused = told.detail.partition("; not needed: ")
    assert ("/site/llamabatch_llama)" in used, "/site/llama_cpp)" in unused) == (True, True)
    passed = finding("passed over")
    assert passed.status is Status.WARN
    assert passed.detail == "made by `llamabatch build` (/cache/builds/1/llamabatch_llama): it kills the process"
    assert "--remove KEY" in passed.cure
    facts = doctor.examine({}).facts
    assert facts["origin"] == "wheel"
    assert facts["passed_over"] == {"/cache/builds/1/llamabatch_llama": "it kills the process"}


@pytest.mark.parametrize("kind", ["patches", "kernels"])
def test_a_build_of_another_release_is_told(machine, kind):
    assert finding("patches").status is Status.OK
    wheel = Choice(Build(Origin.WHEEL, Path("/site/llamabatch_llama"), Path("/site/llamabatch_llama/lib")), (), ())
    machine.info = info(choice=wheel, marker=MARKER | {kind: {"0001-old": "hash"}})
    found = finding("patches")
    assert (found.status, found.cure) == (Status.WARN, f"pip install llamabatch-llama=={__version__}")
    assert f"another release of llamabatch, with other {kind}" in found.detail


@pytest.mark.parametrize(
    ("checkout", "wheels", "cure"),
    [
        (True, True, "run `make setup` in the checkout of llamabatch for the patched build"),
        (False, True, "`pip install llamabatch-llama`, or run `llamabatch build`, which needs a C++ compiler"),
        (False, False, "run `llamabatch build`, which needs a C++ compiler"),
    ],
)
def test_the_cure_of_a_stock_build_is_one_that_is_at_hand(machine, monkeypatch, checkout, wheels, cure):
    monkeypatch.setattr(cures, "in_checkout", lambda: checkout)
    monkeypatch.setattr(cures, "has_wheels", lambda: wheels)
    machine.info = info(marker=None)
    assert finding("patches").cure.startswith(cure)
    monkeypatch.setattr(doctor, "command_output", lambda *command: "GPU 0: a card")
    assert ("make setup BACKEND=cuda" if checkout else "llamabatch build --backend cuda") in finding("gpu").cure


def test_the_environment_is_shown_with_who_set_it(machine):
    detail = finding("environment", {"GOMP_SPINCOUNT": "5", "GGML_X": "1", "HOME": "/"}).detail
    assert detail == "yours: GGML_X=1, GOMP_SPINCOUNT=5; set by llamabatch: GGML_NO_BACKTRACE=1"


def test_each_extra_is_there_in_part_or_not(machine, monkeypatch):
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "7.0")
    assert finding("extra tools").detail == "matplotlib 7.0, gguf 7.0: `llamabatch synth`, and pictures (--plot)"
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    for name, extra in doctor.EXTRAS.items():
        check = finding(f"extra {name}")
        assert (check.status, check.cure) == (Status.OK, "")
        for told in ("not installed", extra.use, f'pip install "llamabatch[{name}]"', *extra.modules):
            assert told in check.detail
    monkeypatch.setattr(doctor, "command_output", lambda *command: "GPU 0: a card")
    assert finding("extra gpu").cure == 'pip install "llamabatch[gpu]"'
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    check = finding("extra tools")
    assert (check.status, check.cure) == (Status.WARN, 'pip install "llamabatch[tools]"')
    assert check.detail.startswith("gguf not installed; matplotlib 7.0: ")
    assert doctor.examine({}).facts["extras"]["tools"] == {"matplotlib": "7.0", "gguf": None}


def test_the_screen_is_short_and_begins_with_faults(machine, monkeypatch):
    monkeypatch.setattr(doctor.psutil, "getloadavg", lambda: (99.0, 1.0, 1.0))
    shown = CliRunner().invoke(cli, ["doctor"]).output
    whole = CliRunner().invoke(cli, ["doctor", "--verbose"]).output
    assert shown.startswith("cores")
    assert len(shown.splitlines()) <= 24
    assert sum(line.startswith("extra") for line in shown.splitlines()) == 1
    assert "`doctor --verbose` shows all" in shown
    assert sum(line.startswith("extra ") for line in whole.splitlines()) >= len(doctor.EXTRAS)
    assert "--verbose" not in whole


def test_nothing_is_cut_on_a_narrow_terminal(machine, monkeypatch):
    plain = CliRunner().invoke(cli, ["doctor"]).output
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    for columns in (80, 40):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = re.sub(r"\x1b\[[0-9;]*m", "", CliRunner().invoke(cli, ["doctor"]).output)
        assert shown.split() == plain.split()
        assert all(len(line) <= columns or len(line.split()) == 1 for line in shown.splitlines())


def test_a_missing_model(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor.paths, "bundled_model", lambda: tmp_path / "tiny.gguf")
    assert finding("bundled model").status is Status.ERROR
    (tmp_path / "tiny.gguf").write_bytes(b"version https://git-lfs")
    assert "not a GGUF file" in finding("bundled model").detail


def test_the_command_prints_text_and_json(machine, monkeypatch):
    text = CliRunner().invoke(cli, ["doctor"])
    assert (text.exit_code, "0 errors, 0 warnings" in text.output) == (0, True)
    printed = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)
    assert set(printed) == {"ok", "checks", "facts"}
    assert all(set(check) == {"name", "status", "detail", "cure"} for check in printed["checks"])
    machine.info = info(max_parallel_sequences=1)
    assert CliRunner().invoke(cli, ["doctor"]).exit_code == 1
