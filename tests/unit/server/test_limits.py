"""Bounds on what clients send, in bytes and in seconds, over real sockets."""

import asyncio
import contextlib
import json
import logging
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import uvicorn

from llamabatch.server.http import middleware, protocol
from llamabatch.server.http.body_limits import BodyLimits
from llamabatch.server.http.counts import NO_ROUTE, OTHER_METHOD, HttpCounts
from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.logs import _is_of_use
from llamabatch.server.http.middleware import RefusesReadably
from llamabatch.server.http.protocol import BoundedProtocol, MalformedLog, bounded
from llamabatch.server.http.request_log import RequestLog
from llamabatch.server.options import ServerOptions
from tests.waiting import PATIENCE_S, until


async def echo(scope, receive, send):
    """Answers with the body's number of bytes. /early answers before it reads, /endless until the client leaves."""
    if scope["path"] == "/endless":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        with contextlib.suppress(OSError):
            while (await _polled(receive)) is None:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
        scope["state"]["left"].set()
        return
    size, more = 0, scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        size += len(message["body"])
        more = message["more_body"]
    body = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


async def _polled(receive):
    task = asyncio.ensure_future(receive())
    done, _ = await asyncio.wait({task}, timeout=0.001)
    if not done:
        task.cancel()
        return None
    message = task.result()
    return None if message["type"] == "http.request" else message


class Running:
    """Runs uvicorn with the bounded protocol in a thread."""

    def __init__(self, app=echo, **options):
        self.options, self.counts = ServerOptions(**options), HttpCounts()
        self.left = threading.Event()

        async def with_state(scope, receive, send):
            scope["state"] = {"left": self.left}
            await app(scope, receive, send)

        config = uvicorn.Config(
            with_state,
            http=bounded(self.options, self.counts),
            port=0,
            log_config=None,
            lifespan="off",
            access_log=False,
        )
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.server.started)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self.server.force_exit = True
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)


