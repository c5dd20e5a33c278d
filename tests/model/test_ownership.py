"""Every request is answered, whatever error occurs on its way. A temporary lack of a resource ends nothing for good."""

import queue
import subprocess
import sys
import threading

import pytest

from llamabatch import LLM, EngineClosedError, EngineError, SamplingParams
from llamabatch.client import base
from llamabatch.client.thread_client import ThreadClient
from llamabatch.config import EngineConfig
from llamabatch.llama import library
from llamabatch.request.request import Request
from llamabatch.request.structured_outputs import Structure
from tests.clients import innermost
from tests.long import raising_calls
from tests.waiting import PATIENCE_S, until

SHORT = SamplingParams(max_tokens=4, temperature=0)


@pytest.fixture(scope="module")
def cases():
    yield
    raising_calls.close()


@pytest.mark.parametrize("kind", range(len(raising_calls.KINDS)), ids=raising_calls.KINDS)
def test_any_call_may_raise(kind, cases, tmp_path, caplog):
    numbers = range(kind, raising_calls.QUICK, len(raising_calls.KINDS))
    came = [raising_calls.attempt(number, tmp_path) for number in numbers]
    assert sum(came) > len(came) / 2  # if few of the calls came, the test would prove nothing


# --- callbacks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def client():
    client = ThreadClient(EngineConfig("tiny", n_slots=4, n_ctx=256, strategy="batched"))
    yield client
    client.close()


def ends(told, n):
    found = {}
    while len(found) < n:
        for output in told.get(timeout=PATIENCE_S):
            if output.finished is not None:
                assert output.request_id not in found, "ended twice"
                found[output.request_id] = output.finished
    return found


def requests(client, *names, **params):
    ids = tuple(client.model.tokenize("Once upon a time"))
    return [Request(name, ids, SamplingParams(**{"max_tokens": 4, "temperature": 0} | params)) for name in names]


RAISED = [OSError(24, "Too many open files"), MemoryError(), SystemExit(3)]


