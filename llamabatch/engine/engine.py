"""Engine: the step loop over one model. It must not be used from two threads at once; clients use it in one thread."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import abc
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamabatch.config import MIN_GUESSING_UBATCH, EngineConfig, ResolvedConfig
from llamabatch.engine import prefix_file
from llamabatch.engine.embedding import Embeddings
from llamabatch.engine.engine_state import MAX_WAITING, EngineState
from llamabatch.engine.hooks import EngineHooks
from llamabatch.engine.parallel_sampling import ParallelSampling
from llamabatch.engine.pending_grammars import PendingGrammars
from llamabatch.engine.prefix_file import PrefixFile
from llamabatch.engine.prefix_folder import PrefixFolder
from llamabatch.engine.resolve_config import plan
from llamabatch.engine.stats import EngineStats, RequestCounts
from llamabatch.engine.validation import RequestLimits, validate
from llamabatch.errors import AdapterError, ConfigError, EngineClosedError, EngineError, InputError, describe
from llamabatch.gguf.resolve import resolve as resolve_path
from llamabatch.llama import kv_state
from llamabatch.llama.draft_model import DraftModelProposer, open_draft
from llamabatch.llama.model import Model
from llamabatch.llama.model_runner import ModelRunner, NoRunner
from llamabatch.request.adapters import check_known
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence
from llamabatch.sampling.prepared_params import PreparedParamsCache
from llamabatch.scheduler.ngram_proposer import NgramProposer
from llamabatch.scheduler.output import Limits, SchedulerOutput
from llamabatch.scheduler.policies import policy
from llamabatch.scheduler.scheduler import Scheduler
from llamabatch.scheduler.slot_state import waiting_state
from llamabatch.scheduler.spec_decode import Proposer, SpecDecoder
from llamabatch.utils.closing import Closing
from llamabatch.utils.paths import absolute, one_line

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.002  # a step with nothing else to do waits this long for a grammar or a state on disk
_CLOSE_S = 5.0  # maximum seconds in which a closing engine writes prefixes to the disk


class Engine(Closing):
    """The engine of one model. Add requests, then call step and read its outputs until has_work is False.

    ::

        engine = Engine(EngineConfig("tiny"))
        engine.add(Request("a", tuple(engine.model.tokenize("Hello"))))
        while engine.has_work:
            for output in engine.step():
                print(output.text, end="")
        engine.close()

    Args:
        config: The options. "auto" values are filled in; `engine.plan` has the values and the reasons. The strategy is
            one of the policies, or "auto".
        model: the model of another engine with the same config; this engine shares its weights.
        alone: False if this engine is one of several in the plan; it then gets a part of the slots.
        hooks: callbacks for admitted requests.

    Raises:
        ModelFileError, ConfigError, MemoryPlanError, SetupError, EngineError: the engine cannot be made. Everything
            that was loaded for it is freed.
    """

    def __init__(
        self, config: EngineConfig, *, model: Model | None = None, alone: bool = True, hooks: EngineHooks | None = None
    ) -> None:
        import_the_rest()
        path = resolve_path(config.model) if model is None else model.path
        # The plan is made before the load, so that a model that does not fit is refused before it takes memory.
        self.plan = plan(
            replace(config, instances=1) if alone else config, path, loaded=not alone and model is not None
        )
        self.config = self.plan.config.for_one_engine()
        self.model = Model(path, config) if model is None else model.share()
        with contextlib.ExitStack() as undo:
            undo.callback(self.model.close)
            check_can_speculate(self.config, self.model)
            draft = open_draft(config, self.model)
            if draft is not None:
                undo.callback(draft.close)
            chosen = policy(self.config.strategy)
            n_slots = 1 if chosen.one_slot else self.config.n_slots
            if model is None:
                for name, adapter in self.config.adapters:
                    self.model.adapters.load(name, adapter)
            self._runner = NoRunner() if self.model.pools_only else ModelRunner(self.model, self.config, n_slots)
            undo.callback(self._runner.close)
            self._speculation = speculation(self.config, self._runner.limits, self.model, draft)
            self._disk = _disk(self.config, self._runner.limits, self.model)
            undo.pop_all()
        # The context in llama.cpp decides whether shifts are possible. The model's answer is only for callers without a
        # context.
        self._limits = replace(RequestLimits.of(self.config, self.model), can_shift=self._runner.limits.can_shift)
        self._prepared_params = PreparedParamsCache(self.model)
        self._scheduler = Scheduler(
            chosen,
            self._runner.limits,
            spec_decoder=self._speculation,
            preempt=self.config.preempt,
            max_wait_s=self.config.max_wait_ms / 1000,
            on_admit=None if hooks is None else self._add_admitted,
            disk=self._disk,
        )
        self._hooks = hooks
        self._admitted: list[str] = []  # ids of admitted requests that are not reported yet; empty without hooks
        self._parallel = ParallelSampling()
        self._embeddings = Embeddings(self.model, self.config, hooks)
        self._pending = PendingGrammars()
        self._parts = (self._parallel, self._pending, self._embeddings, self._scheduler)
        self._counts = RequestCounts()
        self._damage: str | None = None  # reason why the engine cannot go on
        self._closed = False

    @property
    def has_work(self) -> bool:
        """True if a request has not ended, or if the engine is damaged (the next step then raises)."""
        return self._damage is not None or self._scheduler.has_work or bool(self._pending) or bool(self._embeddings)

    def wait_s(self) -> float | None:
        """Returns the time in seconds that a loop may wait for more requests before the next step.

        0: there is something to compute at once; None: there is nothing to do. `step` itself waits only for a grammar
        or a state on disk, and only briefly.
        """
        wait_s = 0.0 if self._embeddings or self._damage is not None else self._scheduler.wait_s()
        if self._pending:
            return _PATIENCE_S if wait_s is None else min(wait_s, _PATIENCE_S)
        return wait_s

    def add(self, request: Request, *, streamed: bool = True) -> None:
        """Adds a request. If this raises, the engine continues without the request.

        Args:
            streamed: The caller reads each token as it comes. If all requests are read only as a whole, prompts need
                not be spread over many steps (prefill_share).

        Raises:
            ConfigError: the model cannot generate, gives no embeddings, or has no classification head.
            PromptError: the prompt is empty, longer than n_ctx, or has ids outside the vocabulary; see `validate`.
            AdapterError: an adapter is not loaded.
            SamplingError: the parameters name token ids outside the vocabulary or bad words without tokens, ask for too
                many logprobs or an impossible overflow="shift", or have a grammar that is known to be bad.
            InputError: a request with this id is in flight.
        """
        self._check_open()
        if any(request.request_id in part for part in self._parts):
            raise InputError(f"request id {request.request_id!r} is already in flight")
        try:
            request = validate(request, self._limits, self.model, self.model.adapters.names)
            if request.embed:
                self._embeddings.add(request)
            else:
                self._add_sequences(request, streamed)
            self._counts.submitted += 1
        except BaseException as error:
            self._take_out(request.request_id, describe(error))
            raise

    def _add_sequences(self, request: Request, streamed: bool) -> None:
        """Makes a sequence for each continuation. The sequences reach the scheduler once their grammar is compiled."""
        prepared = self._prepared_params.of(request.params)
        request = replace(request, params=prepared.params)
        grammar = self._compile(request)
        for each in [request] if request.params.n_copies == 1 else self._parallel.split(request):
            sequence = Sequence(each, self.model.vocabulary, self._limits.n_ctx, streamed=streamed)
            self._runner.add(each, prepared)
            if grammar is None:
                self._scheduler.add(sequence)
            else:
                self._pending.add(sequence, grammar, self._on_compiled)

    def _compile(self, request: Request) -> Future[Any] | None:
        """Starts to compile the grammar of structured_outputs, if any. Raises SamplingError for a grammar that is known
        to be bad."""
        structure = request.params.structure
        if structure is None:
            return None
        if self._hooks is not None:  # compiling a grammar may end the process
            self._hooks.admitted([request.request_id])
        grammar = self.model.grammars.compile(structure)
        if grammar.done():
            grammar.result()
        return grammar

    def _take_out(self, request_id: str, error: str) -> None:
        """Removes a request, with all its parts, because adding it failed."""
        try:
            self._abort(request_id, error)
        except Exception:
            self._damage = f"a request that failed could not be taken out: {error}"

    def abort(self, request_id: str, error: str | None = None) -> SequenceOutput | None:
        """Ends a request now, and frees its slot. Returns its output, or None if the request is not in flight.

        Args:
            error: None gives finish_reason "abort"; a text gives "error", with this message.
        """
        self._check_open()
        whole = self._abort(request_id, error)
        self._counts.count([whole] if whole is not None else [])
        return whole

    def _abort(self, request_id: str, error: str | None) -> SequenceOutput | None:
        if request_id not in self._parallel:
            return self._abort_one(request_id, error)
        ended = [self._abort_one(each, error) for each in self._parallel.copies_of(request_id)]
        merged = self._parallel.merge([output for output in ended if output is not None])
        self._parallel.forget(request_id)  # needed if some of its continuations were never made
        return merged[-1] if merged and merged[-1].finished is not None else None

    def _abort_one(self, request_id: str, error: str | None) -> SequenceOutput | None:
        self._runner.remove(request_id)
        if request_id in self._embeddings:
            return self._embeddings.abort(request_id, error)
        if request_id in self._pending:
            return self._pending.abort(request_id, error)
        return self._scheduler.abort(request_id, error)

    def _on_compiled(self, sequence: Sequence, grammar: Any) -> None:
        """Passes a sequence whose grammar is compiled to the scheduler."""
        sequence.not_held += grammar.left_out
        self._runner.constrain(sequence.request.request_id, grammar)
        self._scheduler.add(sequence)

    def step(self) -> list[SequenceOutput]:
        """Runs one step: computes at most one chunk of each prompt and one token of each running sequence, and embeds
        at most one batch of texts."""
        self._check_open()
        if self._damage is not None:
            raise EngineError(self._damage)
        patience_s = 0.0 if self._scheduler.has_work else _PATIENCE_S
        refused = self._pending.step(patience_s, self._on_compiled) if self._pending else []
        embedded = self._embeddings.step(generating=self._scheduler.has_work) if self._embeddings else []
        outputs = refused + embedded
        if self._scheduler.has_work or not embedded:
            outputs += self._compute()
        ended = [output for output in outputs if output.finished is not None]
        for output in ended:
            self._runner.remove(output.request_id)
        if self._parallel:
            ended = outputs = self._parallel.merge(outputs)
        self._counts.count(ended)
        return outputs

    def _compute(self) -> list[SequenceOutput]:
        """Runs one step of the sequences: decide, compute, apply."""
        self._grow()
        batch = self._scheduler.schedule()
        if not batch.calls and self._disk is not None and self._scheduler.prefix_cache.reads:
            self._disk.wait(_PATIENCE_S)
        self._report_admitted()  # reported first, because the computation may end the process
        results = self._runner.run(batch)
        return self._scheduler.update(batch, results)

    def _grow(self) -> None:
        """Makes a larger context if there are more requests than slots. Running sequences continue meanwhile.

        If memory has no room for a larger context, the old context stays.
        """
        wanted = self._scheduler.wanted_slots()
        if wanted is not None:
            grown = self._runner.grow(wanted, self._scheduler.held_slots, wait=not self._scheduler.running)
            if grown is not None:
                self._scheduler.grow(*grown)

    def keep_idle(self) -> bool:
        """If there is nothing to compute, writes one prefix of a finished request to the folder of cache_disk, for a
        later process. Returns True if the caller should call again soon."""
        self._check_open()
        if self._disk is None or self._damage is not None or self.has_work:
            return False
        save = self._scheduler.prefix_cache.next_write()
        if save is not None:
            self._runner.run(SchedulerOutput(saves=(save,)))
            if save.prefix.state is not None:
                self._disk.keep(save.prefix)
            return True
        return self._disk.is_busy

    def _add_admitted(self, sequence: Sequence) -> None:
        self._admitted.append(self._parallel.request_of(sequence.request.request_id))

    def _report_admitted(self) -> None:
        if self._admitted and self._hooks is not None:
            self._hooks.admitted(self._admitted)
            self._admitted = []

    def stats(self) -> EngineStats:
        """Returns the counts since the start, and the present gauges.

        May be called from any thread. During a step, the counts include only a part of this step.
        """
        scheduler = self._scheduler
        return EngineStats(**scheduler.stats()) + EngineStats(
            waiting=len(self._pending) + len(self._embeddings),
            missed_deadlines=self._pending.num_missed,
            kv_cells=scheduler.limits.n_cells or scheduler.most_slots * self.config.n_ctx,
            cache_disk_bytes=0 if self._disk is None else self._disk.n_bytes,
            **self._counts.figures(),
            **vars(self._runner.counts),
            **vars(self._embeddings.counts),
        )

    def state(self) -> EngineState:
        """Returns the slots and the queue as they are now. May be called from any thread, also during a step."""
        ids, scheduler, now = self._parallel.ids_of, self._scheduler, time.perf_counter()
        compiling = [waiting_state(s, "grammar", now, ids(s.request.request_id)) for s in self._pending.sequences]
        waiting = scheduler.waiting_states(MAX_WAITING, ids)
        n_embeddings = len(self._embeddings)
        return EngineState(
            scheduler.slot_states(ids),
            (*waiting, *compiling)[:MAX_WAITING],
            scheduler.num_waiting + len(compiling) + n_embeddings,
            n_embeddings,
            self.config.n_ctx,
            scheduler.steps,
        )

    def save_prefix(self, token_ids: abc.Sequence[int], path: str) -> bool:
        """Writes the KV cells of these tokens to a file. Returns False if no finished request has left these cells in a
        slot.

        Raises:
            InputError: the file cannot be written.
            ConfigError: this engine keeps no prefixes, or no engine could load this prefix.
        """
        self._check_open()
        path = absolute(path)
        if not self._scheduler.limits.keeps_prefixes:
            raise ConfigError("no prefix can be saved: cache_prefix is False, or a window lies in a unified KV cache")
        slot = self._scheduler.cached_slot(token_ids)
        try:
            saved = self._runner.state(slot, len(token_ids)) if slot is not None else None
            if saved is None:
                return False
            prefix = PrefixFile(tuple(token_ids), *saved)
            kv_state.check(self.model, self.config, prefix.token_ids, prefix.state, prefix.media_runs)
        except InputError as error:  # the architecture keeps more than plain KV cells
            raise ConfigError(f"no engine would load this prefix: {error}") from error
        facts = {**kv_state.facts(self.model, self.config), "kernels": kv_state.kernels(self.config)}
        prefix_file.write(path, prefix, facts)
        return True

    def load_prefix(self, path: str) -> int:
        """Loads a saved prefix into memory for requests that begin with it; returns its number of tokens.

        Raises:
            InputError: the file is damaged, or was saved by another model or engine. With batch_invariant, a file saved
                by other kernels is also refused, because its cells differ in some bits.
            ConfigError: this engine shares no prefixes.
        """
        self._check_open()
        path = absolute(path)
        if not self._scheduler.limits.can_share:
            raise ConfigError("no prefix can be loaded: the model has a sliding window, and kv is 'unified'")
        memory = self.plan.memory
        cache_bytes = memory.kv_cache + sum(gpu.kv_cache for gpu in memory.gpus)
        facts = kv_state.facts(self.model, self.config)
        if self.config.batch_invariant:
            facts["kernels"] = kv_state.kernels(self.config)
        prefix = prefix_file.read(
            path,
            facts,
            most_tokens=self.config.n_ctx,
            most_bytes=2 * cache_bytes + 2**20,  # a state also has positions, and the plan's bytes are an estimate
        )
        try:
            kv_state.check(self.model, self.config, prefix.token_ids, prefix.state, prefix.media_runs)
        except InputError as error:
            raise InputError(f"the prefix file {one_line(path)} is refused: {error}") from error
        self._scheduler.load_prefix(path, prefix.token_ids, prefix.state, prefix.media_runs)
        return len(prefix.token_ids)

    def unload_prefix(self, path: str) -> None:
        """Frees a loaded prefix. Raises InputError if it is not loaded."""
        self._check_open()
        self._scheduler.unload_prefix(absolute(path))

    def reset_prefix_cache(self) -> bool:
        """Drops the KV cells of finished requests, including saved ones in memory and on disk; returns True."""
        self._check_open()
        self._scheduler.reset_prefix_cache()
        return True

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA or a control vector for later requests.

        Raises:
            AdapterError: another adapter has this name.
            ModelFileError: the file is missing, damaged, or for another model.
        """
        self._check_open()
        self.model.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter. Raises AdapterError if it is not loaded, or a request in flight uses it."""
        self._check_open()
        unload_adapter([self], name)

    def uses_adapter(self, name: str) -> bool:
        """Returns True if a request in flight uses this adapter."""
        pending = any(name == used for s in self._pending.sequences for used, _ in s.request.adapters)
        return pending or self._embeddings.uses_adapter(name) or self._scheduler.uses_adapter(name)

    def forget_adapter(self, name: str) -> None:
        """Removes an adapter from the contexts, so that the adapter can be freed."""
        self._runner.forget_adapter(name)
        self._embeddings.forget_adapter(name)
        self._scheduler.forget_adapter(name)

    def check_integrity(self) -> None:
        """Raises ValueError if slots, running sequences and sampler states disagree, which is a bug of llamabatch."""
        scheduler, pending, ids = self._scheduler, self._pending, self._runner.request_ids
        scheduler.check_integrity()
        in_flight = len(scheduler.running) + scheduler.num_waiting + len(pending)
        if len(ids) != in_flight or not all(each in scheduler or each in pending for each in ids):
            raise ValueError(f"{len(ids)} sampler states are held for {in_flight} sequences in flight")

    def close(self, reason: str | None = None) -> None:
        """Frees context and model; requests in flight are lost. May be called twice.

        Args:
            reason: message of the error raised by later calls of the model; None: "the model is closed".
        """
        if not self._closed:
            if self._disk is not None:
                if reason is None:  # after a failure, cells of an unfinished step may be wrong
                    self._keep_all()
                self._disk.close()
            self._closed = True
            if self._speculation is not None:
                self._speculation.close()
            self._embeddings.close()
            self._runner.close()
            self._scheduler.prefix_cache.store.close()
            self.model.close(reason)

    def _keep_all(self) -> None:
        """Writes the prefixes of finished requests to the disk. Errors are ignored, so that the engine still closes."""
        until = time.perf_counter() + _CLOSE_S
        with contextlib.suppress(Exception):
            while self._disk is not None and self.keep_idle() and time.perf_counter() < until:
                if self._disk.is_busy:
                    self._disk.wait(_PATIENCE_S)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed")


def unload_adapter(engines: list[Engine], name: str) -> None:
    """Frees an adapter of a model.

    Args:
        engines: all engines that share the model; none of them may be computing.

    Raises:
        AdapterError: the adapter is not loaded, or a request in flight uses it.
    """
    adapters = engines[0].model.adapters
    check_known(((name, 1.0),), adapters.names)
    if any(engine.uses_adapter(name) for engine in engines):
        raise AdapterError(f"adapter {name!r} is used by requests in flight; unload it when they have finished")
    for engine in engines:
        engine.forget_adapter(name)
    adapters.unload(name)


def import_the_rest() -> None:
    """Imports the modules needed by requests. Importing them later would fail if all file descriptors were in use."""
    import numpy.ctypeslib  # noqa: F401  # numpy imports it only when it is first used

    import llamabatch.sampling.grammar_compiler  # noqa: F401  # imports llguidance; `import llamabatch` does not


def check_can_speculate(config: ResolvedConfig, model: Model) -> None:
    """Raises ConfigError if the engine is to guess tokens, but cannot remove the KV cells of wrong guesses."""
    why = model.uncuttable(config)
    if config.speculate == "off" or why is None or model.n_snapshots(config):
        return
    if model.n_snapshots(replace(config, n_ubatch=MIN_GUESSING_UBATCH)):
        raise ConfigError(
            f"n_ubatch is {config.n_ubatch}, too small for guesses of {model.path.name}, which has {why}; raise it to "
            f"{MIN_GUESSING_UBATCH} or more, or give speculate 'off'"
        )
    raise ConfigError(
        f"speculate is {config.speculate!r}, but {model.path.name} has {why}, from which the tokens of wrong "
        "guesses cannot be taken back; give 'off'"
    )


def _disk(config: ResolvedConfig, limits: Limits, model: Model) -> PrefixFolder | None:
    """Opens the folder of cache_disk. Returns None without cache_disk, or if this engine keeps no prefixes."""
    if config.cache_disk is None:
        return None
    if not limits.keeps_prefixes or not limits.state_bytes:
        why = "cache_ram is 0" if limits.keeps_prefixes else "cells of this model, or in this KV cache, are not kept"
        logger.warning("cache_disk has no effect: %s", why)
        return None
    is_exact = limits.has_window or not limits.can_cut
    return PrefixFolder(Path(config.cache_disk), config.cache_disk_mib * 2**20, model, config, is_exact)


def speculation(config: ResolvedConfig, limits: Limits, model: Model, draft: Model | None) -> SpecDecoder | None:
    """Returns the part of an engine that guesses tokens; None if speculate is "off". This part owns the draft model."""
    if config.speculate == "off":
        return None
    proposer: Proposer = NgramProposer() if draft is None else DraftModelProposer(draft, model, config, limits.n_slots)
    n_draft = model.n_snapshots(config) if model.is_recurrent else config.n_draft
    return SpecDecoder(proposer, limits, n_draft, config.n_ctx, config.speculate_always)