def reply(sock):
    """Reads one response by its content-length. Returns status and body; status None: the server closed early."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = sock.recv(65536)
        if not part:
            return None, data
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    while len(body) < length:
        body += sock.recv(65536)
    return int(head[9:12]), body


def is_refused(sock):
    """Returns True if the server no longer accepts bytes."""
    try:
        sock.sendall(b"a")
    except OSError:
        return True


def test_a_request_passes_and_the_connection_is_kept():
    with Running() as server, server.connect() as sock:
        for size in (0, 5, 300_000):
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size + b"x" * size)
            assert reply(sock) == (200, str(size).encode())


def test_pipelined_requests_are_answered_in_order():
    with Running(header_timeout_s=0.3, body_timeout_s=0.3) as server, server.connect() as sock:
        one = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        sock.sendall(b"".join(one % n + b"y" * n for n in (1, 2, 3)))
        assert [reply_one(sock) for _ in range(3)] == [b"1", b"2", b"3"]


def reply_one(sock):
    """Returns the body, of one character, of the next response."""
    data = b""
    while not data.endswith(b"\r\n\r\n"):
        data += sock.recv(1)
    return sock.recv(1)


@pytest.mark.parametrize("first", [b"", b"G", b"GET / HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_head_that_does_not_end_is_ended(first):
    with Running(header_timeout_s=0.05, keep_alive_s=75 if first else 0.05) as server, server.connect() as sock:
        sock.sendall(first)
        status, body = reply(sock)
        assert status == (408 if first else None)
        assert not first or "took more than 0.05 s" in json.loads(body)["error"]["message"]


def test_the_head_of_a_request_behind_a_busy_one_is_bounded_too():
    begun = threading.Event()

    async def busy(scope, receive, send):
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    with Running(busy, header_timeout_s=0.05) as server, server.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert begun.wait(PATIENCE_S)
        sock.sendall(b"GET / HTTP/1.1\r\nHo")
        status, body = reply(sock)
        assert status == 408
        assert "head" in json.loads(body)["error"]["message"]


def test_a_byte_now_and_then_does_not_help():
    with Running(header_timeout_s=0.05, max_header_bytes=2**24) as server, server.connect() as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nX-Slow: ")
        until(lambda: is_refused(sock))


def test_a_body_that_does_not_come_is_ended_and_the_application_is_told_at_once():
    told, over = [], threading.Event()

    async def tells(scope, receive, send):
        while not told or told[-1]["type"] != "http.disconnect":
            told.append(await receive())
        over.set()

    with Running(tells, body_timeout_s=0.05) as server, server.connect() as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome")
        status, body = reply(sock)
        assert status == 408
        assert "body" in json.loads(body)["error"]["message"]
        assert sock.recv(1) == b""
        assert over.wait(PATIENCE_S)
        # an empty part of the body in between would make the application continue and write after the 408
        assert [(message["type"], message.get("body")) for message in told] == [
            ("http.request", b"some"), ("http.disconnect", None),
        ]  # fmt: skip


def test_a_body_that_does_not_come_holds_up_no_end_of_the_server():
    begun = threading.Event()

    async def waits(scope, receive, send):
        begun.set()
        await echo(scope, receive, send)

    with Running(waits, body_timeout_s=86_400) as server, server.connect() as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome")
        assert begun.wait(PATIENCE_S)
        server.server.should_exit = True
        status, body = reply(sock)
        assert status == 503
        assert "shutting down" in json.loads(body)["error"]["message"]
        server.thread.join(PATIENCE_S)
        assert not server.thread.is_alive()


def test_a_body_that_comes_fast_enough_may_take_longer(monkeypatch):
    monkeypatch.setattr(protocol, "_LEAST_RATE", 1)
    over, on_timeout = threading.Event(), BoundedProtocol._on_timeout
    monkeypatch.setattr(BoundedProtocol, "_on_timeout", lambda self: (on_timeout(self), over.set()))
    with Running(body_timeout_s=0.05) as server, server.connect() as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 65536\r\n\r\n" + b"x" * 8192)
        assert over.wait(PATIENCE_S)
        sock.sendall(b"x" * 57344)
        assert reply(sock) == (200, b"65536")


def test_a_body_behind_an_early_answer_is_bounded_too():
    with Running(body_timeout_s=0.05) as server, server.connect() as sock:
        sock.sendall(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert reply(sock)[0] == 200
        until(lambda: is_refused(sock))


def test_an_idle_connection_is_closed_and_a_used_one_waits_anew():
    with Running(keep_alive_s=0.4) as server, server.connect() as idle:
        assert until(lambda: seconds_after_use(server)) > 0.39
        assert idle.recv(1) == b""


def seconds_after_use(server):
    """Returns the seconds that a connection stays open after its use, or 0 if this test was too slow to use it."""
    with server.connect() as sock, contextlib.suppress(ConnectionError):
        time.sleep(0.2)
        used = time.monotonic()
        sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        if reply(sock)[0] == 200:
            assert sock.recv(1) == b""
            return time.monotonic() - used
    return 0


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nX: " + b"a" * 5000,
        b"GET /" + b"a" * 5000,
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 20 + b"\r\n",
    ],
)
def test_a_large_head_is_a_431(head):
    with Running(max_header_bytes=4096, max_headers=16) as server, server.connect() as sock:
        sock.sendall(head)
        status, body = reply(sock)
        assert status == 431
        assert until(server.counts.responses) == {(NO_ROUTE, OTHER_METHOD, 431): 1}
        assert json.loads(body)["error"]["code"] == "headers_too_large"


def test_many_trailers_count_as_headers():
    with Running(max_header_bytes=4096, max_headers=16) as server, server.connect() as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n")
        sock.sendall(b"A: b\r\n" * 20 + b"\r\n")
        assert reply(sock)[0] == 431


def test_one_line_tells_of_all_requests_of_a_second_that_are_no_http(caplog, monkeypatch):
    seen = []
    monkeypatch.setattr(MalformedLog, "add", lambda self, loop: seen.append(loop))
    with Running(max_headers=8) as server:
        tls, large = b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20
        for sent, status in ((tls, 400), (large, 431)):
            with server.connect() as sock:
                sock.sendall(sent)
                assert reply(sock)[0] == status
    assert len(seen) == 1  # our own refusal is not logged here
    monkeypatch.undo()
    caplog.set_level(logging.INFO, "llamabatch")
    log, later = MalformedLog(), []
    loop = SimpleNamespace(call_later=lambda seconds, call: later.append((seconds, call)))
    for _ in range(5):
        log.add(loop)
    [(seconds, write)] = later
    write()
    assert (seconds, "5 requests within a second" in caplog.text) == (1.0, True)
    log.add(loop)
    assert len(later) == 2


def test_lines_of_uvicorn_that_are_of_no_use_are_left_out():
    texts = ("Invalid HTTP request received.", "Unsupported upgrade request.", "No supported WebSocket library", "Else")
    records = [logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, text, (), None) for text in texts]
    assert [_is_of_use(record) for record in records] == [False, False, False, True]


async def in_parts(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in (b"one ", b"two ", b"three"):
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_its_connection():
    with Running(in_parts) as server:
        for version, method in (("1.0", "GET"), ("1.0", "HEAD"), ("1.1", "GET")):
            with server.connect() as sock:
                sock.sendall(f"{method} / HTTP/{version}\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
                data = b""
                while part := sock.recv(65536):
                    data += part
            head, _, body = data.partition(b"\r\n\r\n")
            assert (b"transfer-encoding" in head) == (version == "1.1")
            assert b"connection: close" in head
            if version == "1.0":
                assert body == (b"one two three" if method == "GET" else b"")
    with Running() as server, server.connect() as sock:
        sock.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert reply(sock) == (200, b"0")


def test_connections_are_bounded_and_places_come_back():
    with Running(max_connections=3) as server:
        held = [server.connect() for _ in range(3)]
        for sock in held:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert reply(sock)[0] == 200
        with server.connect() as late:
            status, body = reply(late)
            assert status == 503
            assert "3 connections" in json.loads(body)["error"]["message"]
        held.pop().close()

        def is_served():
            with server.connect() as again, contextlib.suppress(ConnectionError):
                again.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                return reply(again)[0] == 200

        until(is_served)
        for sock in held:
            sock.close()


def test_a_reader_that_sleeps_loses_its_request():
    with Running(write_timeout_s=0.05) as server, server.connect() as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        assert server.left.wait(PATIENCE_S)


def test_a_reader_that_reads_keeps_it(monkeypatch):
    timers, pause = [], BoundedProtocol.pause_writing
    monkeypatch.setattr(BoundedProtocol, "pause_writing", lambda self: (pause(self), timers.append(self._write_timer)))
    with Running(write_timeout_s=86_400) as server, server.connect() as sock:
        sock.sendall(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
        for _ in range(3):
            timer = until(lambda: timers and timers.pop())
            while not timer.cancelled():
                assert sock.recv(2**20)
        assert not server.left.is_set()


def limited(**limits):
    async def app(scope, receive, send):
        try:
            await echo(scope, receive, send)
        except ApiError as error:  # Starlette's handlers do this, too
            await error.response()(scope, receive, send)

    return BodyLimits(app, **limits)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_a_413_with_and_without_a_length(chunked):
    app = limited(max_bytes=100_000, max_total_bytes=10**9)
    with Running(app) as server, server.connect() as sock:
        if chunked:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
            sock.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
            with contextlib.suppress(OSError):
                for _ in range(30):
                    sock.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
                    time.sleep(0.001)
        else:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100001\r\n\r\n")
        status, body = reply(sock)
        assert status == 413
        assert "100,000 bytes" in json.loads(body)["error"]["message"]
    assert app.n_bytes == 0


@pytest.mark.parametrize("declared", [b"Content-Length: 20000000", b"Transfer-Encoding: chunked"])
def test_a_client_that_sends_all_before_it_reads_gets_the_refusal(declared):
    app = RefusesReadably(limited(max_bytes=1000, max_total_bytes=10**9))
    with Running(app) as server, server.connect() as sock:
        whole = b"x" * 20_000_000
        body = whole if b"Length" in declared else b"%x\r\n%s\r\n0\r\n\r\n" % (len(whole), whole)
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\n%s\r\n\r\n" % declared + body)
        assert reply(sock)[0] == 413
        assert sock.recv(1) == b""


def test_a_client_that_waits_for_leave_sends_nothing(monkeypatch):
    monkeypatch.setattr(middleware, "_DROPS_S", 600)
    app = RefusesReadably(limited(max_bytes=1000, max_total_bytes=10**9))
    with Running(app) as server, server.connect() as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2000\r\n\r\n")
        assert reply(sock)[0] == 413
        assert sock.recv(1) == b""  # otherwise a TimeoutError


def test_what_comes_after_a_refusal_is_taken_in_for_a_while_only(monkeypatch):
    monkeypatch.setattr(middleware, "_DROPS_S", 0.1)
    app = RefusesReadably(limited(max_bytes=1000, max_total_bytes=10**9))
    with Running(app) as server, server.connect() as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n")
        assert reply(sock)[0] == 413
        assert sock.recv(1) == b""  # otherwise a TimeoutError


def test_what_comes_after_a_refusal_counts_as_no_time_of_the_request(monkeypatch):
    monkeypatch.setattr(middleware, "_DROPS_S", 600)
    counts = HttpCounts()
    app = RefusesReadably(RequestLog(limited(max_bytes=1000, max_total_bytes=10**9), counts))
    with Running(app) as server, server.connect() as sock:
        sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\n\r\n")
        assert reply(sock)[0] == 413
        # the socket is still open
        assert until(lambda: [each.count for each in counts.durations().values() if each.count]) == [1]


def test_a_body_of_the_limit_passes_and_paths_may_have_their_own():
    app = limited(max_bytes=1000, max_total_bytes=10**9, by_path={"/files": 5000})
    with Running(app) as server, server.connect() as sock:
        for path, size, status in ((b"/", 1000, 200), (b"/files", 5000, 200), (b"/", 1001, 413)):
            sock.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path, size) + b"x" * size)
            assert reply(sock)[0] == status


def test_bodies_together_are_bounded_and_their_bytes_come_back():
    app = limited(max_bytes=10_000, max_total_bytes=15_000)
    with Running(app) as server, server.connect() as first, server.connect() as second:
        first.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n" + b"x" * 9000)
        until(lambda: app.n_bytes >= 9000)
        second.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n" + b"x" * 9000)
        assert reply(second)[0] == 503
        first.sendall(b"x" * 1000)
        assert reply(first) == (200, b"10000")
        with server.connect() as third:
            third.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n" + b"x" * 9000)
            assert reply(third)[0] == 200
    assert app.n_bytes == 0


def test_bytes_come_back_when_a_client_leaves_in_the_middle():
    app = limited(max_bytes=10_000, max_total_bytes=15_000)
    with Running(app) as server:
        with server.connect() as sock:
            sock.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10000\r\n\r\n" + b"x" * 9000)
            until(lambda: app.n_bytes >= 9000)
        until(lambda: not app.n_bytes)


ASK = b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n"


async def late(scope, receive, send):
    """Answers once a test sets `left`. Sets it itself, and does not answer, if the client leaves earlier."""
    message = await receive()
    go_on = scope["state"]["left"]
    while not go_on.is_set():
        message = await _polled(receive)
        if message is not None and message["type"] == "http.disconnect":
            go_on.set()
            return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_a_client_that_sends_no_more_has_its_answer():
    with Running(late) as server, server.connect() as sock:
        sock.sendall(ASK % b"")
        sock.shutdown(socket.SHUT_WR)
        processing = b"HTTP/1.1 102 Processing\r\n\r\n"
        assert sock.recv(len(processing), socket.MSG_WAITALL) == processing
        server.left.set()
        data = b"".join(iter(lambda: sock.recv(65536), b""))  # the server closes the connection after the answer
        *_, head, body = data.replace(processing, b"").split(b"\r\n\r\n")
        assert (head[:15], body) == (b"HTTP/1.1 200 OK", b"ok")
        assert b"connection: close" in head


def test_a_client_that_has_left_is_noticed():
    with Running(late) as server:
        with server.connect() as sock:
            sock.sendall(ASK % b"")
            until(lambda: server.server.server_state.tasks)
        until(server.left.is_set)
