"""One call raises while four requests are processed. All are answered, and the engine goes on or ends cleanly."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llamabatch import LLM, EngineClosedError, LlamaBatchError, RequestOutput, SamplingParams
from llamabatch.client.front_client import FrontClient
from llamabatch.client.process_client import ChildClient
from llamabatch.config import EngineConfig

sys.path.append(str(Path(__file__).parents[2]))

from tests.clients import innermost
from tests.waiting import until
from tests.workers.raising_worker import ERRORS, VARIABLE, Fault

HOLDS = (
    "any call on the way of requests raises: each is answered, one is to blame or all fail, and the next call is too"
)
TOTAL = 3000
QUICK = 50

KINDS = ("thread", "threads", "isolate", "child", "instances")
_PATIENCE_S = 90.0
_PROMPTS = ("Once upon a time", "The sea is", "A cat", "Two and two")
_PARAMS = (
    SamplingParams(max_tokens=6, temperature=0),
    SamplingParams(max_tokens=6, temperature=0, logprobs=1, prompt_logprobs=1),
    SamplingParams(
        max_tokens=6, temperature=0.8, seed=1, n=2, repetition_penalty=1.2, dry_multiplier=0.5, stop=["zebra"]
    ),
    SamplingParams(max_tokens=8, temperature=0, structured_outputs={"regex": "[a-z]{3,5}"}),
)
_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "thread": {"strategy": "batched"},
    "threads": {"strategy": "batched", "instances": 2},
    "isolate": {"strategy": "batched", "isolate": True},
    "instances": {"strategy": "multi-instance", "instances": 2},
}
_Result = list[RequestOutput] | BaseException


def case(number: int, folder: Path) -> None:
    """Lets one call raise. Kinds of engines take turns; a fixed random order chooses the call."""
    attempt(number, folder)


def attempt(number: int, folder: Path) -> bool:
    """Runs a case. Returns False if the call did not come, since threads take turns differently each time."""
    kind = KINDS[number % len(KINDS)]
    calls = points(kind)
    name, nth = calls[number // len(KINDS) % len(calls)]
    error = random.Random(number).choice(list(ERRORS))
    try:
        return (_in_child if kind == "child" else _in_parent)(kind, name, nth, error, folder)
    except AssertionError as failed:
        raise AssertionError(f"{kind}: {error} in call {nth} of {name}: {failed}") from failed


def _in_parent(kind: str, name: str, nth: int, error: str, folder: Path) -> bool:
    llm, wanted, fault = _engine(kind)
    fault.arm(name, nth, ERRORS[error])
    try:
        result = _outcome(llm, fault)
    finally:
        fault.is_armed = False
    _check(kind, result, wanted, ERRORS[error])
    _check_next(llm, wanted, kind)
    return fault.fired


def _in_child(kind: str, name: str, nth: int, error: str, folder: Path) -> bool:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _, wanted, _ = _engine("isolate")
        with _with_program({"folder": place, "name": name, "nth": nth, "error": error}) as llm:
            _check(kind, _outcome(llm), wanted, ERRORS[error])
            _check_next(llm, wanted)
        return Path(place, "fired").exists()


def _check(kind: str, result: _Result, wanted: list[list[str]], error: type[Exception]) -> None:
    if isinstance(result, BaseException):  # the error came in the caller's own thread
        assert isinstance(result, (error, LlamaBatchError)), repr(result)
        return
    failed = [output.error for output in result if output.error is not None]
    ours = [why for why in failed if " failed: " in why]  # a failed engine or supervisor answers all requests
    # The requests of one call that go to one of several engines are submitted together, and so fail together. The
    # outputs in one message of a child also fail together.
    together = len({*failed}) == 1 and (kind in ("threads", "instances") or "lost the request" in failed[0])
    assert len(failed) <= 1 or failed == ours or together, failed
    for output, texts in zip(result, wanted, strict=True):
        assert output.error is not None or _texts(output) == texts, (_texts(output), texts)


def _check_next(llm: LLM, wanted: list[list[str]], kind: str | None = None) -> None:
    """Checks that the next call works, or raises EngineClosedError at once."""
    result = _outcome(llm)
    if isinstance(result, EngineClosedError):
        if kind is not None:
            close(kind)
        return
    assert not isinstance(result, BaseException), repr(result)
    errors = [output.error for output in result if output.error is not None]
    if errors and all("the engine failed" in error for error in errors):  # the call came just before the engine's end
        until(lambda: isinstance(_outcome(llm), EngineClosedError))
        _check_next(llm, wanted, kind)
        return
    assert not errors, errors
    assert [_texts(output) for output in result] == wanted
    stats = llm.stats()
    assert (stats.running, stats.waiting) == (0, 0), stats


def _outcome(llm: LLM, fault: Fault | None = None) -> _Result:
    """Returns the result or the error of a call. The call has its own thread, so that an endless wait is noticed."""
    results: list[_Result] = []

    def call() -> None:
        try:
            results.append(llm.generate(list(_PROMPTS), list(_PARAMS), errors="return"))
        except BaseException as error:
            results.append(error)

    if fault is not None:
        _profile(innermost(llm), fault)
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(_PATIENCE_S)
    assert results, "the caller waits for ever"
    return results[0]


def _profile(client: Any, fault: Fault) -> None:
    """Sets the profile function of all threads. Python removes a profile function that has raised, so it is set
    again."""
    threading.setprofile(fault)
    for each in getattr(client, "_clients", [client]):
        if hasattr(each, "ask"):
            with contextlib.suppress(EngineClosedError):
                each.ask(lambda engine: sys.setprofile(fault)).result(_PATIENCE_S)


def _texts(output: RequestOutput) -> list[str]:
    return [completion.text for completion in output.outputs]


_engines: dict[str, tuple[LLM, list[list[str]], Fault]] = {}


def _engine(kind: str) -> tuple[LLM, list[list[str]], Fault]:
    """Returns an LLM, the texts that it gives, and the Fault that makes its calls raise. Makes them if needed."""
    if kind not in _engines:
        fault = _fault()
        llm = LLM("tiny", n_slots=4, n_ctx=256, n_threads=1, **_OPTIONS[kind])
        wanted = [_texts(output) for output in llm.generate(list(_PROMPTS), list(_PARAMS), errors="return")]
        _engines[kind] = llm, wanted, fault
    return _engines[kind]


def close(kind: str | None = None) -> None:
    """Closes one engine, or all."""
    for name in [kind] if kind is not None else list(_engines):
        _engines.pop(name)[0].close()
    if not _engines:
        threading.setprofile(None)


@functools.cache
def _fault() -> Fault:
    fault = Fault()
    fault.wrap_native()
    threading.setprofile(fault)
    return fault


@contextlib.contextmanager
def _with_program(asked: Mapping[str, Any]) -> Iterator[LLM]:
    """Yields an LLM whose child runs raising_worker. The variable stays set, so that children which replace the first
    one also read it."""
    os.environ[VARIABLE] = json.dumps(asked)
    try:
        config = EngineConfig("tiny", n_slots=4, n_ctx=256, n_threads=1, strategy="batched", isolate=True)
        with LLM.__new__(LLM) as llm:
            llm._client = FrontClient(ChildClient(config, "tests.workers.raising_worker"))
            yield llm
    finally:
        del os.environ[VARIABLE]


@functools.cache
def points(kind: str) -> list[tuple[str, int]]:
    """Returns the calls, as (function, number of the call), in which a Fault may raise while requests are processed.

    Of each function, these are the first, the second and the middle call. The order depends only on their names.
    """
    seen: Mapping[str, int]
    if kind == "child":
        with tempfile.TemporaryDirectory() as place:
            with _with_program({"folder": place, "name": "", "nth": 0, "error": "OSError"}) as llm:
                _outcome(llm)
            seen = json.loads(Path(place, "seen.json").read_text(encoding="utf-8"))
    else:
        llm, _, fault = _engine(kind)
        fault.arm()
        _outcome(llm, fault)
        fault.is_armed = False
        seen = dict(fault.seen)
    found = [(name, nth) for name, n in seen.items() for nth in {1, 2, (n + 1) // 2} if nth <= n]
    return sorted(found, key=lambda point: random.Random(repr(point)).random())
