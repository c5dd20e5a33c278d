"""States of all kinds of memory are forked, saved and restored: in random histories, and in prefix files."""

import pytest

from llamabatch import LLM, ConfigError, SamplingParams
from llamabatch.config import EngineConfig
from llamabatch.llama import library
from llamabatch.llama.model import Model
from llamabatch.llama.model_runner import ModelRunner
from llamabatch.native_build.tools import SetupFailure
from llamabatch.planning.binding_choice import choose
from llamabatch.scheduler.output import PrefixCopy, Restore, Save, SchedulerOutput
from llamabatch.scheduler.prefix_store import StoredPrefix
from tests.archs import models
from tests.model.state_copies import KINDS, N_VOCAB, SIZES, Histories
from tests.unit.configs import resolved
from tests.unit.small_prefixes import small_thresholds

CASES = 18  # histories of each kind
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)
PROMPT = [(7 * i + 3) % N_VOCAB for i in range(150)]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Paths of small random models, by the name of the architecture."""
    folder = tmp_path_factory.mktemp("states")
    try:
        found = models.write(folder, sorted({name for name, _, _ in KINDS}))
    except SetupFailure as error:
        pytest.skip(f"no models: {error}")
    return {path.stem.rpartition("-")[0]: path for path in found}


@pytest.mark.parametrize(("name", "options", "tolerance"), KINDS)
def test_random_histories_have_the_bits_of_fresh_engines(paths, name, options, tolerance):
    with small_thresholds():
        histories = Histories(paths[name], tolerance, **options)
        try:
            for number in range(CASES):
                histories.case(number)
            stats = histories.engine.stats()
        finally:
            histories.close()
    assert min(stats.shared_tokens, stats.prefix_tokens) > 20 * CASES
    assert stats.preemptions > 1
    if "speculate" in options:
        assert 10 * CASES < stats.accepted_tokens < stats.drafted_tokens - 5 * CASES


DISK_KINDS = [pytest.param(*KINDS[k], marks=[] if k in (0, 3) else [pytest.mark.slow]) for k in (0, 2, 3, 4, 8, 16)]


@pytest.mark.parametrize(("name", "options", "tolerance"), DISK_KINDS)
def test_random_histories_over_processes_have_the_bits_of_fresh_engines(paths, tmp_path, name, options, tolerance):
    with small_thresholds():
        histories = Histories(paths[name], tolerance, **options, cache_disk=tmp_path, cache_disk_mib=2)
        try:
            for number in range(CASES // 2):
                histories.case(number)
        finally:
            histories.close()
    assert histories.n_read > 10 * CASES


def test_equal_bits_are_asked_of_builds_that_have_them():
    assert choose().build.marker is None or {tolerance for _, _, tolerance in KINDS} == {0.0, 1e-4}


def test_a_llama_cpp_without_snapshots_of_a_state_is_named(paths, monkeypatch):
    monkeypatch.setattr(library.load(), "llama_n_rs_seq", lambda context: 0)
    with pytest.raises(ConfigError, match="keeps no older states of qwen35"):
        LLM(str(paths["qwen35"]), strategy="batched", n_slots=2, speculate="lookup", **SIZES)


@pytest.fixture
def runner(paths):
    path, sizes = paths["qwen35"], {**SIZES, "device_sampling": "off"}  # because whole rows of logits are read
    model = Model(path, EngineConfig(str(path), **sizes))
    made = ModelRunner(model, resolved(str(path), **{**sizes, "n_slots": 3, "start_slots": 3, "cache_ram": 1}), 3)
    yield made
    made.close()
    model.close()


def fill(runner, slot: int, tokens: list[int]) -> None:
    """Computes tokens in a slot."""
    start = runner._context.length(slot)
    rows = runner._batch.fill_rows(tokens, list(range(start, start + len(tokens))), [slot] * len(tokens))
    assert runner._context.decode(rows) == 0
    runner._moves.unflushed = False


def last_logits(runner, slot: int, token: int) -> bytes:
    fill(runner, slot, [token])
    return runner._context.logits(1).tobytes()


def saved(runner, slot: int, tokens: list[int]) -> StoredPrefix:
    prefix = StoredPrefix(tokens)
    runner.run(SchedulerOutput(saves=(Save(slot, prefix, lambda prefix, n_bytes: True),)))
    return prefix


def test_nothing_is_saved_while_copies_wait_for_the_next_decode(runner):
    """llama.cpp would save the slot's old contents."""
    fill(runner, 0, PROMPT[:20])
    runner.run(SchedulerOutput(copies=(PrefixCopy(0, 1, 20),)))
    assert saved(runner, 1, PROMPT[:20]).state is None
    fill(runner, 2, PROMPT[:3])  # the decode that makes the copy
    assert saved(runner, 1, PROMPT[:20]).state is not None


