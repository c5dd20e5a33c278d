"""`make gpu-pack` and `make gpu-check`: the content of the bundle, the order of the parts, and the report on them."""

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import build, check, pack, parts, report, start
from benchmarks.gpu.check import CUT, DONE, FAILED, PARTIAL, Part
from benchmarks.llama_programs import PROGRAMS
from llamabatch.native_build import binding, sampler_library, source
from llamabatch.native_build.plan import Plan
from llamabatch.native_build.tools import SetupFailure
from tests.waiting import until

THREE = (Part("build", 100, "builds"), Part("memory", 50, "compares"), Part("burst", 80, "runs"))


# --- the bundle ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("llama_cpp/llama.py", True),
        (".git/HEAD", True),
        ("vendor/llama.cpp/ggml/src/ggml-cuda/fattn.cu", True),
        ("vendor/llama.cpp/scripts/ui-assets.cmake", True),  # the build of the server runs it
        ("vendor/llama.cpp/tools/server/server.cpp", True),
        ("vendor/llama.cpp/ggml/src/ggml-sycl/common.cpp", False),
        ("examples/server/server.py", False),
    ],
)
def test_the_source_package_without_what_no_build_reads(name, kept):
    assert pack.is_kept(name) is kept


def test_the_trimmed_package_unpacks_to_the_same_folder(tmp_path):
    whole, small = tmp_path / source.FILE_NAME, tmp_path / "small.tar.xz"
    top = source.FILE_NAME.removesuffix(".tar.gz")
    with tarfile.open(whole, "w:gz") as file:
        for name in ("pyproject.toml", "vendor/llama.cpp/CMakeLists.txt", "vendor/llama.cpp/models/a.gguf"):
            member = tarfile.TarInfo(f"{top}/{name}")
            member.size = 3
            file.addfile(member, io.BytesIO(b"abc"))
    pack.trim(whole, small)
    tree = source.unpack(small, tmp_path)
    assert sorted(str(p.relative_to(tree)) for p in tree.rglob("*") if p.is_file()) == [
        "pyproject.toml", "vendor/llama.cpp/CMakeLists.txt",
    ]  # fmt: skip


def test_a_source_package_is_named_by_the_environment_and_verified(tmp_path, monkeypatch):
    package = tmp_path / "a source.tar.xz"
    package.write_bytes(b"made of the real one")
    monkeypatch.setenv(source.VARIABLE, str(package))
    with pytest.raises(SetupFailure, match=f"whose sha256 is {source.sha256_of(package)}, not {source.SHA256}"):
        source.fetch(tmp_path / "log")
    monkeypatch.setenv(source.DIGEST_VARIABLE, source.sha256_of(package))
    assert source.fetch(tmp_path / "log") == package
    monkeypatch.setenv(source.VARIABLE, str(tmp_path / "other"))
    with pytest.raises(SetupFailure, match="which is no file"):
        source.fetch(tmp_path / "log")


def test_the_wheels_are_those_that_llamabatch_and_its_tests_need():
    text = (Path(pack.ROOT) / "pyproject.toml").read_text(encoding="utf-8")
    run_time = text.partition("[tool.hatch.metadata.hooks.custom]")[2].partition("]\n")[0]
    asked = {re.match(r'\s*"([\w.-]+)', line)[1] for line in run_time.splitlines() if line.strip().startswith('"')}
    assert {"numpy", "llguidance"} < asked
    packed = {re.match(r"[\w.-]+", package)[0] for package in pack.NEEDED}
    assert asked - {"tomli"} <= packed  # only Pythons before 3.11 need this parser
    assert {"pytest", "pytest-timeout", "hypothesis", "gguf", "diskcache", "typing_extensions"} <= packed


