"""One engine saves prefixes to a file, and another loads them."""

import struct
import subprocess
import sys

import pytest

from llamabatch import LLM, InputError, SamplingParams
from llamabatch.llama import library

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
    """A prefix file that another process wrote, with an engine of several slots, and the outputs of that engine."""
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
        assert stats.prefix_tokens >= n_tokens - 2  # the last token of the prefix may differ when more text follows
        assert stats.prefill_tokens < n_tokens
        assert_equal_by_the_rule(outputs, wanted, least=0.6)
        llm.unload_prefix(path)
        with pytest.raises(InputError, match="is loaded"):
            llm.unload_prefix(path)


@pytest.mark.skipif(not library.has_equal_rows(), reason="llama.cpp is not our build with 0010")
def test_a_promise_of_equal_bits_takes_no_cells_of_other_kernels(saved, tmp_path):
    with LLM("tiny", instances=1, extra_bufts="off") as llm:
        llm.save_prefix(TEXT, tmp_path / "others.kv")
    with LLM("tiny", instances=1) as llm:
        assert llm.load_prefix(tmp_path / "others.kv") == saved[1]
    with LLM("tiny", instances=1, batch_invariant=True) as llm:
        llm.save_prefix(TEXT, tmp_path / "own.kv")
        with pytest.raises(InputError, match=r"is for kernels '.*bufts off'; this engine has '"):
            llm.load_prefix(tmp_path / "others.kv")
        assert llm.load_prefix(tmp_path / "own.kv") == saved[1]


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
    from llamabatch.engine.prefix_file import read, write
    from llamabatch.llama import kv_state

    path, _, _ = saved
    with LLM("tiny", instances=1, n_slots=2) as llm:
        facts = kv_state.facts(llm._client.model, llm.plan.config)
        prefix = read(path, facts)
        for name, other in (("model", "0" * 32), ("llama_cpp", "0.0.1"), ("n_embd", 7), ("adapters", [["a", 1.0]])):
            write(tmp_path / "other.kv", prefix, {**facts, name: other})
            with pytest.raises(InputError, match=rf"is for {name} "):
                llm.load_prefix(tmp_path / "other.kv")


def layout(state, n_tokens):
    """Returns offsets in a state of `tiny`: f16, flash attention, 6 layers of K and V in rows."""
    cells = 8
    head = cells + 12 * n_tokens
    row = struct.unpack_from("<Q", state, head + 12)[0]
    return cells, head, row


def hostile(state, n_tokens):
    """Yields changed states, each with a part of the error message."""
    cells, head, row = layout(state, n_tokens)
    rows = head + 20

    def put(at, form, *values):
        changed = bytearray(state)
        struct.pack_into(form, changed, at, *values)
        return bytes(changed)

    yield put(4, "<I", 0), "0 cells"
    yield put(4, "<I", 2**32 - 1), "4294967295 cells"
    yield put(4, "<I", n_tokens + 1), "refused"
    for position in (-1, -(2**31), 2**31 - 1, n_tokens, 1):
        yield put(cells, "<i", position), "the positions of its tokens"
    for n_seq_id in (0, 2, 2**32 - 1):
        yield put(cells + 4, "<I", n_seq_id), "several sequences"
    yield put(head, "<I", 7), "transposed: 7"
    yield put(head, "<I", 1), "refused"  # claims that V is transposed
    for n_layer in (0, 1, 5, 7, 2**32 - 1):
        yield put(head + 4, "<I", n_layer), "refused"
    for kind in (-1, 0, 30, 2**31 - 1):
        yield put(head + 8, "<i", kind), "K has the type"
    for row_bytes in (0, 1, row - 2, row + 2, 2**31, 2**63, 2**64 - 1):
        yield put(head + 12, "<Q", row_bytes), "refused"
    for value in (float("nan"), float("inf"), float("-inf")):
        yield put(rows, "<e", value), "no finite numbers"
        yield put(len(state) - 2, "<e", value), "no finite numbers"
    yield state + b"\0" * 4, "follow its last layer"
    yield state[:-1], "ends too early"
    yield state[:3], "refused"


def test_hostile_states_are_refused_before_llama_cpp_sees_them(saved, tmp_path):
    from llamabatch.engine.prefix_file import PrefixFile, read, write
    from llamabatch.llama import kv_state

    path, n_tokens, _ = saved
    bad = tmp_path / "bad.kv"
    with LLM("tiny", instances=1, n_slots=2) as llm:
        facts = kv_state.facts(llm._client.model, llm.plan.config)
        good = read(path, facts)
        for state, says in hostile(good.state, n_tokens):
            write(bad, PrefixFile(good.token_ids, state), facts)
            with pytest.raises(InputError, match=says) as refusal:
                llm.load_prefix(bad)
            assert str(bad) in str(refusal.value)
        n_vocab = llm._client.model.n_vocab
        write(bad, PrefixFile((*good.token_ids[:-1], n_vocab), good.state), facts)
        with pytest.raises(InputError, match=f"token id {n_vocab}"):
            llm.load_prefix(bad)
        # our loader does not check the magic number; llama.cpp refuses it
        write(bad, PrefixFile(good.token_ids, b"GGUF" + good.state[4:]), facts)
        llm.load_prefix(bad)
        [refused, other] = llm.generate([ASKED[0], "still there"], GREEDY, errors="return")
        assert "saved prefix" in refused.error
        assert other.error is None
        llm.unload_prefix(bad)
        assert llm.load_prefix(path) == n_tokens
        assert llm.generate(ASKED[0], GREEDY)[0].error is None


MUTATE = """
import random, sys
from llamabatch import LLM, InputError, SamplingParams
from llamabatch.llama import kv_state as prefixes
from llamabatch.engine.prefix_file import PrefixFile, read, write

path, bad, options, text = sys.argv[1], sys.argv[2], eval(sys.argv[3]), sys.argv[4]
random.seed(7)
greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
n_loaded = 0
with LLM("tiny", instances=1, n_slots=2, **options) as llm:
    wanted = llm.generate("a prompt of someone else", greedy)[0].token_ids
    llm.save_prefix(text, path)
    facts = prefixes.facts(llm._client.model, llm.plan.config)
    good = read(path, facts)
    for number in range(120):
        state = bytearray(good.state)
        for _ in range(random.choice((1, 1, 2, 8))):
            structure = 12 * len(good.token_ids) + 40
            at = random.randrange(len(state) if random.random() < 0.4 else structure)
            if random.random() < 0.2:
                state[at : at + random.randrange(64)] = random.randbytes(random.randrange(64))
            elif at < len(state):
                state[at] = random.randrange(256)
        write(bad, PrefixFile(good.token_ids, bytes(state)), facts)
        try:
            llm.load_prefix(bad)
        except InputError:
            continue
        n_loaded += 1
        llm.generate([text + f" And {number}?"], greedy)
        assert llm.generate("a prompt of someone else", greedy)[0].token_ids == wanted, number
        llm.unload_prefix(bad)
print("lived", n_loaded)
"""


@pytest.mark.parametrize(
    "options",
    [{}, {"flash_attn": "off"}, {"type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}, {"type_k": "f32"}],
    ids=["f16", "transposed", "q8_0", "f32"],
)
def test_no_changed_state_ends_the_process_or_touches_other_requests(options, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", MUTATE, str(tmp_path / "good.kv"), str(tmp_path / "bad.kv"), repr(options), TEXT],
        capture_output=True, text=True, timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[1]) > 5, "some changes of values are loaded: they are what is tested here"
