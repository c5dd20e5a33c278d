"""A runner without a model: the next token is a hash of the text so far, and each rule of the cache is checked."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable

from llamabatch.request.detokenizer import Vocabulary
from llamabatch.request.logprobs import Logprob, RowLogprobs
from llamabatch.request.media import MediaRun
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Call, DecodeStatus, Limits, ScheduledSpan, SchedulerOutput, SpanOutput
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.utils.histogram import Histogram, Tally

EOG, BOS = 0, 1
N_CTX = 512  # cells of a slot
STATE_BYTES = 1000  # size of a saved state, plus a byte for each token
VOCABULARY = Vocabulary(
    256,
    lambda token: token == EOG,
    lambda token: bytes([token]),
    lambda token: b"<eog>" if token == EOG else bytes([token]),
    BOS,
)


class Clock:
    """A clock that goes on only where a test says so: no step seems faster than another."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def next_token(token_ids: list[int]) -> int:
    """Returns a hash of all tokens so far: a wrong position, prefix or slot changes it. One in 64 is EOG."""
    return zlib.crc32(bytes(token_ids)) % 64


def fake_logprob(before: list[int], token: int) -> RowLogprobs:
    """Returns the logprob of a token after others, a hash of all of them. A lost, doubled or shifted row changes it."""
    return RowLogprobs([token], [-zlib.crc32(bytes([*before, token])) / 2**32], len(before))


def expected_logprobs(token_ids: list[int], first: int) -> list[dict[int, Logprob]]:
    """Returns the logprobs of the tokens from place `first` on."""
    return [
        fake_logprob(token_ids[:at], token_ids[at]).named(VOCABULARY.all_bytes) for at in range(first, len(token_ids))
    ]


