"""Prefixes saved to a file by one engine and loaded by another."""

import subprocess
import sys

import pytest

from llamabatch import LLM, InputError, SamplingParams

TEXT = "Ada keeps three cats. Ben keeps one dog. Carla keeps five fish. " * 8
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ASKED = [TEXT + question for question in ("How many?", "Who?", "Where are the cats?")]
KINDS = {
    "one": {"instances": 1, "n_slots": 4},
    "threads": {"instances": 2, "n_slots": 4},
    "children": {"strategy": "multi-instance", "instances": 2, "n_slots": 2},
    "child": {"instances": 1, "n_slots": 4, "isolate": True},
    "unified": {"instances": 1, "n_slots": 4, "kv": "unified", "n_ctx": 1024, "kv_cells": 4096},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Written by another process, from an engine of several slots; and what a prompt gave there."""
    path = tmp_path_factory.mktemp("prefix") / "text.kv"
    program = (
        "from llamabatch import LLM, SamplingParams\n"
        "llm = LLM('tiny', instances=1, n_slots=4)\n"
        "llm.generate(['a', 'b', 'c'], SamplingParams(max_tokens=2))\n"
        f"print(llm.save_prefix({TEXT!r}, {str(path)!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with LLM("tiny", instances=1, n_slots=4, cache_prefix=False) as llm:
        wanted = llm.generate(ASKED, GREEDY)
        assert int(done.stdout) == len(llm.tokenize(TEXT))
    return path, int(done.stdout), wanted


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_requests_that_begin_so_do_not_compute_it(saved, options, assert_equal_by_the_rule):
    path, n_tokens, wanted = saved
    with LLM("tiny", **options) as llm:
        assert llm.load_prefix(path) == n_tokens
        outputs = llm.generate(ASKED, GREEDY)
        stats = llm.stats()
        assert stats.prefix_hits >= 1
        assert stats.prefix_tokens >= n_tokens - 2  # the last token of the text may become another where it goes on
        assert stats.prefill_tokens < n_tokens
        assert_equal_by_the_rule(outputs, wanted, least=0.6)
        llm.unload_prefix(path)
        with pytest.raises(InputError, match="is loaded"):
            llm.unload_prefix(path)


def test_it_outlives_growth_and_eviction(saved):
    path, n_tokens, _ = saved
    with LLM("tiny", instances=1, n_slots=2, start_slots=1) as llm:
        llm.load_prefix(path)
        for i in range(3):
            llm.generate([f"{i} {j} " + "something else altogether " * 20 for j in range(4)], GREEDY)
            before = llm.stats()
            llm.generate(ASKED[i], GREEDY)
            assert llm.stats().prefix_tokens - before.prefix_tokens >= n_tokens - 2


def test_files_that_do_not_fit_are_refused_by_name(saved, tmp_path):
    path, _, _ = saved
    data = path.read_bytes()
    bad = {
        "cut off": data[: len(data) // 2],
        "checksum": data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
        "no prefix file": b"GGUF" + data,
        "is no prefix": b"",
    }
    with LLM("tiny", instances=1, n_slots=2) as llm:
        for message, content in bad.items():
            (tmp_path / "bad.kv").write_bytes(content)
            with pytest.raises(InputError, match=message):
                llm.load_prefix(tmp_path / "bad.kv")
        with pytest.raises(InputError, match="cannot be read"):
            llm.load_prefix(tmp_path / "missing.kv")
        with pytest.raises(InputError, match="at least 32"):
            llm.save_prefix("Hello", tmp_path / "short.kv")
        with pytest.raises(InputError, match="cannot be saved"):
            llm.save_prefix(TEXT, tmp_path / "no such folder" / "x.kv")
        assert llm.generate("still there", GREEDY)[0].error is None
    quantised = LLM("tiny", instances=1, n_slots=2, type_k="q8_0", flash_attn="on")
    with quantised as llm, pytest.raises(InputError, match="type_k 'f16'; this engine has 'q8_0'"):
        llm.load_prefix(path)


def test_a_file_of_another_model_or_version_is_refused(saved, tmp_path):
    from llamabatch.llama import prefixes
    from llamabatch.prefix_file import read, write

    path, _, _ = saved
    with LLM("tiny", instances=1, n_slots=2) as llm:
        facts = prefixes.facts(llm._client.model, llm.plan.config)
        prefix = read(path, facts)
        for name, other in (("model", "0" * 32), ("llama_cpp", "0.0.1"), ("n_embd", 7), ("adapters", [["a", 1.0]])):
            write(tmp_path / "other.kv", prefix, {**facts, name: other})
            with pytest.raises(InputError, match=rf"is for {name} "):
                llm.load_prefix(tmp_path / "other.kv")
