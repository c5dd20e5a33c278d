"""The compiled helper chooses the same tokens as numpy, whatever the logits and parameters; and its build."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch.native_build import sampler_library
from llamabatch.planning.cpu import cpu_flags
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.sampling import native, numpy_sampler, sampler
from llamabatch.sampling.sampler import SamplerState
from llamabatch.sampling.token_counts import token_counts
from native_patches import bootstrap

needs_helper = pytest.mark.skipif(not native.available(), reason=f"the compiled helper is {native.why_not()}")
needs_compiler = pytest.mark.skipif(not sampler_library.find_compiler(), reason="there is no C++ compiler")


def logits(rng: np.random.Generator, kind: str, size: int) -> np.ndarray:
    if kind == "ties":
        return rng.integers(-3, 4, size).astype(np.float32)
    if kind == "flat":
        return np.full(size, rng.normal(), np.float32)
    if kind == "peaked":
        row = rng.normal(0, 1, size).astype(np.float32)
        row[rng.integers(0, size, 3)] += 30
        return row
    row = rng.normal(0, {"narrow": 0.1, "wide": 8, "huge": 1e38}.get(kind, 2), size).clip(-3e38, 3e38)
    row = row.astype(np.float32)
    if kind in ("-inf", "mixed"):
        row[rng.random(size) < 0.7] = -np.inf
    if kind in ("nan", "inf"):
        row[rng.integers(0, size)] = float(kind)
    return row


KINDS = ["normal", "ties", "flat", "peaked", "narrow", "wide", "huge", "-inf", "nan", "inf"]
SIZES = [1, 2, 15, 16, 17, 127, 128, 129, 1120, 4095, 4096, 5001, 20_480, 33_333]


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, object]:
    return {
        "temperature": draw(st.sampled_from([0.0, 1e-12, 0.01, 0.7, 1.0, 100.0])),
        "top_k": draw(st.sampled_from([0, 1, 2, 40, 300, 5000])),
        "top_p": draw(st.sampled_from([0.0, 0.1, 0.5, 0.95, 0.9999999, 1.0])),
        "min_p": draw(st.sampled_from([0.0, 1e-6, 0.05, 1.0])),
        "repetition_penalty": draw(st.sampled_from([1.0, 0.01, 1.1, 100.0])),
        "presence_penalty": draw(st.sampled_from([0.0, -2.0, 0.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, 2.0, 0.1])),
    }


def random_draw(rng: np.random.Generator, size: int, params: dict[str, object], edits: set[str]) -> SamplerState:
    some = [int(i) for i in rng.integers(0, size, 20)]
    if "bias" in edits:
        params = params | {"logit_bias": {i: float(rng.uniform(-100, 100)) for i in some[:7]}}
    if "allowed" in edits:
        params = params | {"allowed_token_ids": some}
    counts = token_counts(some[5:], int(rng.choice([-1, 3, 12])))
    for token_id in [*some[:8], *some[3:5]]:
        counts.add(token_id)
    mask = rng.integers(0, 2**32, (size + 31) // 32, dtype=np.uint32)
    mask[rng.random(len(mask)) < 0.5] = rng.choice([0, 2**32 - 1])
    return SamplerState(
        SamplingParams(**params),
        int(rng.integers(0, 2**63)),
        int(rng.integers(0, 10**6)),
        counts if "counts" in edits else None,
        mask if "mask" in edits else None,
    )


@needs_helper
@settings(max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    size=st.sampled_from(SIZES),
    params=parameters(),
    edits=st.sets(st.sampled_from(["bias", "allowed", "counts", "mask"])),
)
def test_same_candidates_same_weights_same_tokens(seed, kind, size, params, edits):
    rng = np.random.default_rng(seed)
    row = logits(rng, kind, size)
    draw = random_draw(rng, size, params, edits)
    ids, weights = native.candidates(row, draw)
    wanted_ids, wanted_weights = numpy_sampler.candidates(row, draw)
    assert list(ids) == wanted_ids.tolist()
    assert list(weights) == wanted_weights.tolist()
    for _ in range(5):
        draw.index += 1
        assert native.sample_rows(row[None], [draw], 1) == [numpy_sampler.sample_row(row, draw)]


@needs_helper
@pytest.mark.parametrize("top_p", [0.5, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.5, 3.0, 6.0])
def test_same_candidates_in_a_large_vocabulary(top_p, spread):
    rng = np.random.default_rng(3)
    row = rng.normal(0, spread, 152_064).astype(np.float32)
    for k in (0, 40, 3000):
        draw = SamplerState(SamplingParams(top_k=k, top_p=top_p, min_p=0.0), 5)
        ids, weights = native.candidates(row, draw)
        wanted_ids, wanted_weights = numpy_sampler.candidates(row, draw)
        assert np.array_equal(ids, wanted_ids)
        assert np.array_equal(weights, wanted_weights)


@needs_helper
def test_rows_may_lie_apart_and_have_different_company():
    rng = np.random.default_rng(1)
    wide = rng.normal(0, 3, (12, 40_000)).astype(np.float32)
    rows = wide[::2, 1000:31_000]
    edits = [set(), {"bias"}, {"counts"}, {"mask"}, {"allowed", "mask"}, {"counts", "bias"}]
    draws = [random_draw(rng, 30_000, {"frequency_penalty": 0.5}, edit) for edit in edits]
    wanted = [numpy_sampler.sample_row(row, draw) for row, draw in zip(rows, draws, strict=True)]
    assert native.sample_rows(rows, draws, 1) == wanted
    assert native.sample_rows(rows, draws, 2) == wanted


@needs_helper
def test_what_does_not_fit_is_refused_before_the_helper_sees_it():
    draws = [SamplerState(SamplingParams(), 1)] * 2
    for wrong in (np.zeros((3, 9), np.float32), np.zeros((2, 9)), np.zeros((2, 9), np.int32), np.zeros((9, 2)).T):
        with pytest.raises(ValueError, match="states for logits"):
            native.sample_rows(wrong, draws, 1)
    masks = [SamplerState(SamplingParams(), 1, mask=np.zeros(n, np.uint32)) for n in (1, 2)]
    with pytest.raises(ValueError, match=r"\[1, 2\] words"):
        native.sample_rows(np.zeros((2, 9), np.float32), masks, 1)


# --- with and without the helper ----------------------------------------------------------------------------------


@pytest.fixture
def looked_up_anew():
    native.forget()
    yield
    native.forget()


@pytest.mark.usefixtures("looked_up_anew")
def test_a_variable_turns_it_off(monkeypatch):
    monkeypatch.setenv("LLAMABATCH_NATIVE", "0")
    assert not native.available()
    assert native.why_not() == "LLAMABATCH_NATIVE is 0"
    assert sampler.sample_rows(np.array([[0, 9, 0]], np.float32), [SamplerState(SamplingParams(), 1)]) == [1]


@pytest.mark.usefixtures("looked_up_anew")
def test_a_missing_or_foreign_library_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv("LLAMABATCH_NATIVE", raising=False)
    monkeypatch.setattr(native, "PATH", tmp_path / "lib.so")
    assert native.why_not() == "missing: llamabatch was installed without it"
    (tmp_path / "lib.so").write_bytes(b"no library")
    native.forget()
    assert "cannot be loaded" in native.why_not()


@needs_helper
@pytest.mark.usefixtures("looked_up_anew")
def test_another_release_of_the_library_is_not_used(monkeypatch):
    monkeypatch.setattr(native, "ABI_VERSION", native.ABI_VERSION + 1)
    assert "of another release" in native.why_not()


def test_importing_loads_nothing():
    code = "import llamabatch.sampling.native as n, sys; assert n._helper.cache_info().currsize == 0"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the helper's build -------------------------------------------------------------------------------------------


@needs_compiler
def test_the_library_is_compiled_for_any_cpu_of_its_kind(tmp_path):
    assert sampler_library.compile_library(tmp_path / "lib.so") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["lib.so"]


@needs_helper
@needs_compiler
@pytest.mark.parametrize("flags", [[], ["-fopenmp-simd"], ["-mavx2", "-mfma"]], ids=["plain", "simd", "avx2"])
def test_a_build_for_another_cpu_chooses_the_same_tokens(monkeypatch, tmp_path, flags):
    """Builds of other compilers and CPUs: no threads, and none or other instruction sets."""
    if "-mavx2" in flags and not {"avx2", "fma"} <= cpu_flags():
        pytest.skip("this CPU has no AVX2")
    rows = np.random.default_rng(0).normal(0, 3, (20, 40_000)).astype(np.float32)
    names = ({"top_k": 0, "min_p": 0.0}, {"top_k": 40}, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 0})
    draws = [SamplerState(SamplingParams(**{"temperature": 1.1, **names[i % 4]}), i) for i in range(20)]
    before = native.sample_rows(rows, draws, 1)
    monkeypatch.setattr(sampler_library, "variants", lambda: iter([flags]))
    assert sampler_library.compile_library(tmp_path / "lib.so") == ""
    monkeypatch.setattr(native, "PATH", tmp_path / "lib.so")
    native.forget()
    try:
        assert native.sample_rows(rows, draws, 1) == before
    finally:
        native.forget()


def test_the_set_up_notices_a_changed_source(monkeypatch, tmp_path):
    source = tmp_path / "sampler.cpp"
    monkeypatch.setattr(sampler_library, "sources", lambda: [source])
    source.write_text("one")
    before = bootstrap.stamp_text(tmp_path / "wheel")
    assert bootstrap.stamp_text(tmp_path / "wheel") == before
    source.write_text("two")
    assert bootstrap.stamp_text(tmp_path / "wheel") != before


def test_without_a_compiler_the_old_library_goes_and_the_reason_is_told(monkeypatch, tmp_path):
    library = tmp_path / "lib.so"
    library.write_bytes(b"old")
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "no C++ compiler was found" in sampler_library.compile_library(library)
    assert not library.exists()


@pytest.mark.skipif(shutil.which("false") is None, reason="needs the program `false`")
def test_a_compiler_that_fails_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "false")
    assert sampler_library.compile_library(tmp_path / "lib.so") == "false ended with 1"
    assert list(tmp_path.iterdir()) == []