def test_a_state_of_more_tokens_is_not_saved(runner):
    fill(runner, 0, PROMPT[:20])
    assert saved(runner, 0, PROMPT[:19]).state is None


def test_a_restore_comes_after_the_copies_that_wait(runner):
    """A copy into the slot is made at the next decode. It would overwrite a state that was loaded before."""
    fill(runner, 0, PROMPT[:20])
    prefix = saved(runner, 0, PROMPT[:20])
    wanted = last_logits(runner, 0, 5)
    runner._context.clear(0)
    fill(runner, 1, PROMPT[50:70])
    runner.run(SchedulerOutput(copies=(PrefixCopy(1, 2, 20),)))
    runner._context.clear(2)
    runner.run(SchedulerOutput(restores=(Restore(2, prefix, 20),)))
    assert runner._context.length(2) == 20
    assert last_logits(runner, 2, 5) == wanted


def test_a_fork_without_a_pass_between_is_one_of_the_state_as_it_is(runner):
    fill(runner, 0, PROMPT[:20])
    runner.run(SchedulerOutput(copies=(PrefixCopy(0, 1, 20), PrefixCopy(1, 2, 20))))
    found = {last_logits(runner, slot, 5) for slot in (0, 1, 2)}
    assert len(found) == 1


def values(outputs):
    """Returns the logprobs at each generated token, by token id."""
    return [{token_id: found.logprob for token_id, found in row.items()} for row in outputs[0].outputs[0].logprobs]


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid", "mamba2", "gpt-oss"])
def test_a_saved_prefix_serves_an_engine_of_other_slots(paths, name, tmp_path):
    # gpt-oss has a window, for which there is no promise of equal bits
    options = {**SIZES, "strategy": "batched", "batch_invariant": library.has_equal_rows() and name != "gpt-oss"}
    near = 1e-3 if name == "gpt-oss" else 0.0
    asked = [*PROMPT, 5, 6, 7]
    with LLM(str(paths[name]), n_slots=4, **options) as llm:
        wanted = values(llm.generate([asked], GREEDY))
        llm.reset_prefix_cache()
        assert llm.save_prefix(PROMPT, tmp_path / "prefix.kv") == len(PROMPT)
    with LLM(str(paths[name]), n_slots=2, **options) as llm:
        llm.load_prefix(tmp_path / "prefix.kv")
        found = values(llm.generate([asked], GREEDY))
        assert found == [pytest.approx(row, rel=0, abs=near) for row in wanted]
        assert llm.stats().prefix_tokens == len(PROMPT)
        llm.generate([PROMPT[:100]], GREEDY)  # a part of a saved state cannot be used
        assert llm.stats().prefix_tokens <= len(PROMPT) + 100


@pytest.mark.parametrize("name", ["qwen35", "gpt-oss"])  # test_second_turns.py has more
def test_the_second_turn_of_a_long_chat_computes_its_own_tokens(paths, name):
    """This holds even if other chats have used all slots since, or if the prompt has another answer than the
    model's."""
    options = {**SIZES, "n_ctx": 4096, "n_batch": 512, "n_ubatch": 512, "strategy": "batched"}
    options["kv_overrides"] = {f"{name}.context_length": 4096}  # the files say 256
    chat = [(i * i + 7 * i) % N_VOCAB for i in range(2000)]
    with LLM(str(paths[name]), n_slots=2, **options) as llm:
        llm.generate([chat], GREEDY)
        llm.generate([[n, *chat[n : n + 300]] for n in range(1, 5)], GREEDY)
        before = llm.stats()
        asked = [*chat, *[9] * 100]
        llm.generate([asked], GREEDY)
        kept = llm.stats().prefix_tokens - before.prefix_tokens
    assert len(asked) - kept < 0.1 * len(asked)
