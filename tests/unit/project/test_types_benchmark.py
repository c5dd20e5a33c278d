"""benchmarks/types.py and type_files.py: real files of small shapes, invented figures."""

import dataclasses
import json
import platform
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import ik, places, type_files, types, types_plot
from benchmarks.process import PeerFailure
from llamabatch.gguf.header import read_tensors
from llamabatch.gguf.reader import TENSOR_TYPES
from llamabatch.native_build.tools import SetupFailure
from llamabatch.tools import synth

ROOFS = {"vpdpbusd": 1e12, "vdpbf16ps": 5e11, "read_bytes_s": 3e10}


def cell(shape="qwen2.5-0.5b", kind="Q4_1", **more):
    seconds = {point: {types.OURS: 0.1, types.STOCK: 0.2} for point in types.POINTS}
    about = {"shape": shape, "type": kind, "seconds": seconds, "file_bytes": 10**9, "weight_bytes": 9 * 10**8}
    peaks = {types.OURS: 1.2e9, types.STOCK: 1.1e9}
    sizes = {"n_params": 10**9, "output_params": 10**8, "peak_bytes": peaks, "others_cpu_percent": [0.5, None]}
    found = {**about, **sizes, "build": "abc", **more}
    return {**found, "shares": types.shares(found, ROOFS)}


def test_speeds_and_shares():
    found = cell()
    assert types.tokens_per_s(found, "32 rows", types.OURS) == 320
    assert types.gain(found, "prompt") == 2
    assert found["shares"]["1 rows"] == pytest.approx(9e8 / 0.1 / 3e10)
    assert found["shares"]["32 rows"] == pytest.approx(32e9 / 0.1 / 1e12)
    assert found["shares"]["prompt"] == pytest.approx((9e8 * 1500 + 1e8) / 0.1 / 1e12)
    assert set(cell(kind="F16")["shares"]) == {"1 rows"}  # ROOFS has no instruction for F16
    assert len(types.line(found)) == len(types.HEAD)


def test_a_third_side_is_shown_and_its_failure_named():
    found = cell()
    assert types.beside_ik(found) == ""
    for seconds in found["seconds"].values():
        seconds[ik.NAME] = 0.15
    assert types.beside_ik(found).split() == [ik.NAME, "1.50", "1.50", "1.50", "1.50"]
    assert "no such type" in types.beside_ik({**cell(), ik.NAME: "no such type"})
    assert any(line.get_label() == ik.NAME for line in types_plot.figure([found]).axes[0].lines)


