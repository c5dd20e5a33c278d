"""A draft model: a smaller model with the same vocabulary guesses the next tokens of the larger target model.

The draft context has a slot for each slot of the target. The proposer records which tokens its cells contain. Each call
of propose compares these tokens with the sequences. Cells that differ are cut. Missing cells are copied from another
slot or computed. So nobody needs to tell the proposer about rejected guesses, moves between slots, or preemption.
"""

from __future__ import annotations

import logging
from collections import abc
from dataclasses import dataclass, field, replace

from llamabatch.config import EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError, EngineError
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.batch import Batch
from llamabatch.llama.context import Context, DecodeCode
from llamabatch.llama.library import load
from llamabatch.llama.model import Model
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.request.sequence import Sequence
from llamabatch.sampling.sampler import NO_TOKEN, SamplerState, sample_rows
from llamabatch.scheduler.batch_builder import group_spans
from llamabatch.scheduler.common_prefix import best_source, common_length
from llamabatch.scheduler.output import Call, Limits, ScheduledSpan

logger = logging.getLogger(__name__)

# The maximum difference between the two vocabulary sizes. Models of one family pad the same vocabulary differently.
# llama.cpp allows the same difference (common/speculative.cpp, SPEC_VOCAB_MAX_SIZE_DIFFERENCE).
_MOST_PADDING = 128
# A separate prefill call is made only if the draft cells lag more than this many tokens behind the sequence. After a
# step with only right guesses, they lag 2 tokens behind.
_MOST_BEHIND = 16
_GREEDY = SamplerState(SamplingParams(temperature=0), seed=0)


@dataclass
class _SlotContent:
    """The content of a slot's cells: the first `known` tokens of a sequence and the guesses after them."""

    sequence: Sequence
    known: int = 0
    guesses: list[int] = field(default_factory=list)

    def n_valid(self) -> int:
        """Returns the number of leading cells whose tokens still match the sequence."""
        token_ids = self.sequence.token_ids
        if self.known > len(token_ids):  # the text was cut
            return 0
        return self.known + common_length(self.guesses, token_ids[self.known : self.known + len(self.guesses)])


class _Failed(Exception):
    """A pass of the draft context failed; there are no guesses in this step."""