def expected_output(
    prompt: tuple[int, ...], max_tokens: int, n_ctx: int = N_CTX, *, ignore_eos: bool = False
) -> list[int]:
    """Returns the output that a request must have, whatever runs beside it."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < min(max_tokens, n_ctx + 1 - len(prompt)):
        tokens.append(next_token(tokens))
        if tokens[-1] == EOG and not ignore_eos:
            break
    return tokens[len(prompt) :]


def expected_shifted(
    prompt: tuple[int, ...], max_tokens: int, n_ctx: int = 512, *, ignore_eos: bool = False
) -> list[int]:
    """Returns the output of a request whose full slot drops the older half of its cells, except a leading BOS."""
    cells, output = list(prompt), []
    while len(output) < max_tokens and (ignore_eos or EOG not in output):
        output.append(next_token(cells))
        if len(cells) == n_ctx:
            kept = int(prompt[0] == BOS)
            del cells[kept : kept + (n_ctx - kept + 1) // 2]
        cells.append(output[-1])
    return output


class FakeModelRunner:
    """A runner whose cells are lists of tokens, one list for each slot.

    Args:
        no_room_every: each n-th call finds no cells if it has several sequences; 0: never; 1: every call finds none.
        bad_token: a span that contains this token fails.
        memory_for: number of slots that there is memory for; None: all.
        growth_steps: number of steps that run while a larger context is made.
        carries: whether a larger context takes over the cells.
        refuses: number of states that cannot be restored into a slot.
        encodes_in: number of steps that the encoding of a picture takes.
    """

    def __init__(
        self,
        limits: Limits,
        no_room_every: int = 0,
        bad_token: int | None = None,
        memory_for: int | None = None,
        growth_steps: int = 0,
        carries: bool = True,
        refuses: int = 0,
        encodes_in: int = 1,
    ) -> None:
        self._encodes_in = encodes_in
        self._encoded: dict[tuple[int, ...], int] = {}  # picture -> steps that it has had
        self.limits = limits
        n_slots = limits.n_slots if limits.start_slots is None else limits.start_slots
        self.cells: list[list[int]] = [[] for _ in range(n_slots)]
        self.calls: list[Call] = []
        self.copied_tokens = 0
        self.saved: list[int] = []  # tokens of each saved state
        self.restored_tokens = 0
        self._least_cut: dict[int, int] = {}  # slot -> fewest tokens that a cut may leave: older window cells are gone
        self._no_room_every = no_room_every
        self._bad_token = bad_token
        self._memory_for = memory_for
        self._growth_steps = growth_steps
        self._carries = carries
        self._refuses = refuses
        self._unfilled: set[int] = set()

    def grow(self, n_slots: int, held: Iterable[int], *, wait: bool) -> tuple[int, frozenset[int]] | None:
        assert len(self.cells) < n_slots <= self.limits.n_slots
        if not wait and self._growth_steps:
            self._growth_steps -= 1
            return None
        n_slots = min(n_slots, self._memory_for or n_slots)
        if n_slots <= len(self.cells):
            return len(self.cells), frozenset()
        carried = frozenset(held if self._carries else ())
        assert all(self.cells[slot] for slot in carried)
        kept = [cells if slot in carried else [] for slot, cells in enumerate(self.cells)]
        self.cells = kept + [[] for _ in range(n_slots - len(kept))]
        return n_slots, carried

    def run(self, batch: SchedulerOutput) -> list[SpanOutput]:
        for save in batch.saves:
            cells, tokens = self.cells[save.slot], list(save.prefix.token_ids)
            assert cells[: len(tokens)] == tokens[: len(cells)], "the state of another sequence"
            assert len(tokens) >= self._least_cut.get(save.slot, 0), "the window's older cells are gone"
            fits = len(cells) >= len(tokens) if self.limits.can_cut else len(cells) == len(tokens)
            if fits and save.make_room(save.prefix, len(tokens) + STATE_BYTES):
                del cells[len(tokens) :]
                save.prefix.state = bytes(tokens) + bytes(STATE_BYTES)
                self.saved.append(len(tokens))
        for restore in batch.restores:
            is_exact = not self.limits.can_cut or self.limits.has_window
            assert not is_exact or restore.count == len(restore.prefix.token_ids)
            assert self.cells[restore.slot] == []
            assert restore.prefix.state is not None
            if self._refuses:
                self._refuses -= 1
                restore.prefix.is_refused = True
                self._unfilled.add(restore.slot)
                continue
            self._unfilled.discard(restore.slot)
            if self.limits.n_cells is not None:
                held = sum(map(len, self.cells)) + len(restore.prefix.token_ids)
                assert held <= self.limits.n_cells, "the whole state has no room in the unified cache"
            self.cells[restore.slot] = list(restore.prefix.state[: restore.count])
            self.restored_tokens += restore.count
            self._least_cut[restore.slot] = restore.count if self.limits.has_window else 0
        for copy in batch.copies:
            assert self.limits.can_share
            (self._unfilled.add if copy.source in self._unfilled else self._unfilled.discard)(copy.target)
            if copy.source in self._unfilled:
                self.cells[copy.target] = []
                continue
            assert len(self.cells[copy.source]) >= copy.count > 0
            assert copy.target != copy.source
            assert self.limits.can_cut or copy.count == len(self.cells[copy.source]), "a state has no part"
            self.cells[copy.target] = self.cells[copy.source][: copy.count]
            self._least_cut[copy.target] = self._least_cut.get(copy.source, 0)
            assert copy.count >= self._least_cut[copy.target], "the window's older cells are gone"
            self.copied_tokens += copy.count
        for cut in batch.cuts:
            if cut.slot in self._unfilled:
                continue
            assert cut.count == 0 or cut.count < len(self.cells[cut.slot])
            assert cut.count == 0 or self.limits.can_cut
            assert cut.count == 0 or cut.count >= self._least_cut.get(cut.slot, 0), "the window's older cells are gone"
            if cut.count == 0:
                self._least_cut.pop(cut.slot, None)
            self.cells[cut.slot] = self.cells[cut.slot][: cut.count]
        self._cut_short: set[int] = set()  # slots where a piece of a prompt failed: later pieces cannot be computed
        for shift in batch.shifts:
            cells = self.cells[shift.slot]
            assert 0 <= shift.start < shift.start + shift.count < len(cells)
            del cells[shift.start : shift.start + shift.count]
        return [result for call in batch.calls for result in self._run_call(call)]

    def _run_call(self, call: Call) -> list[SpanOutput]:
        self.calls.append(call)
        slots = [span.slot for span in call.spans]
        assert slots == sorted(set(slots)), "spans come in order of their slots, one a slot"
        rows = sum(span.length for span in call.spans) + len(call.dummy_slots) * (1 + call.n_guesses)
        assert rows <= self.limits.n_batch
        if call.n_guesses:
            assert rows <= self.limits.n_ubatch, "guesses that cost another pass"
            assert sum(1 + len(span.draft) for span in call.spans) <= self.limits.n_outputs
            assert self.limits.packs_any or {span.length for span in call.spans} == {1 + call.n_guesses}
        assert all(len(self.cells[slot]) == start for slot, start in call.dummies), "a dummy row amidst cells"
        assert not call.dummy_slots or self.limits.can_pad
        assert not any(call.dummy_starts) or (call.is_padded and self.limits.can_share and self.limits.can_cut)
        assert not set(slots) & set(call.dummy_slots)
        if call.is_padded:
            longest = max(span.start for span in call.spans)
            assert all(start // 256 <= longest // 256 for start in call.dummy_starts), "it widens the attention of all"
            width = max(*slots, *call.dummy_slots, 0) - min(*slots, *call.dummy_slots, 255) + 1
            assert rows == width <= self.limits.n_ubatch, "one pass takes neighbouring slots"
        n_rows = sum(span.prompt_rows + span.output for span in call.spans) + call.is_padded * len(call.dummy_slots)
        assert n_rows <= max(self.limits.prompt_rows, len(self.cells)), "more output rows than the context has"
        short = self._no_room_every and len(self.calls) % self._no_room_every == 0
        if short and (len(call.spans) > 1 or self._no_room_every == 1):
            self._cut_short.update(slots)
            return [SpanOutput(DecodeStatus.NO_ROOM)] * len(call.spans)
        for span in call.spans:
            self._check_media(call, span)
        if call.media is not None and not self._is_encoded(call.spans[0]):
            return [SpanOutput(DecodeStatus.NOT_YET)]
        hole = SpanOutput(DecodeStatus.FAILED, error="there is a hole before it")
        self._unfilled -= {span.slot for span in call.spans if span.start == 0}
        lost = self._cut_short | self._unfilled
        return [hole if span.slot in lost else self._run_span(span) for span in call.spans]

    def _check_media(self, call: Call, span) -> None:
        end = span.start + span.length
        over = [run for run in span.sequence.media_runs if run.start < end and span.start < run.end]
        assert over == ([] if span.media is None else [span.media]), "text and a picture in one span"
        if span.media is not None:
            assert len(call.spans) == 1, "a picture has a call of its own"
            assert span.media.start <= span.start, "a span begins within a picture"
            assert end <= span.media.end
            assert span.media.is_causal or (span.start, end) == (span.media.start, span.media.end), "a part of a whole"

    def _is_encoded(self, span) -> bool:
        key = tuple(span.sequence.token_ids[span.media.start : span.media.end])
        self._encoded[key] = self._encoded.get(key, 0) + 1
        return self._encoded[key] >= self._encodes_in

    def _run_span(self, span) -> SpanOutput:
        cells = self.cells[span.slot]
        known = span.sequence.token_ids
        if span.shift:
            kept = int(known[0] == BOS)
            known = known[:kept] + known[kept + span.shift :]
        assert cells == known[: span.start], "the cells are those of another sequence, or of another position"
        tokens = known[span.start : span.start + span.length]
        if span.draft is not None:
            assert len(tokens) == 1 <= span.length - len(span.draft), "one known token comes before the guesses"
            tokens = [*tokens, *span.draft, *[0] * (span.length - 1 - len(span.draft))]
        assert tokens
        if self._bad_token in tokens:
            return SpanOutput(DecodeStatus.FAILED, error="bad token")
        cells.extend(tokens)
        assert len(cells) <= N_CTX
        if self.limits.n_cells is not None:
            assert sum(map(len, self.cells)) <= self.limits.n_cells, "the unified cache overflows"
        record, rows = span.sequence.logprobs, []
        if span.draft is not None:
            return self._verify(span, cells)
        if record is not None:
            targets = record.targets(len(cells), span.prompt_rows)
            first = len(cells) - span.output - span.prompt_rows
            rows = [fake_logprob(cells[: first + 1 + i], target) for i, target in enumerate(targets)]
            assert len(rows) == span.prompt_rows <= span.length - span.output
        if not span.output:
            return SpanOutput(DecodeStatus.OK, logprobs=tuple(rows))
        assert len(cells) == len(known), "only the last token of a sequence is sampled"
        token = next_token(cells)
        if record is not None and record.top is not None:
            rows.append(fake_logprob(cells, token))
        return SpanOutput(DecodeStatus.OK, (token,), logprobs=tuple(rows))

    def _verify(self, span, cells) -> SpanOutput:
        assert len(cells) <= N_CTX, "guesses beyond the slot's cells"
        accepted = []
        for number in range(1 + len(span.draft)):
            accepted.append(next_token(cells[: span.start + 1 + number]))
            if number == len(span.draft) or accepted[-1] != span.draft[number]:
                break
        del cells[span.start + len(accepted) :]
        record, rows = span.sequence.logprobs, []
        if record is not None and record.top is not None:
            text = [*span.sequence.token_ids[: span.start + 1], *accepted]
            rows = [fake_logprob(text[:at], text[at]) for at in range(span.start + 1, len(text))]
        return SpanOutput(DecodeStatus.OK, tuple(accepted), logprobs=tuple(rows))


def sequence(
    name: str,
    prompt: tuple[int, ...],
    max_tokens: int = 16,
    *,
    n_ctx: int = N_CTX,
    group: int = 0,
    score_from: int | None = None,
    streamed: bool = True,
    media_runs: tuple[MediaRun, ...] = (),
    **params,
):
    request = Request(
        name,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        group=group,
        score_from=score_from,
        media_runs=media_runs,
    )
    return Sequence(request, VOCABULARY, n_ctx, streamed=streamed)


def step(scheduler: Scheduler, runner: FakeModelRunner) -> list[SequenceOutput]:
    """Runs one step, as Engine.step does."""
    wanted = scheduler.wanted_slots()
    if wanted is not None:
        grown = runner.grow(wanted, scheduler.held_slots, wait=not scheduler.running)
        if grown is not None:
            scheduler.grow(*grown)
    batch = scheduler.schedule()
    outputs = scheduler.update(batch, runner.run(batch))
    scheduler.check_integrity()
    return outputs


def steps(scheduler: Scheduler, runner: FakeModelRunner, n: int = 1) -> list[ScheduledSpan]:
    """Runs `n` steps. Returns their spans."""
    before = len(runner.calls)
    for _ in range(n):
        step(scheduler, runner)
    return [span for call in runner.calls[before:] for span in call.spans]


def drain(scheduler: Scheduler, runner: FakeModelRunner, limit: int = 100_000) -> dict[str, object]:
    """Runs steps until nothing is left. Returns the finished outputs by request id."""
    finished = {}
    for _ in range(limit):
        if not scheduler.has_work:
            break
        for output in step(scheduler, runner):
            if output.finished is not None:
                assert output.request_id not in finished, "a request finished twice"
                finished[output.request_id] = output.finished
    assert not scheduler.has_work, "the scheduler does not come to an end"
    return finished


def sometimes_abort(rng: random.Random, scheduler: Scheduler, asked: dict, share: float) -> None:
    """Aborts one of the requests in `asked` with probability `share`. Removes it from `asked` if it had not ended."""
    if asked and rng.random() < share:
        victim = rng.choice(list(asked))
        if scheduler.abort(victim) is not None:
            del asked[victim]


def times(*seconds: float) -> Histogram:
    """Returns the histogram of these times."""
    tally = Tally()
    for each in seconds:
        tally.add(each)
    return tally.histogram()


def random_prompt(rng: random.Random, longest: int = 200) -> tuple[int, ...]:
    """Returns a prompt. Half of the prompts begin alike, so that prefixes are shared."""
    head = tuple(range(1, 1 + rng.choice([0, 0, 40, 80])))
    return head + tuple(rng.randrange(1, 64) for _ in range(rng.randrange(1, longest)))
