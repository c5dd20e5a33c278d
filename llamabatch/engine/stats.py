"""Counts and gauges of an engine, counts of requests, and a function for percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.utils.histogram import Histogram, Tally

_GAUGES = (
    "running",
    "waiting",
    "free_slots",
    "kv_cells",
    "kv_cells_used",
    "cache_ram_bytes",
    "cache_disk_bytes",
    "speculating",
)
_OF_REQUESTS = ("e2e_s", "prefill_s", "decode_s", "prompt_lengths", "output_lengths")
_HISTOGRAMS = ("queue_s", "ttft_s", "inter_token_s", *_OF_REQUESTS)
_MOST = ("longest", "cache_disk_bytes")  # for several engines, the largest value counts, not the sum


@dataclass(frozen=True)
class EngineStats:
    """The counts since the engine started. These fields are gauges with present values: running, waiting, free_slots,
    kv_cells, kv_cells_used, cache_ram_bytes, cache_disk_bytes and speculating.

    Each prompt of a call is a request, which has n (or best_of) continuations. `submitted`, `rejected`, the counts of
    endings and the histograms of ended requests count requests; all other fields count continuations. Each event is
    counted when it happens, so that the events of running requests are included.

    Attributes:
        running: continuations that have a slot.
        waiting: continuations and texts to embed that wait.
        free_slots: slots for further continuations, including slots that exist only once the context has grown.
        kv_cells: room of the KV cache in tokens, once the context has all its slots.
        kv_cells_used: tokens of running continuations in the KV cache.
        submitted: accepted requests.
        finished_stop, finished_length: requests that ended well. Texts to embed count as "stop".
        errors, aborted: requests that ended otherwise.
        prompt_tokens: tokens of prompts that have had a slot, computed (prefill_tokens) or copied (shared_tokens,
            prefix_tokens).
        generated_tokens: tokens sampled.
        queue_s: seconds from arrival to the slot.
        ttft_s: seconds from arrival to the first token.
        inter_token_s: seconds from token to token.
        e2e_s: seconds from arrival to the end, of requests that ended well.
        prefill_s, decode_s: seconds from the slot to the first token, and from the first to the last token. Both count
            requests that ended well and have output, by their first continuation.
        prompt_lengths, output_lengths: tokens of requests that ended well. These histograms have the bucket limits of
            durations.
        computed_tokens: prompt tokens of ended requests, without copied tokens.
        longest: tokens of prompt and output of the longest continuation so far.
        restarts: engine processes that replaced a dead one.
        decode_calls: calls that continue sequences.
        decode_rows: rows of these calls that continue a sequence.
        decode_passes: passes over the weights in these calls.
        prefill_calls: calls of prompt tokens only.
        prefill_passes: passes in these calls.
        prefill_tokens: prompt tokens in all calls, including calls that also continue sequences.
        dummy_rows: rows computed only to keep the seq ids of a call dense.
        adapter_switches: changes from one adapter set to another in a context.
        shared_tokens: prompt tokens copied from requests in flight.
        prefix_hits: continuations that began with cells of a finished request or with a stored prefix.
        prefix_tokens: prompt tokens that these continuations therefore did not compute.
        restored_tokens: the part of prefix_tokens that came from main memory or the disk.
        read_tokens: the part of prefix_tokens that came from the disk.
        cache_ram_bytes: main memory taken by saved prefixes now.
        cache_disk_bytes: bytes of all files in the folder of cache_disk, when the engine last looked.
        verify_calls: decode calls that verified guesses (speculative decoding).
        drafted_tokens: guesses that were verified.
        accepted_tokens: guesses that were accepted.
        speculating: engines in which guessing tokens saves time, by present estimates.
        embed_passes: passes for embeddings.
        embed_texts, embed_tokens: texts and tokens in these passes.
        preemptions: number of times that a continuation lost its slot and was queued again.
        missed_deadlines: continuations ended by deadline_s.
        rejected: requests refused by max_queue. `submitted` does not include them.
    """

    running: int = 0
    waiting: int = 0
    free_slots: int = 0
    kv_cells: int = 0
    kv_cells_used: int = 0
    submitted: int = 0
    finished_stop: int = 0
    finished_length: int = 0
    errors: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    restarts: int = 0
    preemptions: int = 0
    missed_deadlines: int = 0
    rejected: int = 0
    shared_tokens: int = 0
    prefix_hits: int = 0
    prefix_tokens: int = 0
    restored_tokens: int = 0
    read_tokens: int = 0
    cache_ram_bytes: int = 0
    cache_disk_bytes: int = 0
    decode_calls: int = 0
    decode_rows: int = 0
    decode_passes: int = 0
    prefill_calls: int = 0
    prefill_tokens: int = 0
    prefill_passes: int = 0
    dummy_rows: int = 0
    adapter_switches: int = 0
    embed_passes: int = 0
    embed_texts: int = 0
    embed_tokens: int = 0
    verify_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    speculating: int = 0
    queue_s: Histogram = Histogram()
    ttft_s: Histogram = Histogram()
    inter_token_s: Histogram = Histogram()
    e2e_s: Histogram = Histogram()
    prefill_s: Histogram = Histogram()
    decode_s: Histogram = Histogram()
    prompt_lengths: Histogram = Histogram()
    output_lengths: Histogram = Histogram()
    computed_tokens: int = 0
    longest: int = 0

    @property
    def ok(self) -> int:
        """Requests that ended well."""
        return self.finished_stop + self.finished_length

    @property
    def in_flight(self) -> int:
        """Accepted requests that have not ended: submitted = ok + errors + aborted + in_flight."""
        return self.submitted - self.ok - self.errors - self.aborted

    @property
    def n_slots(self) -> int:
        """Slots of all engines."""
        return self.running + self.free_slots

    @property
    def slot_use(self) -> float:
        """The share of the slots in use, 0 to 1."""
        return self.running / self.n_slots if self.n_slots else 0.0

    @property
    def slot_demand(self) -> float:
        """Continuations that run or wait, divided by the number of slots. Above 1, some must wait. Without slots, the
        value is the number of continuations.
        """
        return (self.running + self.waiting) / max(1, self.n_slots)

    @property
    def kv_use(self) -> float:
        """The share of the KV cache used by running continuations, 0 to 1."""
        return self.kv_cells_used / self.kv_cells if self.kv_cells else 0.0

    @property
    def rows_per_step(self) -> float:
        """Mean number of rows in a decode call."""
        return self.decode_rows / self.decode_calls if self.decode_calls else 0.0

    @property
    def passes_per_step(self) -> float:
        """Mean number of passes over the weights in a decode call; 1 is the aim of batching."""
        return self.decode_passes / self.decode_calls if self.decode_calls else 0.0

    @property
    def acceptance(self) -> float:
        """The share of guesses that were accepted; 0 without guesses."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    def __repr__(self) -> str:
        """Shows only the fields whose values differ from those at the start of an engine."""
        start = EngineStats()
        shown = {name: value for name, value in vars(self).items() if value != getattr(start, name)}
        return f"EngineStats({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __add__(self, other: EngineStats) -> EngineStats:
        most = {name: max(getattr(self, name), getattr(other, name)) for name in _MOST}
        return EngineStats(**{**{name: value + getattr(other, name) for name, value in vars(self).items()}, **most})

    def since(self, earlier: EngineStats) -> EngineStats:
        """Returns the counts since `earlier`. Gauges and largest values stay as they are."""
        return EngineStats(
            **{k: value if k in _GAUGES + _MOST else value - getattr(earlier, k) for k, value in vars(self).items()}
        )

    def of_the_past(self) -> EngineStats:
        """Returns the counts without the gauges, for an engine that is gone."""
        return EngineStats(**{k: value for k, value in vars(self).items() if k not in _GAUGES})

    def counts(self) -> dict[str, int]:
        """Returns the counts by name, without gauges and histograms."""
        return {k: value for k, value in vars(self).items() if k not in (*_GAUGES, *_MOST, *_HISTOGRAMS)}

    def to_wire(self) -> dict[str, Any]:
        """Returns the fields as numbers and lists of numbers, for messages between processes."""
        return {**vars(self), **{name: getattr(self, name).to_wire() for name in _HISTOGRAMS}}

    @classmethod
    def from_wire(cls, packed: Mapping[str, Any]) -> EngineStats:
        """Makes the stats from the result of to_wire."""
        return cls(**{**packed, **{name: Histogram.from_wire(packed[name]) for name in _HISTOGRAMS}})