class DraftModelProposer:
    """A Proposer that runs a draft model in its own context, on the engine's thread.

    The proposer guesses greedily, with one call per position for all sequences.

    Args:
        model: the draft model, from open_draft. close() also closes the model.
        target: the model whose tokens are guessed.
        config: config of the target. The draft has the same threads, n_ctx, and kind of KV cache.
        n_slots: maximum number of slots of the target's context.

    Raises:
        ConfigError: llama.cpp keeps no cells for the architecture of the draft model.
        EngineError: the context cannot be made.
    """

    is_free = False

    def __init__(self, model: Model, target: Model, config: ResolvedConfig, n_slots: int) -> None:
        self._model = model
        self._n_vocab = min(model.n_vocab, target.n_vocab)
        # A model with a table of positions aborts the process at a position beyond its table.
        self._n_ctx = min(config.n_ctx, model.n_ctx_train)
        self._config = replace(config.for_draft_model(), n_ctx=self._n_ctx)
        self._n_threads = config.n_threads_batch
        self._limits = Limits(n_slots, config.n_batch, config.n_ubatch, config.n_batch)
        self._context = Context(model, self._config, n_slots)
        self._batch = Batch(load(), config.n_batch, marks_prompts=self._context.takes_prompts)
        self._contents: dict[int, _SlotContent] = {}
        self._warned = False
        if not self._context.has_memory:  # decoding would abort the process
            self._context.close()
            raise ConfigError(f"draft_model {model.path.name} cannot guess: llama.cpp gives its architecture no memory")

    def close(self) -> None:
        self._context.close()
        self._model.close()

    def propose(self, sequences: abc.Sequence[Sequence], n: int) -> list[list[int]]:
        """Returns up to n greedy guesses for each sequence: fewer near n_ctx, none if the draft model fails."""
        short = (s for s in sequences if len(s.token_ids) <= self._n_ctx)
        spans = sorted(
            (ScheduledSpan(s, s.slot, 0, 0, True) for s in short if s.slot is not None), key=lambda span: span.slot
        )
        if not spans:
            return [[] for _ in sequences]
        try:
            guessed = self._guess(self._context, self._catch_up(self._context, spans), n)
        except (_Failed, EngineError) as error:
            logger.log(logging.DEBUG if self._warned else logging.WARNING, "no guesses of the draft model: %s", error)
            self._warned = True
            self._forget()
            return [[] for _ in sequences]
        return [guessed.get(sequence, []) for sequence in sequences]

    def _forget(self) -> None:
        self._contents.clear()
        for slot in range(self._context.n_slots):
            self._context.clear(slot)

    def _cut_to_common(self, context: Context, sequence: Sequence, slot: int) -> int:
        """Drops the cells of a slot that differ from the sequence. Returns the number of remaining tokens."""
        held = self._contents.get(slot)
        if held is None or held.sequence is not sequence:
            held = self._contents[slot] = self._moved_in(context, sequence, slot)
        known = min(held.n_valid(), len(sequence.token_ids) - 1)
        if known < held.known + len(held.guesses):
            context.clear(slot, known)
        held.known, held.guesses = known, []
        return known

    def _moved_in(self, context: Context, sequence: Sequence, slot: int) -> _SlotContent:
        """Fills the slot of a new sequence from its former slot, or from the slot with the longest common prefix."""
        source, count = slot, 0
        for other, held in self._contents.items():
            if held.sequence is sequence:
                source, count = other, held.n_valid()
                del self._contents[other]
                break
        else:
            by_sequence = {held.sequence: (other, held.known) for other, held in self._contents.items()}
            found = best_source(sequence, by_sequence)
            if found is not None:
                source, known = by_sequence[found[0]]
                count = min(found[1], known)
        if source != slot and count:
            context.copy_prefix(source, slot, count)
        else:
            context.clear(slot, count)
        return _SlotContent(sequence, count)

    def _catch_up(self, context: Context, spans: list[ScheduledSpan]) -> list[ScheduledSpan]:
        """Computes the new tokens of the sequences in the draft context, except the last few. Returns spans with these
        last few tokens. All spans have the same length, because a pass takes equally many tokens of each sequence. If a
        sequence lags too far behind for one step, it gets no span until its cells have caught up."""
        known = [self._cut_to_common(context, span.sequence, span.slot) for span in spans]
        behind = [len(span.token_ids) - count for span, count in zip(spans, known, strict=True)]
        width = max((count for count in behind if count <= _MOST_BEHIND), default=1)
        width = min(width, *(len(span.token_ids) for span in spans), self._limits.n_ubatch // len(spans) or 1)
        last, chunks, budget = [], [], self._limits.n_ubatch
        for span, count in zip(spans, known, strict=True):
            start = len(span.token_ids) - width
            n_tokens = min(budget, max(0, start - count))
            if n_tokens:
                budget -= n_tokens
                chunks.append(span._replace(start=count, length=n_tokens, output=False))
            if count > start:  # it costs less to compute known cells again than to make one more pass
                context.clear(span.slot, start)
            if count + n_tokens >= start:
                last.append(span._replace(start=start, length=width))
            self._contents[span.slot].known = min(count + n_tokens, start)
        for call in group_spans(chunks, self._limits):
            self._decode(context, self._batch.fill(call)[0])
        return last

    def _guess(self, context: Context, spans: list[ScheduledSpan], n: int) -> dict[Sequence, list[int]]:
        guessed: dict[Sequence, list[int]] = {span.sequence: [] for span in spans}
        if not spans:
            return guessed
        self._decode(context, self._batch.fill(Call(tuple(spans)))[0])
        for span in spans:
            self._contents[span.slot].known = len(span.token_ids)
        for number in range(n):
            tokens = sample_rows(context.logits(len(spans)), [_GREEDY] * len(spans), self._n_threads)
            going = []
            for span, token in zip(spans, tokens, strict=True):
                if token == NO_TOKEN or token >= self._n_vocab:
                    continue
                guessed[span.sequence].append(token)
                if len(span.token_ids) + number < self._n_ctx:
                    going.append((span, token))
            spans = [span for span, _ in going]
            if number == n - 1 or not spans:
                break
            positions = [len(span.token_ids) + number for span in spans]
            slots = [span.slot for span in spans]
            self._decode(context, self._batch.fill_rows([token for _, token in going], positions, slots))
            for span, token in going:
                self._contents[span.slot].guesses.append(token)
        return guessed

    def _decode(self, context: Context, struct: object) -> None:
        code = context.decode(struct)
        if code is not DecodeCode.OK:
            raise _Failed(f"llama_decode: {code.name.lower()} ({code.value})")


def open_draft(config: EngineConfig, target: Model) -> Model | None:
    """Returns the draft model that a config names, or None. If both models are one file, they share the weights.

    Raises:
        ConfigError: the draft model has another vocabulary, or its state cannot be cut.
        ModelFileError: the file cannot be loaded.
    """
    if config.draft_model is None:
        return None
    path = resolve(config.draft_model)
    if path.samefile(target.path):
        return target.share()
    model = Model(path, config.for_draft_model())
    try:
        check_draft(model, target, config.for_draft_model())
        model.halt = target.halt
    except BaseException:
        model.close()
        raise
    return model


def check_draft(model: Model, target: Model, config: EngineConfig) -> None:
    """Raises ConfigError for a draft model that cannot guess for this target.

    Args:
        config: config of the draft model.
    """
    name = f"draft_model {model.path.name}"
    if model.cannot_generate is not None:
        raise ConfigError(f"{name} cannot guess text: it is {model.cannot_generate}")
    why = model.uncuttable(config)
    if why is not None:
        raise ConfigError(f"{name} has {why}, so the tokens of wrong guesses cannot be removed; give another model")
    if abs(model.n_vocab - target.n_vocab) > _MOST_PADDING:
        raise ConfigError(
            f"{name} has a vocabulary of {model.n_vocab} tokens, {target.path.name} one of {target.n_vocab}; "
            "they must have the same"
        )
    for token_id in range(min(model.n_vocab, target.n_vocab)):
        ours, theirs = model.token_text(token_id), target.token_text(token_id)
        if ours != theirs:
            raise ConfigError(
                f"{name} has another vocabulary than {target.path.name}: token {token_id} is {ours!r}, not {theirs!r}"
            )