_PRINTED = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    64 |      4 |    1 |     68 |    {first} |   640.00 |    {steps} |    20.00 |    0.300 |   226.67 |
"""


def test_the_faster_flags_of_the_fork_count(monkeypatch):
    def run(command, **_):
        is_fast = "-rtr" in command
        if command[2] == "unknown" or (command[2] == "unpacked" and is_fast):
            return subprocess.CompletedProcess(command, 1, "", "unknown type")
        text = _PRINTED.format(first="0.100" if is_fast else "0.200", steps="0.800" if is_fast else "1.600")
        return subprocess.CompletedProcess(command, 0, text, "")

    monkeypatch.setattr(ik.subprocess, "run", run)
    asked = 2, 1, (1,), 64, 1500, 60.0
    assert ik.fastest(Path("bench"), Path("any"), *asked) == {"1 rows": 0.1, "prompt": 0.1}
    assert ik.fastest(Path("bench"), Path("unpacked"), *asked) == {"1 rows": 0.2, "prompt": 0.2}
    with pytest.raises(PeerFailure, match="unknown type"):
        ik.fastest(Path("bench"), Path("unknown"), *asked)


def test_the_fastest_of_all_times_counts():
    slow, fast = cell(), cell(others_cpu_percent=[12.0, None])
    slow["seconds"]["prompt"] = {types.OURS: 0.09, types.STOCK: 0.3}
    found = types.merged(slow, fast)
    assert found["seconds"]["prompt"] == {types.OURS: 0.09, types.STOCK: 0.2}
    assert types.disturbance(found) == 12
    assert types.merged({}, slow) == slow
    for seconds in fast["seconds"].values():
        seconds[ik.NAME] = 0.4
    assert types.merged(slow, fast) == fast, "the new side has had fewer tries"


def test_the_picture_has_a_panel_for_each_shape_and_point(tmp_path):
    cells = [cell(), cell(kind="Q8_0"), cell("llama-3.2-1b")]
    assert len(types_plot.figure(cells).axes) == 2 * len(types.POINTS)
    types_plot.draw(cells, tmp_path / "types.svg")
    assert "Q4_1" in (tmp_path / "types.svg").read_text()


@pytest.fixture
def small(monkeypatch, tmp_path):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path))
    shape = synth.SHAPES["qwen2.5-0.5b"]
    monkeypatch.setitem(synth.SHAPES, "small", dataclasses.replace(shape, n_layer=1, n_vocab=2048))


def test_a_file_has_the_types_that_llama_quantize_gives(small):
    pytest.importorskip("llama_cpp")
    said: list[str] = []
    for kind, of_gate, of_down in (("Q4_K_M", "Q5_0", "Q6_K"), ("Q5_K_M", "Q5_1", "Q6_K"), ("MXFP4", "MXFP4", "MXFP4")):
        with type_files.model("small", kind, said.append) as path:
            found = {each.name: TENSOR_TYPES[each.type][0] for each in read_tensors(path)}
        assert (found["blk.0.ffn_gate.weight"], found["blk.0.ffn_down.weight"]) == (of_gate, of_down)
    assert not list(places.cache_dir().glob("models/types-*"))
    with pytest.raises(SetupFailure, match="Q9_9"), type_files.model("small", "Q9_9", said.append):
        pass


def test_a_run_goes_on_where_it_was_stopped(monkeypatch, tmp_path):
    path, measured = tmp_path / "types.json", []

    def measure(model, threads, rounds, folders, of_ik):
        measured.append(model)
        if len(measured) == 2:
            raise KeyboardInterrupt
        return {name: value for name, value in cell().items() if name not in ("shape", "type", "build", "shares")}

    monkeypatch.setattr(types, "installed_build", lambda: "abc")
    monkeypatch.setattr(types.stock, "libraries", lambda plan: tmp_path)
    monkeypatch.setattr(types, "product_roofs", lambda threads: {"vpdpbusd": 1e12})
    monkeypatch.setattr(types, "bandwidth", lambda threads: 3e10)
    monkeypatch.setattr(types, "measure", measure)
    monkeypatch.setattr(types.type_files, "model", lambda shape, kind, say: _Given(kind))
    asked = ["--shape", "qwen2.5-0.5b", "--type", "Q8_0", "--type", "Q4_1", "--json", str(path)]
    assert CliRunner().invoke(types.main, asked).exit_code == 1
    assert [each["type"] for each in json.loads(path.read_text())["cells"]] == ["Q8_0"]
    assert CliRunner().invoke(types.main, asked, catch_exceptions=False).exit_code == 0
    assert measured == ["Q8_0", "Q4_1", "Q4_1"]
    monkeypatch.setattr(types, "installed_build", lambda: "another")
    CliRunner().invoke(types.main, asked, catch_exceptions=False)
    assert measured[3:] == ["Q8_0", "Q4_1"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="a variant of x86-64")
def test_both_sides_can_be_built_for_another_cpu(monkeypatch, tmp_path):
    plans = []
    monkeypatch.setattr(types.stock, "libraries", lambda plan: plans.append(plan) or tmp_path / "stock")
    monkeypatch.setattr(types.stock, "patched_libraries", lambda plan: plans.append(plan) or tmp_path / "ours")
    found = types.builds("haswell")
    assert found.folders == {"ours": tmp_path / "ours", "stock": tmp_path / "stock"}
    assert found.key == plans[0].key != types.machine.make_plan("cpu").key
    on = {flag for flag in plans[0].flags if flag.startswith("-DGGML_AVX")}
    assert plans[0] == plans[1]
    assert "-DGGML_NATIVE=OFF" in plans[0].flags
    assert on == {"-DGGML_AVX=ON", "-DGGML_AVX2=ON"}


class _Given:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *_):
        pass
