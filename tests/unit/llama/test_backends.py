"""The choice among the CPU variants of a build, without llama.cpp: what the marker, the CPU and the user say."""

import subprocess
from types import SimpleNamespace

import pytest

from llamabatch.errors import SetupError
from llamabatch.llama import backends, probe_runs
from llamabatch.utils import disk_cache

AVX2 = {"sse2", "sse4_2", "avx", "f16c", "fma", "avx2", "bmi2"}
AVX512 = AVX2 | {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw"}
NEEDS = {
    "skylakex": sorted(AVX512 - {"sse2"}),
    "haswell": sorted(AVX2 - {"sse2"}),
    "sse42": ["sse4_2"],
    "x64": [],
}


@pytest.fixture
def build(tmp_path, monkeypatch):
    """A build with four variants; `loaded` are the files that ggml was asked to load, `refused` those it refuses."""
    for name in NEEDS:
        (tmp_path / f"libggml-cpu-{name}.so").write_text(name)
    marker = {"variants": [{"name": n, "file": f"libggml-cpu-{n}.so", "needs": needs} for n, needs in NEEDS.items()]}
    state = SimpleNamespace(folder=tmp_path, marker=marker, loaded=[], refused=set(), module=SimpleNamespace())
    monkeypatch.setattr(backends, "build_marker", lambda module: state.marker)
    monkeypatch.setattr(backends, "_has_cpu", lambda module: False)
    monkeypatch.setattr(backends.sys, "platform", "linux")
    monkeypatch.setattr(backends.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    monkeypatch.setattr(disk_cache, "folder", lambda: tmp_path / "verdicts")

    def load(module, path):
        state.loaded.append(path.name)
        return path.stem.removeprefix("libggml-cpu-") not in state.refused

    monkeypatch.setattr(backends, "_load", load)
    return state


def has(monkeypatch, flags):
    monkeypatch.setattr(backends, "cpu_flags", lambda: frozenset(flags))


@pytest.mark.parametrize(
    ("flags", "variant"),
    [
        (AVX512, "skylakex"),
        (AVX2, "haswell"),
        (AVX512 - {"avx512f"}, "haswell"),  # a system without AVX-512 enabled lists none of its parts
        (AVX2 - {"fma"}, "sse42"),
        ({"sse2"}, "x64"),
    ],
)
def test_the_best_variant_that_cpu_and_system_have_is_loaded(build, monkeypatch, flags, variant):
    has(monkeypatch, flags)
    assert backends.load_cpu(build.module, build.folder) == variant
    assert build.loaded == [f"libggml-cpu-{variant}.so"]  # no other library is loaded


def test_a_variant_that_ggml_refuses_gives_way_to_the_next(build, monkeypatch):
    has(monkeypatch, AVX512)
    build.refused = {"skylakex"}
    assert backends.load_cpu(build.module, build.folder) == "haswell"
    build.refused = set(NEEDS)
    with pytest.raises(SetupError, match=r"tried skylakex, haswell, sse42, x64.*llamabatch build"):
        backends.load_cpu(build.module, build.folder)


def test_the_environment_names_a_variant(build, monkeypatch):
    has(monkeypatch, AVX512)
    monkeypatch.setenv(backends.VARIABLE, "sse42")
    assert backends.load_cpu(build.module, build.folder) == "sse42"
    assert build.loaded == ["libggml-cpu-sse42.so"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("zen9", r"'zen9'.*it has skylakex, haswell, sse42, x64"),
        ("skylakex", r"'skylakex', which needs avx512bw, .*it can run haswell, sse42, x64"),
    ],
)
def test_a_variant_that_cannot_run_here_is_refused_before_it_is_loaded(build, monkeypatch, name, says):
    has(monkeypatch, AVX2)
    monkeypatch.setenv(backends.VARIABLE, name)
    with pytest.raises(SetupError, match=says):
        backends.load_cpu(build.module, build.folder)
    assert build.loaded == []


def test_where_the_system_lists_nothing_a_child_tries_and_the_verdict_is_kept(build, monkeypatch):
    has(monkeypatch, AVX512)
    monkeypatch.setattr(backends.platform, "machine", lambda: "aarch64")  # an emulation shows the CPU list of its host
    tried = []

    def run_program(module, timeout_s, environment):
        tried.append(environment[backends.VARIABLE])
        return subprocess.CompletedProcess([], 0 if tried[-1] == "haswell" else -4, b"")

    monkeypatch.setattr(probe_runs, "run_program", run_program)
    assert backends.load_cpu(build.module, build.folder) == "haswell"
    assert tried == ["skylakex", "haswell"]
    assert build.loaded == ["libggml-cpu-haswell.so"]
    backends.load_cpu(build.module, build.folder)
    assert len(tried) == 2
    monkeypatch.setattr(backends, "cpu_name", lambda: "another CPU on the same home")
    backends.load_cpu(build.module, build.folder)
    assert len(tried) == 4


def test_a_build_without_variants_is_left_alone(build, monkeypatch):
    monkeypatch.setenv(backends.VARIABLE, "haswell")
    build.marker = {"patches": {}}
    for file in build.folder.glob("*.so"):
        file.unlink()
    (build.folder / "libggml-cpu.so").write_text("")
    monkeypatch.setattr(backends, "_has_cpu", lambda module: True)
    assert backends.load_cpu(build.module, build.folder) is None
    assert build.loaded == []


def test_a_build_that_lost_its_kernels_is_refused(build):
    for file in build.folder.glob("*.so"):
        file.unlink()
    with pytest.raises(SetupError, match="has no library of CPU kernels"):
        backends.load_cpu(build.module, build.folder)


def test_a_stock_build_with_variants_is_left_to_ggml(build, monkeypatch):
    asked = []
    monkeypatch.setattr(backends, "_load_what_ggml_takes", lambda module, folder: asked.append(folder))
    monkeypatch.setattr(backends, "_has_cpu", lambda module: bool(asked))
    build.marker = None
    assert backends.load_cpu(build.module, build.folder) is None
    assert asked == [build.folder]


def test_a_variant_is_known_by_its_file(tmp_path):
    assert backends.variant_name(tmp_path / "libggml-cpu-haswell.so") == "haswell"
    assert backends.variant_name(tmp_path / "libllamabatch-ggml-cpu-armv8.2.so") == "armv8.2"
    assert backends.variant_name(tmp_path / "libggml-cpu.so.0") is None
