"""Tunes a model. Chooses the settings stage by stage (coordinate descent), measures them, and writes the profile."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, Protocol

from llamabatch.config import EngineConfig, ResolvedConfig, with_paths
from llamabatch.engine.resolve_config import plan, read_facts
from llamabatch.errors import ConfigError, EngineError
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.environment import amx_is_off, environment_defaults
from llamabatch.llama.library import amx_can_be_off, extra_bufts_safe
from llamabatch.llama.tuned_load import used_gpus
from llamabatch.planning import profile_store
from llamabatch.planning.machine import Machine
from llamabatch.planning.memory import memory
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.profile import Profile, Stair
from llamabatch.tools.machine_facts import MachineFacts
from llamabatch.tools.processes import OtherProcesses, no_child_left
from llamabatch.tools.tune.children import Children, busy_neighbour
from llamabatch.tools.tune.choose import Choice, Figures, Latency, choose, choose_rows, medians
from llamabatch.tools.tune.report import CHOSEN, LLAMA_CPP, Report, Result
from llamabatch.tools.tune.stages import STAIRS, Job, Setting, Stage, llama_cpp_defaults, stages
from llamabatch.utils.checks import counted, number

NORMAL_S, QUICK_S = 150.0, 40.0
_CELLS = 256  # cells of each measured sequence
_PROMPT = 192  # cells for the prompt; the rest of _CELLS is for steps
_MANY = 32
_LONG_PROMPT = 1024
_LONG_PROMPT_S = 4.0  # on a slow machine the long prompt is shortened to about this many seconds
_STAIRS_SHARE, _GAIN_SHARE = 2.0, 2.0
_STAIRS_ROUNDS, _GAIN_ROUNDS = 3, 3
_HOPELESS = 0.67  # a candidate below this multiple of the default's speed is measured once only
_MOST_GAIN = 4.0  # the largest speed-up to expect; a latency limit that needs more is refused early
_STEP_SHARE = 1 / 600  # each number of rows gets this share of the tuning's time for its steps


class Progress(Protocol):
    """A display of the progress of tuning."""

    def start(self, title: str, share: float) -> None:
        """Starts the next part. `share`: its share of the whole time."""

    def advance(self, share: float) -> None:
        """Adds `share` to the finished share of the current part."""

    def end(self, outcome: str) -> None:
        """Ends the current part. `outcome`: the text of its result."""


@dataclass(frozen=True)
class Settings:
    """A model to tune, and the limits of the tuning. Raises ConfigError.

    Attributes:
        model: path of a .gguf file, or "tiny".
        seconds: approximate duration of the tuning. With a slow model the necessary measurements take longer.
        allow_numerics: choose the types of the KV cache, too. This changes the outputs of a model.
        p95_inter_token_ms: limit of the p95 of the time between two tokens, in milliseconds; None: no limit. The chosen
            number of slots keeps this limit.
        beside_load: write the profile even if other processes used the CPU during the tuning.
        engine: options of EngineConfig: the devices of the layers, and the types of the KV cache before the tuning.
    """

    model: str = "tiny"
    seconds: float = NORMAL_S
    allow_numerics: bool = False
    p95_inter_token_ms: float | None = None
    beside_load: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", with_paths({"model": self.model})["model"])
        object.__setattr__(self, "engine", with_paths(self.engine))
        number(ConfigError, "seconds", self.seconds, 1, 36_000)
        if self.p95_inter_token_ms is not None:
            number(ConfigError, "p95_inter_token_ms", self.p95_inter_token_ms, 1e-3, 1e6)
        self.config()

    def config(self) -> EngineConfig:
        """Returns the options before tuning, without a profile."""
        return EngineConfig.from_options(self.model, {**self.engine, "profile": False})


def run(settings: Settings, progress: Progress) -> Report:
    """Measures the candidates, chooses, and writes the profile. If other processes used the CPU during the tuning,
    writes the profile only with `beside_load`.

    Raises:
        InputError: the model or an option is refused.
        SetupError, MemoryPlanError, EngineError: no engine can run here, or the profile cannot be written.
    """
    path = resolve(settings.model)
    profile_store.check_writable()
    others = OtherProcesses()
    config = settings.config()
    facts = read_facts(config, path)
    config = replace(config, n_ctx=max(32, min(_CELLS, facts.n_ctx_train)), n_slots=1)
    ruled = plan(config, path).config
    with no_child_left(), Children(ruled, _room(facts, ruled)) as children:
        tuner = Tuner(settings, ruled, facts, children, progress)
        results = tuner.choose_all()
        stairs = tuner.staircase()
        latency = tuner.latency(stairs)
        gain = tuner.gain()
    chosen, rule = tuner.setting, tuner.rule
    profile = _profile(settings, ruled, facts.name or path.name, chosen, rule, stairs)
    if latency is not None:
        profile = replace(profile, p95_inter_token_ms=latency.limit_ms, latency_rows=latency.rows)
    used = others.use()
    keeps = settings.beside_load or not used.is_much
    return Report(
        machine=MachineFacts.here(),
        results=tuple(results),
        stairs=stairs,
        gain=gain,
        many=tuner.many,
        profile=profile,
        file=profile_store.keep(profile) if keeps else None,
        seconds=tuner.elapsed,
        cut_short=tuner.cut_short,
        others=used,
        latency=latency,
    )


def _room(facts: ModelFacts, config: ResolvedConfig) -> int:
    """Returns how many processes with this model and the largest number of rows fit in half of the free memory."""
    each = memory(facts, _with_rows(config, _CELLS, STAIRS[-1])).total
    return int(Machine.here().available_bytes // 2 // each)


def _profile(
    settings: Settings, ruled: ResolvedConfig, name: str, chosen: Setting, rule: Setting, stairs: tuple[Stair, ...]
) -> Profile:
    def differs(*names: str) -> bool:
        return any(getattr(chosen, name) != getattr(rule, name) for name in names)

    # The profile has both numbers of threads or neither, because the rule for n_threads_batch uses n_threads.
    threads = differs("n_threads", "n_threads_batch")
    flash = differs("flash_attn") and chosen.type_v == rule.type_v  # with another V type, the type decides flash_attn
    return Profile(
        key=profile_store.key_of(
            resolve(settings.model), replace(ruled, type_k=chosen.type_k, type_v=chosen.type_v, flash_attn="auto")
        ),
        created=date.today().isoformat(),
        model=name,
        gpus=used_gpus(ruled),
        flash_attn=chosen.flash_attn if flash else None,
        extra_bufts=chosen.extra_bufts if differs("extra_bufts") else None,
        n_threads=chosen.n_threads if threads else None,
        n_threads_batch=chosen.n_threads_batch if threads else None,
        n_ubatch=chosen.n_ubatch if differs("n_ubatch") else None,
        spins=chosen.spins if differs("spins") else None,
        amx="off" if chosen.amx == "off" else None,
        stairs=stairs,
    )


class Tuner:
    """Runs a tuning stage by stage, and stores the choices so far and the time used."""

    def __init__(
        self, settings: Settings, ruled: ResolvedConfig, facts: ModelFacts, children: Children, progress: Progress
    ) -> None:
        self._settings, self._children, self._progress = settings, children, progress
        self._cores = Machine.here().cores
        self._n_ctx = ruled.n_ctx
        self._prompt = self._n_ctx * _PROMPT // _CELLS
        self._rows = _rows_that_fit(facts, ruled, self._n_ctx)
        self.many = max((rows for rows in self._rows if rows <= _MANY), default=1)
        self._step_s = settings.seconds * _STEP_SHARE
        buffers = ruled.extra_bufts
        self.setting = self.rule = Setting(
            extra_bufts=("on" if extra_bufts_safe() else "off") if buffers == "auto" else buffers,
            spins=int(environment_defaults(facts.file_bytes)["GOMP_SPINCOUNT"]),
            flash_attn=ruled.flash_attn,
            type_k=ruled.type_k,
            type_v=ruled.type_v,
            n_ubatch=ruled.n_ubatch,
            n_threads=ruled.n_threads,
            n_threads_batch=ruled.n_threads_batch,
            amx="off" if amx_is_off() else "on",
        )
        self._start = time.monotonic()
        self._used = 0.0  # sum of the shares of all parts so far, including the current part
        self.cut_short = False
        prompt_ms = self._figures(self.setting, ("prompt",))["prompt"]
        self._prompt_ms = prompt_ms  # milliseconds for one prompt token, updated by staircase()
        self._check_limit()
        self._long_prompt = _rounded(min(_LONG_PROMPT, facts.n_ctx_train, int(_LONG_PROMPT_S * 1000 / prompt_ms)))
        self._stages = stages(self._cores, ruled, self._long_prompt, amx_can_be_off())
        self._shares = sum(stage.share for stage in self._stages) + _STAIRS_SHARE + _GAIN_SHARE

    def _check_limit(self) -> None:
        """Raises ConfigError if no choice can reach the latency limit. Runs before the stages, to fail early."""
        limit = self._settings.p95_inter_token_ms
        if limit is not None:
            figures = self._children.measure(self.setting, self._job((1,)))
            one = Stair(1, figures["1"], figures.get("p95 1"))
            choose_rows([one], self._prompt_ms, limit * _MOST_GAIN)

    def latency(self, stairs: tuple[Stair, ...]) -> Latency | None:
        """Returns the number of slots for the latency limit; None without a limit. Raises ConfigError if no number of
        slots keeps the limit."""
        limit = self._settings.p95_inter_token_ms
        return None if limit is None else choose_rows(stairs, self._prompt_ms, limit)

    @property
    def elapsed(self) -> float:
        """The seconds since the start."""
        return time.monotonic() - self._start

    def choose_all(self) -> list[Result]:
        """Runs all stages, each with the choices of the earlier stages."""
        return [self._stage(stage) for stage in self._stages]

    def _stage(self, stage: Stage) -> Result:
        self._begin(stage.title, stage.share)
        candidates = stage.candidates(self.setting)
        if stage.name == "spins" and not self._children.spins_matter(self.setting, self._job(())):
            candidates = dict(list(candidates.items())[:1])  # this build ignores GOMP_SPINCOUNT
        default = next(iter(candidates))
        failures: dict[str, str] = {}
        rounds: dict[str, tuple[Figures, ...]] = dict.fromkeys(candidates, ())
        if len(candidates) > 1:
            self._measure_in_turn(stage, candidates, (default,), rounds, failures)
        choice = choose(rounds, default)
        if stage.only_on_request and not self._settings.allow_numerics:
            choice = replace(choice, chosen=default)
        self.setting = candidates[choice.chosen]
        self._progress.end(_outcome(choice))
        return Result(stage.title, stage.measures, choice, failures, stage.only_on_request)

    def _measure_in_turn(
        self,
        stage: Stage,
        candidates: dict[str, Setting],
        must: tuple[str, ...],
        rounds: dict[str, tuple[Figures, ...]],
        failures: dict[str, str],
    ) -> None:
        """Measures all candidates in each round. Every other round runs backwards, so that a slow phase of the machine
        affects all candidates alike.

        When the time is over, no further round starts. In the first round, the candidates in `must` are still measured.

        Args:
            must: labels of candidates, the default first. If the default fails, raises its EngineError. The errors of
                other candidates go to `failures`.
            rounds: receives the figures of each candidate.
            failures: receives the error of each failed candidate.
        """
        default = must[0]
        for turn in range(stage.rounds):
            if turn and self._late:
                self.cut_short = True
                break
            alive = [label for label in candidates if label not in failures and _in_the_race(label, default, rounds)]
            for label in alive if turn % 2 == 0 else alive[::-1]:
                if label not in must and not rounds[label] and self._late:
                    self.cut_short = True
                    continue
                try:
                    rounds[label] = (*rounds[label], self._figures(candidates[label], stage.measures))
                except EngineError as error:
                    if label == default:
                        raise
                    failures[label] = str(error)
                self._progress.advance(1 / stage.rounds / len(alive))

    def staircase(self) -> tuple[Stair, ...]:
        """Measures decode steps with each number of rows that fits in memory."""
        self._begin("rows", _STAIRS_SHARE)
        rounds: list[Figures] = []
        for turn in range(_STAIRS_ROUNDS):
            if turn and self._late:
                self.cut_short = True
                break
            rows = self._rows if turn % 2 == 0 else self._rows[::-1]
            timed = self._settings.p95_inter_token_ms is not None
            rounds.append(self._children.measure(self.setting, self._job(rows, timed)))
            self._progress.advance(1 / _STAIRS_ROUNDS)
        steps = medians(tuple(rounds))
        stairs = tuple(Stair(rows, steps[str(rows)], steps.get(f"p95 {rows}")) for rows in self._rows)
        self._prompt_ms = steps.get("prompt", self._prompt_ms)
        best = max(stairs, key=lambda stair: stair.tokens_per_s)
        self._progress.end(f"{best.tokens_per_s:,.0f} tokens/s with {counted(best.rows, 'row')}")
        return stairs

    def gain(self) -> Result:
        """Measures the chosen setting against llama.cpp's defaults."""
        defaults = llama_cpp_defaults(self.rule, self._cores)
        stage = Stage(
            "", "against llama.cpp's defaults", ("prompt", "one", "many", "busy one", "busy many"),
            lambda setting: {LLAMA_CPP: defaults, CHOSEN: setting}, _GAIN_ROUNDS,
        )  # fmt: skip
        self._begin(stage.title, _GAIN_SHARE)
        rounds: dict[str, tuple[Figures, ...]] = {LLAMA_CPP: (), CHOSEN: ()}
        self._measure_in_turn(stage, stage.candidates(self.setting), (LLAMA_CPP, CHOSEN), rounds, {})
        choice = replace(choose(rounds, LLAMA_CPP), chosen=CHOSEN)
        self._progress.end(_outcome(choice))
        return Result(stage.title, stage.measures, choice)

    def _begin(self, title: str, share: float) -> None:
        self._used += share
        self._progress.start(title, share / self._shares)

    @property
    def _late(self) -> bool:
        """True if the current part has used up its own time and the time that earlier parts left over."""
        return self.elapsed > self._settings.seconds * self._used / self._shares

    def _job(self, rows: Iterable[int], time_prompt: bool = False) -> Job:
        rows = tuple(rows)
        return Job(self._prompt, rows, self._n_ctx, max((self.many, *rows)), self._step_s, time_prompt)

    def _figures(self, setting: Setting, measures: tuple[str, ...]) -> dict[str, float]:
        if "long prompt" in measures:
            job = Job(self._long_prompt, (), self._long_prompt, 1, self._step_s)
            return {"long prompt": self._children.measure(setting, job)["prompt"]}
        figures: dict[str, float] = {}
        numbers = {"one": 1, "many": self.many}
        for before in ("", "busy "):
            wanted = [name for name in (f"{before}{m}" for m in ("prompt", "one", "many")) if name in measures]
            if not wanted:
                continue
            rows = tuple(numbers[name.removeprefix(before)] for name in wanted if name.removeprefix(before) in numbers)
            with busy_neighbour() if before else nullcontext():
                measured = self._children.measure(setting, self._job(rows, f"{before}prompt" in wanted))
            for name in wanted:
                figures[name] = measured[str(numbers.get(name.removeprefix(before), "prompt"))]
        return figures


