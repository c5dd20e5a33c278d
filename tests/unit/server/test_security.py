"""The checks of Host, Origin, CORS and keys come before the body is read."""

import asyncio
import json

import pytest

from llamabatch.server.http.security import PUBLIC, secured
from llamabatch.server.options import ServerOptions

LOOPBACK = ("127.0.0.1", 8080)
OUTSIDE = ("10.0.0.5", 8080)
KEYED = ServerOptions(api_keys=["first-key", "second-key"])


class Reply:
    def __init__(self, messages):
        start = messages[0]
        self.status = start["status"]
        self.headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        body = b"".join(message.get("body", b"") for message in messages[1:])
        self.error = json.loads(body)["error"] if self.status >= 400 else None
        self.body = body


async def behind(scope, receive, send):
    """The application behind the checks: it reads the body, and answers 200."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def call(options, headers=(), path="/v1/models", method="GET", server=LOOPBACK, root_path=""):
    sent = []

    async def receive():
        assert options is not None
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": method, "path": root_path + path, "root_path": root_path, "server": server,
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers],
    }  # fmt: skip
    asyncio.run(secured(behind, options)(scope, receive, send))
    return Reply(sent)


@pytest.mark.parametrize(
    "header",
    [
        ("authorization", "Bearer first-key"),
        ("authorization", "bearer  second-key "),
        ("authorization", "second-key"),
        ("x-api-key", "second-key"),
    ],
)
def test_a_key_opens(header):
    assert call(KEYED, [header]).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", "Bearer ")],
        [("authorization", "Bearer")],
        [("authorization", "Basic first-key")],
        [("authorization", "Bearer first-key2")],
        [("authorization", "Bearer first-ke")],
        [("x-api-key", "")],
        [("x-api-key", "FIRST-KEY")],
        [("cookie", "first-key")],
        [("x-api-key", "\xff\xfe")],
    ],
)
def test_no_key_or_a_wrong_one_is_a_401_that_shows_none(headers):
    reply = call(KEYED, headers, method="POST")
    assert reply.status == 401
    assert reply.error["type"] == "authentication_error"
    assert reply.error["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"
    assert "first" not in reply.body.decode()
    assert reply.headers["connection"] == "close"  # the body that is not read may have any length


@pytest.mark.parametrize("path", [*PUBLIC, "/page/app.js"])
def test_public_paths_need_no_key(path):
    assert call(KEYED, path=path).status == 200
    assert call(KEYED, path=path, method="HEAD").status == 200
    assert call(KEYED, path=path, method="POST").status == 401
    assert call(KEYED, path=path, root_path="/llm").status == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/models", "/v1/chat/completions", "/slots", "/props", "/metrics", "/tokenize", "/lora-adapters", "/load"),
        *("//health", "/health/", "/health/../v1/models", "/page", "/pageant", "/v1/health/x", ""),
    ],
)
def test_every_other_path_needs_one(path):
    assert call(KEYED, path=path).status == 401
    assert call(KEYED, path=path, root_path="/health").status == 401


def test_metrics_can_be_open():
    assert call(ServerOptions(api_keys=["k"], metrics_without_key=True), path="/metrics").status == 200
    assert call(ServerOptions(api_keys=["k"], metrics_without_key=True), path="/metrics", method="POST").status == 401


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "app.localhost:3", "192.168.1.4:80", ""]
)
def test_names_of_this_machine_are_answered(host):
    assert call(ServerOptions(), [("host", host)] if host else []).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "localhost.evil.example:8080", "127.0.0.1.evil.example", "[evil]", "x:y"]
)
def test_another_name_on_loopback_is_a_403(host):
    reply = call(ServerOptions(), [("host", host)])
    assert (reply.status, reply.error["code"]) == (403, "host_not_allowed")
    assert "--allowed-host" in reply.error["message"]
    assert call(KEYED, [("host", host), ("x-api-key", "first-key")]).status == 403


def test_allowed_hosts():
    options = ServerOptions(allowed_hosts="LLM.example.com,*.lan")
    for host, status in (
        *(("llm.example.com", 200), ("llm.example.com:443", 200), ("Llm.Example.Com.", 200), ("a.b.lan", 200)),
        *(("lan", 403), ("evillan", 403), ("x.llm.example.com", 403), ("localhost", 200)),
    ):
        assert call(options, [("host", host)]).status == status, host
        assert call(options, [("host", host)], server=OUTSIDE).status == status, host
    assert call(ServerOptions(allowed_hosts="*"), [("host", "evil.example")]).status == 200


def test_elsewhere_hosts_are_not_checked_unless_named():
    for server in (OUTSIDE, ("/run/llm.sock", None), None):
        assert call(ServerOptions(), [("host", "anything.example")], server=server).status == 200


def test_two_hosts_are_refused():
    assert call(ServerOptions(), [("host", "localhost"), ("host", "evil.example")]).status == 400


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://localhost.evil.example", "http://[bad", "x"]
)
def test_a_foreign_page_is_refused_where_no_key_protects(origin):
    for server in (LOOPBACK, OUTSIDE, ("/run/llm.sock", None)):
        reply = call(ServerOptions(), [("host", "localhost:8080"), ("origin", origin)], method="POST", server=server)
        assert (reply.status, reply.error["code"]) == (403, "origin_not_allowed"), server
        assert "access-control-allow-origin" not in reply.headers
    given = [("host", "localhost:8080"), ("origin", origin), ("x-api-key", "first-key")]
    assert call(KEYED, given, method="POST", server=LOOPBACK).status == 403
    # a page without the key is refused anyway, and a page with the key is probably meant to use it
    assert call(KEYED, given, method="POST", server=OUTSIDE).status == 200


@pytest.mark.parametrize(
    "origin", ["http://localhost", "http://localhost:3000", "http://127.0.0.1:5173", "http://[::1]:3000"]
)
def test_pages_of_this_machine_may(origin):
    reply = call(ServerOptions(), [("host", "127.0.0.1:8080"), ("origin", origin)])
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == origin
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert reply.headers["vary"] == "Origin"
    assert "x-llamabatch-ignored" in reply.headers["access-control-expose-headers"]


def test_the_servers_own_page_may_anywhere():
    given = [("host", "llm.example.com"), ("origin", "https://llm.example.com")]
    assert call(ServerOptions(), given, method="POST", server=OUTSIDE).status == 200
    assert call(ServerOptions(cors_origins=[]), given, method="POST", server=OUTSIDE).status == 200
    assert call(ServerOptions(), given, method="POST", server=LOOPBACK).status == 403  # DNS rebinding


def preflight(options, origin, headers="authorization, content-type", **more):
    given = [("host", "127.0.0.1:8080"), ("origin", origin), ("access-control-request-method", "POST")]
    given += [("access-control-request-headers", headers)] if headers else []
    return call(options, given + more.pop("more", []), method="OPTIONS", **more)


def test_a_preflight_needs_no_key():
    reply = preflight(KEYED, "http://localhost:3000")
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert reply.headers["access-control-allow-methods"] == "GET, POST, DELETE, OPTIONS"
    assert reply.headers["access-control-allow-headers"] == "authorization, content-type"
    assert call(KEYED, [("host", "localhost")], method="OPTIONS").status == 401  # not a preflight


def test_a_preflight_of_a_foreign_origin_is_answered_without_leave():
    reply = preflight(KEYED, "https://evil.example")
    assert reply.status == 200
    assert "access-control-allow-origin" not in reply.headers
    assert reply.headers["access-control-allow-headers"] == "*"


def test_any_origin_never_goes_with_credentials():
    options = ServerOptions(cors_origins="*")
    for reply in (preflight(options, "https://any.example"), call(options, [("origin", "https://any.example")])):
        assert reply.status == 200
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers


def test_named_origins_with_and_without_credentials():
    options = ServerOptions(cors_origins="https://app.example", cors_headers="content-type", cors_methods="POST")
    reply = preflight(options, "https://app.example")
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert reply.headers["access-control-allow-headers"] == "content-type"
    assert reply.headers["access-control-allow-methods"] == "POST"
    assert call(options, [("origin", "http://localhost:3000")]).status == 403
    without = ServerOptions(cors_origins="https://app.example", cors_credentials=False)
    assert "access-control-allow-credentials" not in preflight(without, "https://app.example").headers


def test_errors_can_be_read_by_allowed_pages():
    reply = call(KEYED, [("host", "localhost"), ("origin", "http://localhost:3000")], method="POST")
    assert reply.status == 401
    assert reply.headers["access-control-allow-origin"] == "http://localhost:3000"


def test_a_page_may_reach_into_the_private_network_if_it_is_allowed():
    asked = [("access-control-request-private-network", "true")]
    allowed = preflight(ServerOptions(cors_origins="https://app.example"), "https://app.example", more=asked)
    assert allowed.headers["access-control-allow-private-network"] == "true"
    assert (
        "access-control-allow-private-network"
        not in preflight(ServerOptions(), "https://x.example", more=asked).headers
    )


def test_web_sockets_are_closed():
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(secured(behind, KEYED)({"type": "websocket", "headers": [], "path": "/"}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]