@pytest.mark.parametrize("error", [*RAISED, KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_a_logits_processor_that_raises_ends_its_request(client, error):
    def process(token_ids, logits):
        raise error

    told = queue.SimpleQueue()
    client.submit(requests(client, "bad", logits_processors=[process]) + requests(client, "good"), told.put)
    found = ends(told, 2)
    assert type(error).__name__ in found["bad"].error
    assert found["good"].error is None


@pytest.mark.parametrize("error", [*RAISED, KeyboardInterrupt()], ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stream", [False, True])
def test_a_sink_that_raises_ends_its_request(client, error, stream):
    told = queue.SimpleQueue()

    def sink(outputs):
        for output in outputs:
            if output.request_id == "bad" and (output.finished is None or output.finished.error is None):
                raise error
        told.put([output for output in outputs if output.finished is not None])

    client.submit(requests(client, "bad", "good", max_tokens=6), sink, stream=stream)
    client.submit(requests(client, "other"), told.put)
    found = ends(told, 3)
    assert "could not be delivered: " in found["bad"].error
    assert type(error).__name__ in found["bad"].error
    assert found["good"].error is found["other"].error is None
    until_idle(client)
    client.submit(requests(client, "bad"), told.put)
    assert ends(told, 1)["bad"].error is None


def until_idle(client):
    until(lambda: not ((stats := client.stats()).running or stats.waiting))


def test_a_sink_that_always_raises_holds_nothing_up(client):
    def sink(outputs):
        raise ValueError("no")

    client.submit(requests(client, "bad"), sink)
    told = queue.SimpleQueue()
    client.submit(requests(client, "good"), told.put)
    assert ends(told, 1)["good"].error is None
    until_idle(client)


@pytest.mark.parametrize("stream", [False, True])
def test_a_sink_that_raises_for_a_while_still_gets_the_end(client, stream):
    told, raised = queue.SimpleQueue(), []

    def sink(outputs):
        if len(raised) < 6:  # raises more often than the engine's thread tries again
            raised.append(1)
            raise MemoryError
        told.put(outputs)

    client.submit(requests(client, "bad"), sink, stream=stream)
    assert "could not be delivered: MemoryError" in ends(told, 1)["bad"].error


def test_neither_a_log_that_fails_nor_an_error_without_text_loses_an_output(client, monkeypatch):
    class WithoutText(ValueError):
        def __str__(self):
            raise RuntimeError("none")

    def fail(*arguments, **more):
        raise MemoryError

    monkeypatch.setattr(base.logger, "exception", fail)
    told, raised = queue.SimpleQueue(), []

    def sink(outputs):
        if len(raised) < 6:
            raised.append(1)
            raise WithoutText
        told.put(outputs)

    client.submit(requests(client, "bad"), sink)
    assert "could not be delivered" in ends(told, 1)["bad"].error
    client.submit(requests(client, "good"), told.put)
    assert ends(told, 1)["good"].error is None


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_a_question_raises_is_the_askers(client, error):
    def ask(engine):
        raise error

    with pytest.raises(type(error)):
        client.ask(ask).result(PATIENCE_S)
    told = queue.SimpleQueue()
    client.submit(requests(client, "good"), told.put)
    assert ends(told, 1)["good"].error is None


# --- the engine itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_failed_engine_answers_all_and_says_so(client, monkeypatch, error):
    """It answers requests in flight, the request that it is just accepting, those queued behind it, and questions."""
    told = queue.SimpleQueue()
    entered, go_on = threading.Event(), threading.Event()
    step = client._engine.step

    def hold():
        entered.set()
        assert go_on.wait(PATIENCE_S)
        monkeypatch.setattr(client._engine._scheduler, "schedule", fail)
        return step()

    def fail():
        raise error

    monkeypatch.setattr(client._engine, "step", hold)
    client.submit(requests(client, "a", "b", n=2), told.put)
    assert entered.wait(PATIENCE_S)
    client.submit(requests(client, "c", "d"), told.put)
    late = requests(client, "e")
    go_on.set()
    found = ends(told, 4)
    assert {output.error is not None for output in found.values()} == {True}
    assert f"the engine failed: {type(error).__name__}" in found["a"].error
    until(lambda: not client.alive)
    for call in (lambda: client.submit(late, told.put), client.stats, lambda: client.ask(id)):
        with pytest.raises(EngineClosedError, match="the engine failed"):
            call()


def test_a_call_after_the_engine_has_failed_is_refused(monkeypatch):
    def fail():
        raise OSError("no")

    with LLM("tiny", n_slots=2, n_ctx=256) as llm:
        monkeypatch.setattr(innermost(llm)._engine, "step", fail)
        with pytest.raises(EngineError, match="the engine failed: OSError: no"):
            llm.generate("Once", SHORT)
        # the model is freed, so a call of llama.cpp about it might crash the process
        monkeypatch.setattr(library.load(), "llama_model_rope_type", lambda model: pytest.fail("freed"))
        with pytest.raises(EngineClosedError, match="the engine failed: OSError: no"):
            llm.generate("Once", SHORT)


def test_a_command_that_is_under_way_is_answered(client, monkeypatch):
    """The exception comes after a command has left the queue, and before the engine has it."""
    told = queue.SimpleQueue()

    def fail(request, **options):
        raise SystemExit(3)

    monkeypatch.setattr(client._engine, "add", fail)
    late = requests(client, "c")
    client.submit(requests(client, "a", "b"), told.put)
    assert "the engine failed: SystemExit" in ends(told, 2)["b"].error
    until(lambda: not client.alive)
    with pytest.raises(EngineClosedError):
        client.submit(late, told.put)


def test_a_lost_request_is_not_waited_for(client, monkeypatch):
    told = queue.SimpleQueue()
    monkeypatch.setattr(client._engine, "add", lambda request, **options: None)
    client.submit(requests(client, "a"), told.put)
    assert "has lost 1 request" in ends(told, 1)["a"].error


@pytest.mark.parametrize("options", [{}, {"isolate": True}], ids=["thread", "child"])
def test_a_structure_by_hand(options):
    with LLM("tiny", n_slots=2, n_ctx=256, **options) as llm:
        params = SamplingParams(max_tokens=24, structured_outputs=Structure("json", {"type": "boolean"}))
        [output] = llm.generate(["Is it?"], params)
        assert output.text.strip() in ("true", "false")


# --- descriptors --------------------------------------------------------------------------------------------------

USED_UP = """
import os, resource, sys
from llamabatch import LLM, EngineError, SamplingParams

def use_up():
    most = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    try:
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return held

def free(held):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
    for fd in held:
        os.close(fd)
"""

ONE_PROCESS = (
    USED_UP
    + """
held = use_up()
try:
    LLM("tiny")
except EngineError as error:
    assert "could not be loaded: Too many open files" in str(error), error
free(held)
llm = LLM("tiny", n_slots=4, n_ctx=256)
held = use_up()
short = {"max_tokens": 4, "temperature": 0}
asked = [
    short,
    short | {"logprobs": 2, "prompt_logprobs": 1},
    short | {"n": 2, "best_of": 3, "temperature": 1, "stop": ["x"], "bad_words": ["b"]},
    short | {"mirostat": 2, "temperature": 1},
    short | {"dry_multiplier": 0.5, "xtc_probability": 0.5, "typical_p": 0.5},
    short | {"structured_outputs": {"choice": ["yes", "no"]}},
    short | {"structured_outputs": {"regex": "[a-z]+"}},
]
outputs = llm.generate(["Once upon a time"] * len(asked), asked, errors="return")
errors = [output.error for output in outputs]
assert errors[:-1] == [None] * (len(asked) - 1), errors
assert "child process, which cannot start: Too many open files" in errors[-1], errors  # it tries the regex out
assert len(llm.embed(["a text"])) == 1
assert llm.score("Once", [" upon"])[0].logprob < 0
conversation = [{"role": "user", "content": "Hi"}]
for call in (lambda: llm.chat(conversation, short), llm.monitor):  # each imports at its first use
    try:
        call()
    except EngineError as error:
        assert "could not be loaded: Too many open files" in str(error) and "/" not in str(error), error
    else:
        raise AssertionError("no descriptor was needed")
assert list(llm.stream("Once", short))[-1].finished.error is None
llm.stats()
from llamabatch.sampling import native
assert native.available() or "loaded" not in native.why_not(), native.why_not()
free(held)
assert llm.generate("Once", asked[-1])[0].error is None  # nothing is remembered of it
assert llm.chat(conversation, short)[0].error is None
llm.monitor()
llm.close()
print("well")
"""
)

CHILD = (
    USED_UP
    + """
import signal, time
from llamabatch import EngineClosedError
from llamabatch.client.process_client import ChildClient
from llamabatch.config import EngineConfig
from llamabatch.client.front_client import FrontClient
from llamabatch.client.restart_policy import RestartPolicy
policy = RestartPolicy(most=3, first_s=0.01, longest_s=0.5, retry_s=0.1)
llm = LLM.__new__(LLM)
llm._client = FrontClient(ChildClient(EngineConfig("tiny", n_slots=4, n_ctx=256), policy=policy))
wanted = llm.generate("Once", {"max_tokens": 4, "temperature": 0})[0].text
held = use_up()
os.kill(llm._client.pids[0], signal.SIGKILL)
[output] = llm.generate(["Once"], errors="return")
assert "times in a row" in output.error and "Too many open files" in output.error, output.error
for _ in range(3):  # each call is answered, at once or after one more try
    try:
        [output] = llm.generate(["Once"], errors="return")
        assert "Too many open files" in output.error, output.error
    except EngineClosedError as error:
        assert "another one is started" in str(error) and "Too many open files" in str(error), error
free(held)
deadline = time.monotonic() + 60
while True:
    try:
        [output] = llm.generate(["Once"], {"max_tokens": 4, "temperature": 0}, errors="return")
        assert output.error is None, output.error
        break
    except EngineClosedError as error:
        assert time.monotonic() < deadline, error
        time.sleep(0.1)
assert output.text == wanted
llm.close()
print("well")
"""
)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells which descriptors are there")
@pytest.mark.parametrize("program", [ONE_PROCESS, CHILD], ids=["thread", "child"])
def test_used_up_descriptors_end_nothing_for_good(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
