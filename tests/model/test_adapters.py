"""LoRAs and control vectors on the bundled model: each request gets the adapters that it asks for, also in a batch."""

from __future__ import annotations

import struct
from functools import partial

import gguf
import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.equality import LogitGap
from llamabatch import LLM, AdapterError, ConfigError, ModelFileError, SamplingParams
from llamabatch.cli import cli
from llamabatch.request.adapters import adapter_set
from tests.model.adapter_files import write_control_vector, write_lora
from tests.model.conftest import mixed_conversations, questions
from tests.waiting import until

GREEDY = SamplingParams(temperature=0, max_tokens=32)
SETS = [None, {"a": 1.0}, {"b": 0.7}, {"a": 0.5, "b": 0.5}, {"v": 1.0}, {"a": 1.0, "v": -0.5}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "a": write_lora(folder / "a.gguf", seed=1, size=0.6),
        "b": write_lora(folder / "b.gguf", seed=2, size=0.6),
        "v": write_control_vector(folder / "v.gguf", seed=3, size=8.0),
    }


@pytest.fixture(scope="module")
def llm(files):
    with LLM("tiny", strategy="batched", n_slots=8, adapters=files) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(files):
    """The outputs of all conversations, run one after another, by the index of the set of adapters."""
    asked = mixed_conversations(4)
    with LLM("tiny", strategy="sequential", adapters=files) as llm:
        return {i: llm.chat(asked, GREEDY, adapters=adapters) for i, adapters in enumerate(SETS)}


def test_every_set_changes_the_text(alone):
    texts = [tuple(output.text for output in outputs) for outputs in alone.values()]
    assert len(set(texts)) == len(SETS)


@pytest.fixture(scope="module")
def gap(files):
    gap = LogitGap(files)
    yield gap
    gap.close()


def company():
    asked = mixed_conversations(4)
    return [(i, k) for k in range(len(asked)) for i in range(len(SETS))], asked


@pytest.mark.parametrize(
    "options",
    [{"strategy": "batched"}, {"strategy": "interleaved"}, {"kv": "unified"}, {"instances": 2}, {"isolate": True}],
    ids=str,
)
def test_sets_mixed_in_flight_give_what_each_gives_alone(options, files, alone, gap, assert_equal_by_the_rule):
    pairs, asked = company()
    with LLM("tiny", n_slots=8, adapters=files, **options) as llm:
        assert llm.adapters == ["a", "b", "v"]
        outputs = llm.chat([asked[k] for _, k in pairs], GREEDY, adapters=[SETS[i] for i, _ in pairs])
        assert llm.stats().adapter_switches >= len(SETS) - 1
    for n, adapters in enumerate(SETS):
        got = [output for output, (i, _) in zip(outputs, pairs, strict=True) if i == n]
        assert_equal_by_the_rule(got, alone[n], least=0, gap_of=partial(gap, adapters=adapter_set(adapters)))
    wanted = [alone[i][k] for i, k in pairs]
    assert sum(a.token_ids == b.token_ids for a, b in zip(outputs, wanted, strict=True)) >= 0.9 * len(pairs)


def test_no_adapters_cost_no_call(llm):
    before = llm.stats().adapter_switches
    llm.chat(mixed_conversations(1), GREEDY)
    set_now = llm.stats().adapter_switches
    llm.chat(mixed_conversations(4), GREEDY)
    assert llm.stats().adapter_switches == set_now <= before + 1


def test_scale_0_is_none_and_another_scale_another_text(llm, alone):
    asked = mixed_conversations(4)
    assert [o.text for o in llm.chat(asked, GREEDY, adapters={"a": 0})] == [o.text for o in llm.chat(asked, GREEDY)]
    assert [o.text for o in llm.chat(asked, GREEDY, adapters={"a": 0.25})] != [o.text for o in alone[1]]
    assert [o.text for o in llm.chat(asked, GREEDY, adapters="a")] == [o.text for o in alone[1]]


def test_an_unknown_name_is_its_request_s_error(llm):
    with pytest.raises(AdapterError, match=r"no adapter 'c'.*known: a, b, v"):
        llm.generate("Hello", GREEDY, adapters={"c": 1.0})
    good, bad = llm.generate(["Hello", "Hello"], GREEDY, adapters=[{"a": 1.0}, {"c": 1.0}], errors="return")
    assert good.error is None
    assert "no adapter 'c'" in bad.error
    for adapters, words in (
        ({"a": float("nan")}, "scale of adapter 'a' is nan"),
        ({"a": 1000.5}, "must lie from -1000 to 1000"),
        ([{"a": 1.0}], "1 set of adapters for 2 prompts"),
    ):
        with pytest.raises(AdapterError, match=words):
            llm.generate(["Hello", "Hello"], GREEDY, adapters=adapters)