def test_wheels_that_are_only_wished_for_leave_the_bundle_when_it_is_full(tmp_path, monkeypatch):
    sizes = {"matplotlib": 700, "cmake": 200}
    asked = []

    def download(packages, version, folder, log):
        asked.append((packages[0], version))
        if (packages[0], version) == ("cmake", "3.12"):
            raise SetupFailure("not to be had")
        (folder / f"{packages[0]}-{version}.whl").write_bytes(b"x" * sizes[packages[0]])

    monkeypatch.setattr(pack, "download", download)
    folder = tmp_path / "wheels"
    folder.mkdir()
    added, left_out = pack.add_wished((("matplotlib",), ("cmake",)), ("3.11", "3.12"), folder, 1000, tmp_path / "log")
    assert added == {"3.11": ["matplotlib", "cmake"], "3.12": []}
    assert left_out == ["matplotlib for Python 3.12 (0 MiB)", "cmake for Python 3.12"]
    assert sorted(path.name for path in folder.iterdir()) == ["cmake-3.11.whl", "matplotlib-3.11.whl"]
    assert len(asked) == 4


def test_a_bundle_names_the_pythons_that_it_has_wheels_for(tmp_path):
    bundle = tmp_path / "a folder"
    (bundle / "sources").mkdir(parents=True)
    (bundle / "sources" / "package.tar.xz").touch()
    (bundle / "project" / "benchmarks" / "gpu").mkdir(parents=True)
    program = bundle / pack.FOLDER
    program.write_bytes(Path(start.__file__).read_bytes())
    manifest = {"pythons": ["3.99"], "source_sha256": "d", "wheels": {}, "requirements": {"3.99": []}}
    (bundle / pack.MANIFEST).write_text(json.dumps(manifest))
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"it has wheels for Python 3.99; this is 3.{sys.version_info.minor}" in done.stderr
    environment = start.environment_of(bundle, {"PATH": "/bin", "PYTHONHOME": "/else"})
    assert environment["PIP_FIND_LINKS"].endswith("a%20folder/wheels")  # pip splits the list at blanks
    assert environment["LLAMABATCH_SOURCE"] == str(bundle / "sources" / "package.tar.xz")
    assert "PYTHONHOME" not in environment


