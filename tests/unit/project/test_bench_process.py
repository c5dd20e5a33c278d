"""Child programs of the benchmark: answers, failures, time limits, HTTP, and that nothing stays behind."""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
import pytest

from benchmarks.peers.client import HttpSession, _Stream
from benchmarks.process import PeerFailure, Program, neighbour
from benchmarks.workloads import Job
from tests.processes import Started
from tests.waiting import PATIENCE_S, until

ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"
SLEEP = "import time; time.sleep(60)"


def start(tmp_path, code, lines=True):
    return Program("a peer", [sys.executable, "-c", code], os.environ, tmp_path / "log", lines=lines)


def test_a_program_answers(tmp_path):
    program = start(tmp_path, ECHO)
    try:
        assert program.ask({"a": 1}, 20) == {"a": 1}
        with pytest.raises(PeerFailure, match="out of luck"):
            program.ask({"error": "out of luck"}, 20)
    finally:
        program.close()
    assert program.ended


def test_a_program_that_dies_says_how(tmp_path):
    program = start(tmp_path, "import os, sys; sys.stderr.write('no such instruction'); sys.stderr.flush(); os.abort()")
    with pytest.raises(PeerFailure, match="SIGABRT: no such instruction"):
        program.ask({}, 20)
    program.close()


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path):
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEP!r}]); {SLEEP}"
    program = start(tmp_path, code)
    pids = until(lambda: len(found := program.pids) == 2 and found)
    processes = [psutil.Process(pid) for pid in pids]
    with pytest.raises(PeerFailure, match=r"longer than 0\.1 s"):
        program.ask({}, 0.1)
    program.close()
    _, alive = psutil.wait_procs(processes, timeout=PATIENCE_S)
    assert alive == []


def test_the_neighbour_works_and_goes():
    started = Started()
    with neighbour(True, os.environ):
        [process] = started()
        until(lambda: sum(process.cpu_times()[:2]) > 0.02)
    assert not process.is_running()
    with neighbour(False, os.environ):
        assert started() == []


class Handler(BaseHTTPRequestHandler):
    """Answers as llama-server: one answer, or a line for each token and a summary. Calls on_token() before a token."""

    on_token = staticmethod(lambda: None)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(500 if body["prompt"] == [13] else 200)
        self.end_headers()
        if not body["stream"]:
            self.wfile.write(json.dumps({"tokens_predicted": body["n"]}).encode())
            return
        for at in range(body["n"]):
            self.on_token()
            try:
                self.wfile.write(b'data: {"content": "x", "tokens_predicted": %d}\n\n' % (at + 1))
                self.wfile.flush()
            except OSError:  # the client has left
                return
            time.sleep(0.02)
        self.wfile.write(b'data: {"stop": true, "tokens_predicted": %d}\n\ndata: [DONE]\n\n' % body["n"])

    def log_message(self, *args):
        pass


@pytest.fixture
def session(tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    program = start(tmp_path, SLEEP, lines=False)

    def payload(job, streamed):
        return {"prompt": job.prompt, "n": job.generate, "stream": streamed}

    yield HttpSession(program, server.server_address, "/", payload, lambda answer, job: answer["tokens_predicted"], {})
    program.close()
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_counts_tokens(session):
    jobs = [Job([1], n, 0.0, True) for n in (3, 5)]
    assert session.run(jobs, streamed=False, timeout_s=20).tokens == [3, 5]


def test_the_client_times_tokens_and_waits_for_arrivals(session):
    jobs = [Job([1], 4, 0.0, True), Job([1], 2, 0.1, False)]
    result = session.run(jobs, streamed=True, timeout_s=20)
    assert result.tokens == [4, 2]
    assert len(result.gaps_s) == 3
    assert all(gap > 0 for gap in result.gaps_s)  # on a busy machine two lines may come together
    assert sum(result.gaps_s) < result.wall_s
    assert result.wall_s > 0.1


def test_a_server_that_dies_in_a_stream_is_a_failure(session, monkeypatch):
    monkeypatch.setattr(Handler, "on_token", staticmethod(session.close))
    with pytest.raises(PeerFailure, match="SIGKILL"):
        session.run([Job([1], 3, 0.0, True)], streamed=True, timeout_s=20)


def test_the_client_passes_refusals_on(session):
    with pytest.raises(PeerFailure, match="HTTP 500"):
        session.run([Job([13], 1, 0.0, True)], streamed=False, timeout_s=20)


def test_endless_requests_are_left_when_the_others_have_ended(session):
    jobs = [Job([1], 10**6, 0.0, True, endless=True), Job([1], 5, 0.2, False)]
    result = session.run(jobs, streamed=True, timeout_s=30)
    assert result.tokens[0] < 10**6
    assert result.tokens[1] == 5
    endless, other = result.times_s
    assert len(endless) == result.tokens[0]
    assert 0 <= result.began_s[0] <= endless[0] < endless[0] + 0.2 <= result.began_s[1] < other[0]
    assert endless[-1] > result.began_s[1]


def test_an_endless_request_that_is_refused_holds_up_no_other(session):
    jobs = [Job([13], 2000, 0.0, True, endless=True), Job([1], 5, 0.0, False)]
    with pytest.raises(PeerFailure, match="HTTP 500"):
        session.run(jobs, streamed=True, timeout_s=30)


def test_tokens_whose_bytes_were_held_back_have_a_time_of_their_own():
    pieces = [(1.0, 1), (1.2, 2), (1.8, 5), (2.0, 6)]
    lines = [(seen_s, b'data: {"content": "x", "tokens_predicted": %d}\n' % count) for seen_s, count in pieces]
    assert _Stream(False, lines).token_times() == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    assert _Stream(False, [(1.0, b"data: {}"), (1.5, b"data: {}")]).token_times() == [1.0, 1.5]