@pytest.mark.parametrize("options", [{}, {"instances": 2}, {"strategy": "multi-instance", "instances": 2}], ids=str)
def test_loading_and_unloading(options, files, steps):
    with LLM("tiny", n_slots=4, **options) as llm:
        with pytest.raises(AdapterError, match=r"no adapter 'a' \(none is loaded\)"):
            llm.generate("Hello", GREEDY, adapters={"a": 1.0})
        plain = llm.generate(["Hello"] * 4, GREEDY)
        llm.load_adapter("a", files["a"])
        with pytest.raises(AdapterError, match="loaded already"):
            llm.load_adapter("a", files["b"])
        with pytest.raises(ModelFileError, match="cannot be read"):
            llm.load_adapter("c", "missing.gguf")
        adapted = llm.generate(["Hello"] * 4, GREEDY, adapters={"a": 1.0})
        assert [o.text for o in adapted] != [o.text for o in plain]
        long = SamplingParams(max_tokens=2000, ignore_eos=True)
        with steps.each_takes(0.01):
            stream = llm.stream(["Hello"] * 2, long, adapters={"a": 1.0})
            next(stream)
            with pytest.raises(AdapterError, match="used by requests in flight"):
                llm.unload_adapter("a")
            assert llm.adapters == ["a"]
        assert llm.generate("Hello", GREEDY, adapters={"a": 1.0})[0].text == adapted[0].text
        stream.close()
        until(lambda: not llm.stats().in_flight)  # the abort takes effect after a moment
        llm.unload_adapter("a")
        assert llm.adapters == []
        with pytest.raises(AdapterError, match="no adapter 'a'"):
            llm.unload_adapter("a")
        assert [o.text for o in llm.generate(["Hello"] * 4, GREEDY)] == [o.text for o in plain]


def test_files_that_do_not_fit_are_refused(tmp_path, llm):
    other = write_lora(tmp_path / "other.gguf", architecture="qwen2")
    with pytest.raises(ModelFileError, match="arch mismatch"):
        llm.load_adapter("x", other)
    with pytest.raises(ModelFileError, match="must hold 192 floats"):
        llm.load_adapter("x", write_control_vector(tmp_path / "wide.gguf", n_embd=256))
    with pytest.raises(ModelFileError, match="not 'adapter' and 'lora'"):
        llm.load_adapter("x", llm._client.model.path)
    with pytest.raises(ConfigError, match="adapters is 7"):
        LLM("tiny", adapters=7)
    with pytest.raises(ModelFileError, match="cannot be read"):
        LLM("tiny", adapters={"x": str(tmp_path / "none.gguf")})
    assert "x" not in llm.adapters


def broken(path, change):
    writer = gguf.GGUFWriter(path, "llama")
    values = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0} | change.get("values", {})
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    name = change.get("name", "blk.0.attn_q.weight")
    for part, shape in (("a", change.get("a", (4, 192))), ("b", change.get("b", (192, 4)))):
        writer.add_tensor(f"{name}.lora_{part}", np.ones(shape, change.get("type", np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"values": {"general.type": 7}}, "general.type has a value of type 4"),
        ({"values": {"adapter.lora.alpha": 8}}, "alpha has a value of type 4"),
        ({"values": {"adapter.lora.alpha": float("inf")}}, "alpha is inf"),
        ({"values": {"adapter.alora.invocation_tokens": [1, 2]}}, "activated LoRA"),
        ({"values": {"general.alignment": 33}}, "general.alignment is 33"),
        ({"type": np.int32}, "has the type 26"),
        ({"a": (2, 4, 192)}, "has the shape"),
        ({"name": "token_embd.weight", "a": (1120, 3), "b": (192, 4)}, "ranks 3 and 4"),
        ({"name": "blk.0.no_such.weight"}, "does not exist in base model"),
        ({"a": (4, 100)}, "incorrect shape"),
    ],
    ids=str,
)
def test_what_would_abort_llama_cpp_is_refused(tmp_path, llm, change, words):
    with pytest.raises(ModelFileError, match=words):
        llm.load_adapter("x", broken(tmp_path / "x.gguf", change))


def test_a_cut_or_damaged_file_is_refused(tmp_path, llm, files):
    whole = files["a"].read_bytes()
    for data in (b"", b"GGUF", whole[:200], whole[:-1000], struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 1)):
        (tmp_path / "cut.gguf").write_bytes(data)
        with pytest.raises(ModelFileError, match=r"adapter .*cut\.gguf"):
            llm.load_adapter("x", tmp_path / "cut.gguf")
    assert llm.generate("Hello", GREEDY)[0].error is None


def test_the_command_line_applies_them(files):
    question = questions()[0]
    arguments = ["generate", "--chat", question, "-t", "0", "-n", "32", "--n-ctx", "512"]
    with LLM("tiny", n_ctx=512, n_slots=1, adapters=files) as llm:
        for adapters in (None, {"a": 1.0, "b": 0.5}):
            loras = [f"--lora={files[name]}={scale}" for name, scale in (adapters or {}).items()]
            [wanted] = llm.chat([{"role": "user", "content": question}], GREEDY, adapters=adapters)
            result = CliRunner().invoke(cli, [*arguments, *loras])
            assert (result.exit_code, result.output) == (0, wanted.text + "\n")
