"""benchmarks/kernels.py and native_patches/check.py without running them: floors, tables, pictures, verdicts."""

import dataclasses
import shutil
import sys

import pytest

from benchmarks import kernels, kernels_plot, operations, stock
from llamabatch.native_build import source
from llamabatch.planning import cpu
from native_patches import check


def point(rows=8, context=512, **seconds):
    times = {kernels.STOCK: 0.3, kernels.STOCK_OFF: 0.2, kernels.PATCHED: 0.1} | seconds
    return kernels.Point("Q8_0", context, rows, times, read_s=0.02, multiply_s=0.05)


def test_the_floor_is_what_takes_longer():
    roof = kernels.Roof(bandwidth=1e9, rate=1e12, weight_bytes=500_000_000, n_params=500_000_000, kv_bytes=10_000)
    assert roof.read_s(rows=10, context=1000) == pytest.approx(0.5 + 0.1)
    assert roof.multiply_s(rows=10) == pytest.approx(0.01)
    assert point().floor_s == 0.05


def test_no_step_is_below_the_floor():
    """The floor uses the best rates.

    8 rows take 50 ms at the rate of prefill, but 64 rows take only 160 ms. Reading takes 20 ms, but once took 10 ms.
    """
    many = dataclasses.replace(point(64, patched=0.16), multiply_s=0.4)
    assert [p.multiply_s for p in kernels.with_best_rates([point(8), many])] == pytest.approx([0.02, 0.16])
    few = dataclasses.replace(point(1, patched=0.01), multiply_s=0.005)
    assert [p.read_s for p in kernels.with_best_rates([point(8), few])] == pytest.approx([0.01, 0.01])
    assert kernels.with_best_rates([point(8)]) == [point(8)]


def test_a_line_shows_times_in_milliseconds_and_the_gain():
    assert str(point()).split() == ["Q8_0", "512", "8", "300.00", "200.00", "100.00", "50.00", "3.00"]
    for series in (kernels.SERIES, (*kernels.SERIES, kernels.NO_AMX)):
        line = str(point(**dict.fromkeys(series, 0.1)))
        assert len(kernels.header(series)) == len(line)


def test_the_picture_has_a_panel_for_each_model_and_context(tmp_path):
    points = [point(rows, context) for context in (64, 512) for rows in (1, 8, 64)]
    points += [dataclasses.replace(p, model="tiny") for p in points if p.context == 64]
    assert len(kernels_plot.figure(points, kernels.SERIES).axes) == 3
    kernels_plot.draw(points, kernels.SERIES, tmp_path / "steps.svg")
    assert "stock, no flash attention" in (tmp_path / "steps.svg").read_text()


def test_memory_is_read_at_some_speed():
    assert 1e8 < kernels.bandwidth(1, megabytes=8) < 1e13


def test_the_stock_library_keeps_the_patches_without_which_it_crashes():
    names = [patch.name for patch in source.patches()]
    assert names[: len(stock.NEEDED)] == list(stock.NEEDED)
    assert len(names) > len(stock.NEEDED)


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("K in f16\n0 of 573 cases failed\n", "0 of 573 cases failed"),
        ("  4932/4932 tests passed\n", "4932/4932 tests passed"),
        ("a.cpp:3:5: runtime error: index 9 out of bounds\n", "a.cpp:3:5: runtime error: index 9 out of bounds"),
        ("0 of 2 cases failed\nSUMMARY: ThreadSanitizer: data race x.cpp\n", "ThreadSanitizer: data race x.cpp"),
    ],
)
def test_a_sanitizer_has_the_first_word(output, said, tmp_path):
    assert check.verdict(output, tmp_path) == said
    assert str(tmp_path) in check.verdict("Segmentation fault\n", tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="the checks are for Linux")
def test_what_is_missing_is_said_and_left_out(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None if "aarch64" in name else f"/bin/{name}")
    neon = next(one for one in check.CHECKS if one.name == "neon")
    assert "apt install g++-aarch64-linux-gnu qemu-user" in check.missing(neon)
    assert check.missing(check.CHECKS[0]) == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the checks are for Linux")
def test_the_cpu_of_the_checks_is_that_of_the_plan():
    assert check.cpu_flags() == cpu.cpu_flags()


def test_a_check_for_another_cpu_is_left_out(monkeypatch):
    monkeypatch.setattr(check.sys, "platform", "linux")
    monkeypatch.setattr(check, "cpu_flags", lambda: frozenset({"avx2", "bmi2", "f16c"}))
    avx2 = next(one for one in check.CHECKS if one.name == "avx2")
    assert check.missing(avx2) == "this CPU has no fma"


def test_all_programs_of_the_checks_are_there():
    named = {program for one in check.CHECKS for program in one.programs} - set(check._OPERATIONS)
    assert named == {path.stem for folder in check.TESTS for path in folder.glob("*.cpp")}


def test_the_share_of_a_roof_is_that_of_the_products_alone():
    """The step computes 4e9 products of 1e9 bytes in 0.02 s, and another operation beside them."""
    seen = {
        "operations": {"MUL_MAT q8_0": 0.015, "MUL_MAT f32": 0.005, "ADD": 0.3},
        "products": {"MUL_MAT q8_0": 3.9e9, "MUL_MAT f32": 0.1e9},
        "weight_bytes": {"MUL_MAT q8_0": 0.9e9, "MUL_MAT f32": 0.1e9},
    }
    found = operations.shares(seen, {"vpdpbusd": 8e11, "tdpbssd": 4e12}, read_roof=1e11)
    assert found == pytest.approx({"of vpdpbusd": 0.25, "of tdpbssd": 0.05, "of reading": 0.5})
    assert operations.shares({"operations": {}, "products": {}, "weight_bytes": {}}, {}, 1e9) == {}
    table = operations.table({"patched": {**seen, "seconds": 0.33, "shares": found}}).splitlines()
    shown = ["patched", "300.00", "15.00", "5.00", "330.00", "0.25", "0.05", "0.50"]
    assert [line.split()[-1] for line in table] == shown


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_the_roof_of_the_product_instruction_is_measured():
    """A CPU with neither instruction has no roof."""
    roofs = operations.product_roofs(1)
    assert set(roofs) <= {"vpdpbusd", "vdpbf16ps", "vfmadd231ps", "tdpbssd"}
    assert ("vpdpbusd" in roofs) == ("avx512_vnni" in cpu.cpu_flags())
    assert all(roof > 1e9 for roof in roofs.values())