class RequestCounts:
    """Counts of requests, by how they ended. The attributes are fields of EngineStats."""

    def __init__(self) -> None:
        self.submitted = 0
        self.finished_stop = 0
        self.finished_length = 0
        self.errors = 0
        self.aborted = 0
        self.computed_tokens = 0
        self.longest = 0
        self._tallies = {name: Tally() for name in _OF_REQUESTS}

    def count(self, outputs: Iterable[SequenceOutput]) -> None:
        """Counts the requests that end with one of these outputs."""
        for output in outputs:
            if output.finished is not None:
                self._count_end(output.finished)

    def _count_end(self, output: RequestOutput) -> None:
        """Counts the end of a request: as an error if any continuation failed, else by the first continuation's
        reason.
        """
        reason, n_prompt = output.finish_reason, len(output.prompt_token_ids)
        lengths = [len(each.token_ids) for each in output.outputs]
        if output.timings.queued_s is not None:
            self.computed_tokens += n_prompt - output.num_cached_tokens
            self.longest = max(self.longest, n_prompt + max(lengths))
        if output.error is not None or reason is FinishReason.ERROR:
            self.errors += 1
            return
        if reason is FinishReason.ABORT:
            self.aborted += 1
            return
        if reason is FinishReason.STOP:
            self.finished_stop += 1
        else:
            self.finished_length += 1
        timings, tallies = output.timings, self._tallies
        tallies["e2e_s"].add(timings.total_s)
        tallies["prompt_lengths"].add(n_prompt)
        tallies["output_lengths"].add(sum(lengths))
        if timings.queued_s is not None and timings.ttft_s is not None:
            tallies["prefill_s"].add(timings.ttft_s - timings.queued_s)
            tallies["decode_s"].add(max(timings.token_times_s, default=timings.ttft_s) - timings.ttft_s)

    def figures(self) -> dict[str, Any]:
        """Returns the counts as fields of EngineStats."""
        counts = {name: value for name, value in vars(self).items() if name != "_tallies"}
        return {**counts, **{name: tally.histogram() for name, tally in self._tallies.items()}}


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Returns the percentile by linear interpolation between neighbours (numpy's default); None without values.

    Args:
        percent: 0 to 100.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    at = (len(ordered) - 1) * percent / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
