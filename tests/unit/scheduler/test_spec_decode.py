"""Speculative decoding: draft tokens never change a text, and are used only where they save time."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch import ConfigError, EngineConfig, SamplingParams
from llamabatch.sampling.token_counts import token_counts
from llamabatch.scheduler.output import Limits
from llamabatch.scheduler.policies import POLICIES, policy
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.scheduler.spec_decode import STEPS_TO_RETRY, Acceptance, SpecDecoder, can_draft
from tests.unit.configs import resolved
from tests.unit.fakes import (
    N_CTX,
    Clock,
    FakeModelRunner,
    drain,
    expected_output,
    expected_shifted,
    next_token,
    random_prompt,
    sequence,
    sometimes_abort,
    step,
)

LIMITS = Limits(n_slots=8, n_batch=128, n_ubatch=64, prefill_budget=32)


class Guesser:
    """Proposes drafts of any length, also none. Each token is right with a given probability."""

    def __init__(self, rng: random.Random, right: float, is_free: bool = True, ragged: bool = True) -> None:
        self.is_free = is_free
        self.asked = 0
        self._rng, self._right, self._ragged = rng, right, ragged

    def propose(self, sequences, n):
        self.asked += 1
        drafts = []
        for one in sequences:
            tokens = list(one.token_ids)
            for _ in range(self._rng.randrange(n + 1) if self._ragged else n):
                right = self._rng.random() < self._right
                tokens.append(next_token(tokens) if right else self._rng.randrange(64))
            drafts.append(tokens[len(one.token_ids) :])
        return drafts

    def close(self):
        pass


class TimedRunner(FakeModelRunner):
    """A runner whose calls take `cost(rows)` seconds."""

    def __init__(self, limits, clock, cost) -> None:
        super().__init__(limits)
        self._clock, self._cost = clock, cost

    def _run_call(self, call):
        self._clock.now += self._cost(sum(span.length for span in call.spans))
        return super()._run_call(call)


@settings(max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    n_slots=st.integers(1, 9),
    n_ubatch=st.sampled_from([9, 32, 200]),
    n_cells=st.sampled_from([None, None, 600]),
    is_ragged=st.booleans(),
    n_draft=st.sampled_from([1, 3, 8]),
    right=st.sampled_from([0.0, 0.5, 1.0]),
    is_free=st.booleans(),
    always=st.booleans(),
    no_room_every=st.sampled_from([0, 0, 7]),
)
def test_right_wrong_and_half_right_guesses_change_no_text(
    seed, name, n_slots, n_ubatch, n_cells, is_ragged, n_draft, right, is_free, always, no_room_every
):
    rng = random.Random(seed)
    limits = Limits(
        n_slots,
        300,
        n_ubatch,
        prefill_budget=32,
        n_outputs=n_slots * 3,
        n_cells=n_cells,
        can_pad=n_cells is None,
        is_ragged=is_ragged,
    )
    speculation = SpecDecoder(Guesser(rng, right, is_free), limits, n_draft, N_CTX, always)
    scheduler = Scheduler(policy(name), limits, spec_decoder=speculation)
    runner = FakeModelRunner(limits, no_room_every=no_room_every)
    asked = {f"r{i}": (random_prompt(rng), rng.randrange(1, 60)) for i in range(rng.randrange(1, 25))}
    for name_of, (prompt, most) in asked.items():
        scheduler.add(sequence(name_of, prompt, most))
    outputs = drain(scheduler, runner)
    for name_of, (prompt, most) in asked.items():
        assert list(outputs[name_of].token_ids) == expected_output(prompt, most)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(POLICIES)),
    right=st.sampled_from([0.0, 0.6, 1.0]),
    always=st.booleans(),
    memory_for=st.sampled_from([None, None, 3]),
    growth_steps=st.sampled_from([0, 3]),
    carries=st.booleans(),
    can_cut=st.booleans(),
)
def test_arrivals_aborts_and_growth_between_guesses(
    seed, name, right, always, memory_for, growth_steps, carries, can_cut
):
    rng = random.Random(seed)
    limits = replace(LIMITS, start_slots=2, can_cut=can_cut, can_pad=can_cut)
    speculation = SpecDecoder(Guesser(rng, right), limits, 5, N_CTX, always)
    scheduler = Scheduler(policy(name), limits, spec_decoder=speculation)
    runner = FakeModelRunner(limits, memory_for=memory_for, growth_steps=growth_steps, carries=carries)
    asked, finished = {}, {}
    for number in range(100):
        if number < 50 and rng.random() < 0.4:
            asked[f"r{number}"] = random_prompt(rng)
            scheduler.add(sequence(f"r{number}", asked[f"r{number}"], 30, group=number))
        sometimes_abort(rng, scheduler, asked, 0.1)
        finished |= {o.request_id: o.finished for o in step(scheduler, runner) if o.finished}
    finished |= drain(scheduler, runner)
    for name_of, prompt in asked.items():
        assert list(finished[name_of].token_ids) == expected_output(prompt, 30)


def test_texts_that_shift_run_beside_those_that_are_guessed():
    speculation = SpecDecoder(Guesser(random.Random(2), 0.9), LIMITS, 8, N_CTX, always=True)
    scheduler, runner = Scheduler(policy("batched"), LIMITS, spec_decoder=speculation), FakeModelRunner(LIMITS)
    prompts = [tuple(1 + (i + j) % 60 for j in range(500 - 3 * i)) for i in range(3)]
    for i, prompt in enumerate(prompts):
        scheduler.add(sequence(f"shifts{i}", prompt, 400, overflow="shift"))
        scheduler.add(sequence(f"fits{i}", prompt[:100], 100))
    outputs = drain(scheduler, runner)
    for i, prompt in enumerate(prompts):
        assert list(outputs[f"shifts{i}"].token_ids) == expected_shifted(prompt, 400)
        assert list(outputs[f"fits{i}"].token_ids) == expected_output(prompt[:100], 100)
    assert any(span.draft for call in runner.calls for span in call.spans)
    assert any(span.shift for call in runner.calls if call.n_guesses for span in call.spans)


@pytest.mark.parametrize("length", [N_CTX - 20, N_CTX - 3, N_CTX - 1, N_CTX])
def test_the_end_of_n_ctx_is_met_exactly(length):
    prompt = tuple(1 + i % 60 for i in range(length))
    speculation = SpecDecoder(Guesser(random.Random(1), 0.9), LIMITS, 8, N_CTX, always=True)
    scheduler, runner = Scheduler(policy("batched"), LIMITS, spec_decoder=speculation), FakeModelRunner(LIMITS)
    for i in range(3):
        scheduler.add(sequence(f"r{i}", prompt[i:], 100, ignore_eos=True))
    outputs = drain(scheduler, runner)
    for i in range(3):
        assert len(outputs[f"r{i}"].token_ids) == min(100, N_CTX + 1 - length + i)


def test_a_right_guess_saves_its_steps_and_a_wrong_one_none():
    for right, calls in ((1.0, 5), (0.0, 41)):
        speculation = SpecDecoder(Guesser(random.Random(0), right, ragged=False), LIMITS, 8, N_CTX, always=True)
        scheduler, runner = Scheduler(policy("sequential"), LIMITS, spec_decoder=speculation), FakeModelRunner(LIMITS)
        scheduler.add(sequence("r", (5, 6), 41, ignore_eos=True))
        drain(scheduler, runner)
        assert len(runner.calls) in (calls, calls + 1)  # one call for the prompt, then those of 40 tokens
        assert speculation.counts.verify_calls == len([c for c in runner.calls if c.n_guesses])
        assert (speculation.counts.accepted_tokens > 30) == (right == 1.0)


def test_company_that_cannot_be_drafted_runs_beside_those_that_can():
    rng = random.Random(3)
    speculation = SpecDecoder(Guesser(rng, 1.0, ragged=False), LIMITS, 4, N_CTX, always=True)
    scheduler, runner = Scheduler(policy("batched"), LIMITS, spec_decoder=speculation), FakeModelRunner(LIMITS)
    prompts = {f"r{i}": random_prompt(rng, 20) for i in range(6)}
    for i, (name, prompt) in enumerate(prompts.items()):
        scheduler.add(sequence(name, prompt, 24, mirostat=2 if i % 2 else 0))
    outputs = drain(scheduler, runner)
    for name, prompt in prompts.items():
        assert list(outputs[name].token_ids) == expected_output(prompt, 24)
    for call in runner.calls:
        for span in call.spans:
            assert not span.draft or not span.sequence.request.params.mirostat
    assert any(span.draft for call in runner.calls for span in call.spans)


@pytest.mark.parametrize(
    "params",
    [
        {"mirostat": 1},
        {"dry_multiplier": 0.8},
        {"structured_outputs": {"regex": "[a-z]+"}},
        {"logits_processors": [lambda ids, logits: logits]},
    ],
)
def test_requests_whose_chain_is_for_one_token_a_step_are_not_drafted(params):
    assert not can_draft(SamplingParams(**params))
    assert can_draft(SamplingParams(repetition_penalty=1.3, min_tokens=2, bad_words=["x"], stop=["x"]))


def simulate(cost, right, steps=400, n_draft=8, rows=4):
    """Returns the share of decode calls with draft tokens in the second half of a run, and the SpecDecoder."""
    clock = Clock()
    speculation = SpecDecoder(Guesser(random.Random(7), right, ragged=False), LIMITS, n_draft, N_CTX, clock=clock)
    scheduler = Scheduler(policy("batched"), LIMITS, clock=clock, spec_decoder=speculation)
    runner = TimedRunner(LIMITS, clock, cost)
    for i in itertools.count():
        while len(scheduler.running) + scheduler.num_waiting < rows:
            scheduler.add(sequence(f"r{i}.{scheduler.num_waiting}.{clock.now}", (1 + i % 50, 2), 400, ignore_eos=True))
        step(scheduler, runner)
        if i >= steps:
            break
    late = runner.calls[len(runner.calls) // 2 :]
    decodes = [call for call in late if all(span.length == 1 for span in call.spans) or call.n_guesses]
    return sum(call.n_guesses > 0 for call in decodes) / len(decodes), speculation


def test_on_where_rows_are_free_and_guesses_right():
    share, speculation = simulate(lambda rows: 0.010, right=0.9)
    assert share > 0.95
    assert speculation.counts.speculating == 1


def test_off_where_guesses_are_wrong_or_rows_cost_what_they_bring():
    for cost, right in ((lambda rows: 0.010, 0.0), (lambda rows: 0.010 * rows, 0.6)):
        share, speculation = simulate(cost, right)
        assert share <= 2 / STEPS_TO_RETRY + 0.01
        assert speculation.counts.speculating == 0


def test_the_length_follows_the_stairs():
    """Up to 8 rows cost one step, and more rows cost ten. With 4 sequences, only one draft token each saves time."""
    _, speculation = simulate(lambda rows: 0.01 if rows <= 8 else 0.1, right=1.0)
    assert speculation.counts.speculating == 1
    per_call = speculation.counts.drafted_tokens / speculation.counts.verify_calls
    assert 3.5 < per_call < 6


def test_it_comes_back_when_the_text_changes():
    clock = Clock()
    guesser = Guesser(random.Random(7), 0.0, ragged=False)
    speculation = SpecDecoder(guesser, LIMITS, 8, N_CTX, clock=clock)
    scheduler = Scheduler(policy("sequential"), LIMITS, clock=clock, spec_decoder=speculation)
    runner = TimedRunner(LIMITS, clock, lambda rows: 0.01)
    states = []
    for i in range(1200):
        if not scheduler.has_work:
            scheduler.add(sequence(f"r{i}", (1, 2, i % 60), 200, ignore_eos=True))
        guesser._right = 0.0 if i < 300 else 1.0
        step(scheduler, runner)
        states.append(speculation.counts.speculating)
    assert states[299] == 0
    assert states[-1] == 1


def test_acceptance_counts_no_guess_behind_a_wrong_one():
    rate = Acceptance()
    for _ in range(200):
        rate.add(8, 0)
    assert rate.rate(1.0) == pytest.approx(4 / (20 + 4), abs=0.01)
    for _ in range(200):
        rate.add(8, 3)
    assert rate.rate(0.5) == pytest.approx(0.75, abs=0.05)


@given(
    st.lists(st.integers(0, 9)), st.lists(st.integers(0, 9)), st.lists(st.integers(0, 12)), st.sampled_from([-1, 1, 5])
)
def test_counts_taken_back_are_as_they_were(prompt, output, guessed, window):
    counts, wanted = token_counts(prompt, window), token_counts(prompt, window)
    for token in output:
        counts.add(token)
        wanted.add(token)
    before = len(counts.ids)
    for token in guessed:
        counts.add(token)
    counts.take_back(guessed, before)
    for token in (11, 3, 4):
        found, left = (sorted(zip(each.ids, each.counts, strict=True)) for each in (counts, wanted))
        assert (found, counts.num_output) == (left, wanted.num_output)
        counts.add(token)
        wanted.add(token)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculate": "yes"}, "speculate"),
        ({"speculate": "draft"}, "draft_model is not given"),
        ({"speculate": "lookup", "draft_model": "tiny"}, "it is for speculate='draft'"),
        ({"speculate": "draft", "draft_model": 5}, "draft_model is 5"),
        ({"n_draft": 0}, "n_draft"),
        ({"n_draft": 65}, "n_draft"),
        ({"speculate_always": True}, "speculate_always"),
        ({"speculate": "lookup", "speculate_always": 1}, "speculate_always"),
    ],
)
def test_options_are_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig("tiny", **options)


def test_output_rows_are_bounded():
    assert resolved("tiny").output_rows(64, 152_000) == 64
    assert resolved("tiny").output_rows(32, 152_000) == 55  # output rows of prompts
    config = resolved("tiny", speculate="lookup", n_draft=8)
    assert config.output_rows(32, 1000) == 32 * 9
    assert config.output_rows(256, 256_000) == 262
    longer = resolved("tiny", speculate="lookup", n_draft=64)
    most = longer.output_rows(32, 152_000)  # the limit of each call, also while the context has fewer slots
    assert all(n * (most // n) <= longer.output_rows(n, 152_000) for n in (8, 16, 32))
    assert all(n * 65 <= longer.output_rows(n, 152_000) for n in (1, 2, 4))


@pytest.mark.parametrize("can_cut", [True, False])
def test_a_run_past_a_stop_string_leaves_no_cells_of_guesses_to_the_next_turn(can_cut):
    """The next request begins with the whole text of the finished one, whose cells must end where its text ends.

    A saved state with more tokens cannot be used.
    """
    cut, limits = 0, replace(LIMITS, can_cut=can_cut, can_pad=can_cut)
    for seed in range(30):
        speculation = SpecDecoder(Guesser(random.Random(seed), 1.0, ragged=False), limits, 8, N_CTX, always=True)
        scheduler, runner = Scheduler(policy("batched"), limits, spec_decoder=speculation), FakeModelRunner(limits)
        prompt = tuple(1 + (seed + i) % 60 for i in range(60))
        whole = expected_output(prompt, 100)
        stop = chr(whole[min(len(whole) - 1, 5)])
        scheduler.add(sequence("first", prompt, 100, stop=[stop]))
        output = drain(scheduler, runner)["first"]
        assert list(output.token_ids) == whole[: len(output.token_ids)]
        following = (*prompt, *output.token_ids)
        is_cut = any(len(cells) > len(following) - 1 for cells in runner.cells)
        cut += is_cut
        scheduler.add(sequence("next", (*following, 7), 20))
        assert list(drain(scheduler, runner)["next"].token_ids) == expected_output((*following, 7), 20)
        assert scheduler.prefix_cache.num_prefix_hits == int(can_cut or not is_cut)
    assert cut > 10