@pytest.fixture
def fake_build(tmp_path, monkeypatch):
    """Replaces the source and the compiler of a build. Returns the plan, and the list of steps that were run."""
    flags = ("-DGGML_NATIVE=ON", "-DLLAMA_BUILD_COMMON=OFF", "-DGGML_RPC=ON")
    plan, done = Plan("rpc", flags, {}, {}, "c++ 1", "cpu", {}), []

    def patched_tree(log, folder):
        done.append("unpack")
        (folder / source.FILE_NAME.removesuffix(".tar.gz") / "llama_cpp").mkdir(parents=True)

    def compile_targets(tree, place, log, flags, targets):
        done.append(("compile", flags, targets))
        if len(done) == 2:
            raise SetupFailure("it was stopped")
        made = place / "build" / "bin"
        made.mkdir(parents=True)
        for name in (f"lib{binding.PREFIX}llama.so", f"lib{binding.PREFIX}ggml-rpc.so", *PROGRAMS, "other"):
            (made / name).touch()
        return made

    def make_package(tree, folder, version, marker):
        (folder / "lib").mkdir(parents=True)
        (folder / build.MARKER).write_text(marker)
        return folder / "lib"

    monkeypatch.setattr(build, "make_plan", lambda backend: plan)
    monkeypatch.setattr(build, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(source, "patched_tree", patched_tree)
    monkeypatch.setattr(build, "compile_targets", compile_targets)
    monkeypatch.setattr(binding, "make_package", make_package)
    monkeypatch.setattr(binding, "prove", lambda package: done.append("prove"))
    monkeypatch.setattr(sampler_library, "compile_library", lambda path: "")
    return plan, done


def test_one_build_has_the_package_and_the_programs_and_goes_on_where_it_was_stopped(fake_build, tmp_path):
    plan, done = fake_build
    log = tmp_path / "log"
    with pytest.raises(SetupFailure):
        build.build("rpc", log)
    assert not build.is_complete(plan)
    assert build.build("rpc", log) is plan
    assert build.is_complete(plan)
    assert [step if isinstance(step, str) else step[0] for step in done] == ["unpack", "compile", "compile", "prove"]
    _, flags, targets = done[1]
    assert "-DBUILD_SHARED_LIBS=ON" in flags
    assert "-DBUILD_SHARED_LIBS=OFF" not in flags
    assert "-DGGML_RPC=ON" in flags
    assert set(targets) >= {"llama", *PROGRAMS}
    names = {path.name for path in build.programs(plan).iterdir()}
    assert names == {f"lib{binding.PREFIX}llama.so", f"lib{binding.PREFIX}ggml-rpc.so", *PROGRAMS}
    assert json.loads((build.package(plan) / build.MARKER).read_text())["backend"] == "rpc"
    assert [path.name for path in build.folder_of(plan).iterdir()] == [binding.PACKAGE]  # the build folder is removed
    build.build("rpc", log)
    assert len(done) == 4


# --- the parts ----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self, seconds):
        self.now, self.seconds, self.ran = 0.0, seconds, []

    def run(self, part, limit_s):
        self.ran.append((part.name, limit_s))
        takes = self.seconds[part.name].pop(0)
        self.now += min(takes, limit_s)
        return DONE if takes <= limit_s else PARTIAL


def run(folder, clock, budget_s=200.0):
    return check.run_parts(folder, budget_s, clock.run, now=lambda: clock.now, parts=THREE)


def test_parts_run_in_their_order_and_go_on_in_the_next_call(tmp_path):
    clock = Clock({"build": [90], "memory": [40], "burst": [10]})
    assert run(tmp_path, clock) == ["burst"]  # 70 s are left, but the part needs 80 s
    assert clock.ran == [("build", 100), ("memory", 50)]
    assert run(tmp_path, clock) == []
    assert [name for name, _ in clock.ran] == ["build", "memory", "burst"]
    assert check.document_of(tmp_path)["build"] == {"state": DONE, "seconds": 90}


def test_a_build_that_is_stopped_goes_on_and_nothing_runs_before_it_is_whole(tmp_path):
    clock = Clock({"build": [150, 20], "memory": [40], "burst": [10]})
    assert run(tmp_path, clock) == ["build", "memory", "burst"]
    assert run(tmp_path, clock) == []
    assert check.document_of(tmp_path)["build"]["seconds"] == 120


def test_a_build_that_fails_ends_the_check_and_other_parts_do_not(tmp_path):
    states = {"build": FAILED}
    assert check.run_parts(tmp_path, 500, lambda part, limit_s: states.get(part.name, DONE), parts=THREE) == []
    assert list(check.document_of(tmp_path)) == ["build"]
    states = {"memory": FAILED}
    (tmp_path / "build.json").unlink()
    assert check.run_parts(tmp_path, 500, lambda part, limit_s: states.get(part.name, DONE), parts=THREE) == []
    assert {name: entry["state"] for name, entry in check.document_of(tmp_path).items()} == {
        "build": DONE, "memory": FAILED, "burst": DONE,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("raise SystemExit(0)", DONE),
        ("print('first'); raise ValueError('no device')", FAILED),
        ("import time; time.sleep(60)", PARTIAL),
        (
            "import pathlib, time; pathlib.Path('burst.json').write_text('{\"found\": {\"a\": 1}}'); time.sleep(60)",
            CUT,
        ),
    ],
)
def test_what_a_part_has_found_is_kept_when_its_time_is_up(script, state, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    for folder in (tmp_path / "benchmarks", tmp_path / "benchmarks" / "gpu"):
        (folder / "__init__.py").touch()
    (tmp_path / "benchmarks" / "gpu" / "parts.py").write_text(script)
    environment = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    limit_s, found, end_group = 0.1 if state in (PARTIAL, CUT) else 20.0, tmp_path / "burst.json", check.end_group

    def end(pid):
        until(lambda: state != CUT or (found.exists() and found.read_text()))
        end_group(pid)

    monkeypatch.setattr(check, "end_group", end)
    assert check.run_part(Part("burst", 20, "runs"), limit_s, tmp_path, environment, []) == state
    if state == FAILED:
        assert "ValueError: no device" in capsys.readouterr().err


def test_the_parts_fit_into_25_minutes_in_calls_of_nine():
    assert sum(part.limit_s for part in check.PARTS) <= 25 * 60
    assert all(part.limit_s <= 9 * 60 - 2 * check._SPARE_S for part in check.PARTS)
    assert [part.name for part in check.PARTS] == list(parts.TABLE)
    assert len(parts.memory_settings(quick=False)) == len(parts.memory_settings(quick=True)) == 8


@pytest.mark.parametrize(
    ("here", "programs", "backend", "why"),
    [
        ("cuda", (), "cuda", "this machine has it"),
        ("cpu", (), "rpc", "neither a GPU of NVIDIA nor its driver is here"),
        ("cpu", ("nvidia-smi",), "rpc", "nvcc is not"),
    ],
)
def test_without_cuda_it_says_what_it_does_instead(here, programs, backend, why, monkeypatch):
    monkeypatch.setattr(check, "default_backend", lambda: here)
    monkeypatch.setattr(check.shutil, "which", lambda name: name if name in programs else None)
    found = check.backend_of("auto")
    assert found[0] == backend
    assert why in found[1]
    assert check.backend_of("cpu") == ("cpu", "as asked")


def test_the_host_share_is_of_neighbouring_steps_of_all_rows():
    calls = [(0.0, 0.5, 8), (1.0, 1.008, 4), (1.010, 1.018, 4), (1.020, 1.028, 4), (1.1, 1.2, 1)]
    assert parts.host_share(calls, 4) == {"steps": 2, "step_ms": 10.0, "host_ms": 2.0, "share": 0.2}
    assert parts.host_share(calls, 32) == {"steps": 0}


def test_the_outcome_of_the_tests_is_read_with_the_names_of_failures(tmp_path):
    path = tmp_path / "tests.xml"
    path.write_text(
        '<testsuites><testsuite tests="3" failures="1" errors="0" skipped="1"><testcase classname="a" name="b">'
        '<failure/></testcase><testcase classname="a" name="c"/></testsuite></testsuites>'
    )
    found = parts.outcome_of(path)
    assert (found["passed"], found["failed_tests"]) == (1, ["a::b"])


# --- the figures --------------------------------------------------------------------------------------------------


def document(**found):
    machine = {"cpu": "a CPU", "cores": 2}
    entries = {name: {"state": DONE, "found": each} for name, each in found.items()}
    return {"backend": "cuda", "quick": False, "machine": machine, "created": "2026-01-01T00:00:00", "parts": entries}


FOUND = {
    "build": {"devices": ["A card"]},
    "memory": {"settings": [{}] * 8, "largest_gap": 0.041},
    "burst": {
        "sizes": [
            {
                "n_slots": 32,
                "ratio": 1.42,
                "peers": {"ours": {"tokens_per_s": [2000.0, 2100.0]}, "llama-server": {"failure": "it ended"}},
            }
        ]
    },
    "host": {"sizes": [{"n_slots": 32, "steps": 90, "step_ms": 10.0, "host_ms": 1.2, "share": 0.12}]},
    "tests": {"tests": 40, "skipped": 2, "passed": 37},
    "workloads": {"workloads": {"ragged": {"ratio": 1.9}}},
    "slots": {"sizes": {"1": 90.0, "64": 3100.0}},
}


def test_the_paragraph_tells_what_was_found_and_no_more():
    whole = report.paragraph(document(**FOUND))
    for part in (
        "On A card (cuda), with an 8B shape in Q4_K_M:", "ours 2,100 tokens/s, 1.42 times llama-server",
        "1.20 ms of it (12 %) on the host", "within 4 %", "37 of 38 tests", "Ragged: 1.90 times", "64 make the most",
    ):  # fmt: skip
        assert part in whole
    assert report.paragraph(document()) == "On a CPU (cuda), with an 8B shape in Q4_K_M:"
    assert report.targets(document(**FOUND)) == {
        "burst of 32 at least 1.3 times llama-server": True, "host share below 10 % with 32 rows": False,
    }  # fmt: skip


def test_the_picture_has_a_panel_for_each_kind_of_figure(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.svg"
    assert report.draw(document(**FOUND), path) == f"picture: {path}"
    drawn = path.read_text(encoding="utf-8")
    assert all(title in drawn for title in ("burst", "by slots", "a decode step"))
    assert report.draw(document(), tmp_path / "b.svg") == "no picture yet"
    assert not (tmp_path / "b.svg").exists()
