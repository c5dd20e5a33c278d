"""Programs that use an LLM in notebooks, event loops or forks, or do not close it, neither hang nor crash.

Each test runs a program of its own with a time limit, so that a hang or a crash fails only one test.
"""

import os
import subprocess
import sys
import textwrap
import threading

import pytest

from llamabatch import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
HEAD = """
    import asyncio, gc, os, sys, threading, time
    from llamabatch import LLM, EngineClosedError, SamplingParams
    gc.disable()  # no end waits for a collection
    SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
"""


def run(code, *, on_stdin=False, timeout=60):
    """Runs a program, and returns its output. It must end with code 0 and an empty stderr."""
    text = textwrap.dedent(HEAD) + textwrap.dedent(code)
    command = [sys.executable, "-W", "ignore", *(["-"] if on_stdin else ["-c", text])]
    done = subprocess.run(
        command, input=text if on_stdin else "", capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


# --- two LLMs at once ---------------------------------------------------------------------------------------------


def test_two_of_one_model_at_once(reference, assert_equal_by_the_rule):
    prompts = [f"Once upon a time there were {n}" for n in ("two cats", "five dogs", "many birds", "no fish")]
    wanted = reference.generate(prompts, GREEDY)
    got = [None] * 8
    with LLM("tiny", n_slots=2) as one, LLM("tiny", n_slots=4) as other:

        def ask(number):
            got[number] = (one, other)[number % 2].generate(prompts, GREEDY)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for outputs in got:
            assert_equal_by_the_rule(outputs, wanted, least=0.75)
        one.close()
        assert_equal_by_the_rule(other.generate(prompts, GREEDY), wanted, least=0.75)


# --- notebooks ----------------------------------------------------------------------------------------------------


def test_a_program_on_stdin():
    code = """
        llm = LLM("tiny", n_slots=2, isolate=True)
        print(len(llm.generate("x", SHORT)[0].token_ids))
    """
    assert run(code, on_stdin=True) == ["4"]


def test_cells_of_a_notebook():
    """A notebook has no file of __main__, but a running event loop. Its cells make new LLMs under the same name."""
    code = """
        cells = [
            "llm = LLM('tiny', n_slots=2)",
            "print(len(llm.generate('x', SHORT)[0].token_ids))",
            "llm = LLM('tiny', n_slots=2, isolate=True)",
            "print(len(llm.generate('x', SHORT)[0].token_ids))",
            "pieces = llm.stream('x', LONG); next(pieces)",
            "llm = LLM('tiny', n_slots=2)",
            "print(len(llm.chat([{'role': 'user', 'content': 'Hi'}], SHORT)[0].token_ids))",
        ]
        del sys.modules["__main__"]
        async def kernel():
            names = dict(LLM=LLM, SHORT=SHORT, LONG=LONG)
            for cell in cells:
                exec(cell, names)
                await asyncio.sleep(0)
        asyncio.run(kernel())
    """
    assert run(code) == ["4", "4", "4"]


def test_cells_with_await():
    """In a notebook's loop, an AsyncLLM is dropped with requests in flight, made again, and never closed."""
    code = """
        from llamabatch import AsyncLLM
        async def kernel():
            llm = AsyncLLM("tiny", n_slots=2)
            print(len((await llm.generate("x", SHORT))[0].token_ids))
            task = asyncio.create_task(llm.generate(["x"] * 4, LONG))
            while not (await llm.stats()).running:
                await asyncio.sleep(0.01)
            llm = AsyncLLM("tiny", n_slots=2)
            print(len((await llm.generate("x", SHORT))[0].token_ids))
            task.cancel()
            asyncio.create_task(llm.generate(["x"] * 4, LONG))
            while not (await llm.stats()).running:
                await asyncio.sleep(0.01)
        asyncio.run(kernel())
    """
    assert run(code) == ["4", "4"]


def test_made_anew_many_times():
    code = """
        for _ in range(25):
            llm = LLM("tiny", n_slots=2)
            llm.generate("x", SHORT)
        llm.close()
        del llm
        import llamabatch.utils.lifetime
        llamabatch.utils.lifetime.reap_collected()
        print(threading.active_count(), len(os.listdir("/proc/self/fd")) < 40 if os.path.exists("/proc") else True)
    """
    assert run(code) == ["1", "True"]


# --- not closed ---------------------------------------------------------------------------------------------------

FORGOTTEN = {
    "in flight": """
        pieces = LLM('tiny'OPTIONS).stream(['x'] * 3, LONG)
        next(pieces)
        del pieces
    """,
    "in flight at the end": """
        pieces = LLM('tiny'OPTIONS).stream(['x'] * 3, LONG)
        next(pieces)
    """,
    "in a cycle at the end": """
        class Holder: pass
        holder = Holder()
        holder.me, holder.llm = holder, LLM('tiny'OPTIONS)
        holder.pieces = holder.llm.stream('x', LONG)
        next(holder.pieces)
    """,
    "in a daemon thread at the end": """
        llm = LLM('tiny'OPTIONS)
        threading.Thread(target=llm.generate, args=(['x'] * 4, LONG), daemon=True).start()
        while not llm.stats().running:
            time.sleep(0.01)
    """,
    "in a thread at the end": """
        llm = LLM('tiny'OPTIONS)
        threading.Thread(target=lambda: llm.generate(['x'] * 4, SHORT)).start()
    """,
    "in a module at the end": """
        sys.keep = LLM('tiny'OPTIONS)
        sys.keep.generate('x', SHORT)
    """,
}


@pytest.mark.parametrize("options", [", n_slots=2", ", n_slots=2, isolate=True"], ids=["here", "isolated"])
@pytest.mark.parametrize("how", FORGOTTEN)
def test_forgotten(how, options):
    assert run(textwrap.dedent(FORGOTTEN[how]).replace("OPTIONS", options)) == []


def test_collected_in_the_middle_of_a_line_of_the_log():
    """A garbage collection may run while this thread has the lock of llama.cpp's log. The engine needs the same lock to
    log its end."""
    code = """
        import logging
        from llamabatch.llama import library, log
        logging.getLogger("llamabatch.llama_cpp").setLevel(logging.DEBUG)
        logging.getLogger("llamabatch.llama_cpp").addHandler(logging.NullHandler())
        llm = LLM("tiny", n_slots=2)
        llm.generate(["x", "y"], SHORT)
        with log._forwarder.lock:
            del llm
        LLM("tiny").close()
        print("over")
    """
    assert run(code) == ["over"]


# --- forks --------------------------------------------------------------------------------------------------------

if_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
IN_A_FORK = {
    "generate": "llm.generate('x', SHORT)",
    "generate ids": "llm.generate([5, 6, 7], SHORT)",
    "chat": "llm.chat([{'role': 'user', 'content': 'x'}], SHORT)",
    "stream": "next(llm.stream([5, 6], SHORT))",
    "go on with a stream": "list(pieces)",
    "tokenize": "llm.tokenize('x')",
    "stats": "llm.stats()",
}


@if_forks
@pytest.mark.parametrize("options", ["n_slots=2", "n_slots=4, instances=2", "isolate=True"])
def test_an_llm_in_a_fork_says_so(options):
    """In the fork, locks of the LLM may be locked by threads that the fork does not have."""
    code = f"""
        llm = LLM("tiny", {options})
        pieces = llm.stream(["x"] * 2, LONG)
        next(pieces)
        locks = [llm._client.model._lock]
        chain = [llm._client, llm._client.in_flight, llm._client.inner]
        queues = [c._commands for c in getattr(chain[-1], "_clients", chain[-1:]) if hasattr(c, "_commands")]
        locks += [q._lock for q in queues]
        locks += [c._lock for c in chain if hasattr(c, "_lock")]
        held, go_on = threading.Event(), threading.Event()
        def hold():
            for lock in locks: lock.acquire()
            held.set(); go_on.wait()
            for lock in locks: lock.release()
        threading.Thread(target=hold).start()
        held.wait()
        pid = os.fork()
        if pid == 0:
            for call in {list(IN_A_FORK.values())!r}:
                try:
                    eval(call)
                    print("went through:", call)
                except EngineClosedError as error:
                    assert "fork" in str(error), error
            llm.close()
            del llm, pieces
            sys.exit(0)  # with all that a normal end runs
        go_on.set()
        print(os.waitpid(pid, 0)[1])
        pieces.close()
        print(len(llm.generate("x", SHORT)[0].token_ids))
    """
    assert run(code) == ["0", "4"]


@if_forks
def test_a_pool_of_forks():
    code = """
        import multiprocessing
        llm = LLM("tiny", n_slots=2)
        def ask(number):
            try:
                return llm.generate("x", SHORT)[0].text
            except EngineClosedError:
                with LLM("tiny", n_slots=2, n_threads=2) as mine:
                    return mine.generate(["x"] * 3, SHORT)[0].text
        wanted = llm.generate("x", SHORT)[0].text
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(ask, range(4)) == [wanted] * 4
        print(llm.generate("x", SHORT)[0].text == wanted)
    """
    assert run(code) == ["True"]


@if_forks
def test_a_new_one_in_a_fork_needs_no_lock_of_the_parent():
    code = """
        from llamabatch.llama import extra_buffers as extra_bufts, library, log
        LLM("tiny", n_slots=2).close()
        with library._lock, log._forwarder.lock, extra_bufts._lock:
            pid = os.fork()
            if pid == 0:
                with LLM("tiny", n_slots=2) as llm:
                    os._exit(len(llm.generate("x", SHORT)[0].token_ids))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert run(code) == ["4"]


@if_forks
def test_gpus_are_refused_in_a_fork():
    code = """
        from llamabatch import EngineError
        from llamabatch.llama import library, log
        LLM("tiny", n_slots=2).close()
        library.gpu_names = lambda: ("a GPU",)
        pid = os.fork()
        if pid == 0:
            try:
                LLM("tiny", n_slots=2)
            except EngineError as error:
                os._exit(7 if "spawn" in str(error) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    """
    assert run(code) == ["7"]


@if_forks
def test_a_fork_keeps_no_child_program_alive():
    """The engine's process ends with the program that started it, even if a fork of the program still runs."""
    code = """
        import psutil, signal
        start, say = os.pipe()
        if os.fork() == 0:
            llm = LLM("tiny", isolate=True, n_slots=2)
            fork = os.fork()
            if fork == 0:
                time.sleep(60)
                os._exit(0)
            os.write(say, f"{llm._client.pids[0]} {fork}".encode())
            os.kill(os.getpid(), signal.SIGKILL)
        worker, fork = map(int, os.read(start, 100).split())
        os.wait()
        deadline = time.monotonic() + 50
        def alive():
            try:
                return psutil.Process(worker).status() != psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return False
        while alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        print(alive(), psutil.pid_exists(fork))
        os.kill(fork, signal.SIGKILL)
    """
    assert run(code) == ["False", "True"]