def _rows_that_fit(facts: ModelFacts, config: ResolvedConfig, n_ctx: int) -> tuple[int, ...]:
    budget = Machine.here().available_bytes // 2
    return tuple(n for n in STAIRS if n == 1 or memory(facts, _with_rows(config, n_ctx, n)).total <= budget)


def _with_rows(config: ResolvedConfig, n_ctx: int, rows: int) -> ResolvedConfig:
    return replace(config, kv="split", kv_cells=0, n_ctx=n_ctx, n_slots=rows)


def _in_the_race(label: str, default: str, rounds: Mapping[str, tuple[Figures, ...]]) -> bool:
    """Returns False for a candidate that was far slower than the default in the first round."""
    first = {name: figures[:1] for name, figures in rounds.items() if name in (label, default)}
    gain = choose(first, default).gains[label] if all(first.values()) else None
    return gain is None or gain >= _HOPELESS


def _rounded(prompt: int) -> int:
    """Rounds a prompt length down to a multiple of 256, the unit of llama.cpp's cells; at least 256."""
    return max(1, prompt // _CELLS) * _CELLS


def _outcome(choice: Choice) -> str:
    gain = choice.gains[choice.chosen]
    if not choice.changed or gain is None:
        return choice.chosen
    return f"{choice.chosen}, {gain:.2f} times as fast as {choice.default}"
