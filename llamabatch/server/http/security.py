"""Plain ASGI middlewares that check a caller before the body is read: Host, Origin with CORS, and keys.

The checks prevent DNS rebinding: a web page can let its own host name resolve to 127.0.0.1 and then talk to a local
server as if it were the page's own server. Host and Origin reveal such a page. Keys protect a server on other
addresses, because the page has no key.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from llamabatch.server.http.errors import ApiError
from llamabatch.server.http.keys import SCOPE_KEY, KeyRing, key_use
from llamabatch.server.options import ANY, LOCALHOST, ServerOptions, is_ip, is_loopback
from llamabatch.utils.checks import show

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# GET and HEAD need no key for these paths: health, the OpenAPI document, the page and its files.
PUBLIC = ("/", "/health", "/v1/health", "/livez", "/readyz", "/ping", "/openapi.json", "/favicon.ico")
PUBLIC_FOLDER = "/page/"
METRICS = "/metrics"
_EXPOSED = b"x-llamabatch-ignored, x-request-id, retry-after"  # pages may read these response headers
_PREFLIGHT_S = b"600"  # a browser may reuse the answer to a preflight for this many seconds
_POLICY_VIOLATION = 1008  # close code of a WebSocket (RFC 6455, 7.4.1)


def secured(app: App, options: ServerOptions, keys: KeyRing | None = None) -> App:
    """Adds checks to an application, as the options require.

    Args:
        keys: the key ring for the check. The caller may read or replace its keys later. None: a ring of options.keys.
    """
    if options.api_keys:
        keys = KeyRing(options.keys) if keys is None else keys
        app = KeyCheck(app, keys, metrics=not options.metrics_without_key)
    return HostCheck(Cors(app, options), options.allowed_hosts)


class HostCheck:
    """Refuses requests (403) whose Host header has the name of another host.

    A connection to a loopback address must name this machine, an IP address, or one of `allowed`. Other connections are
    checked only if `allowed` has names. A request without Host does not come from a browser and passes.

    Args:
        allowed: lower-case names without a port; `*.example.com` allows all names below it, `*` any name.
    """

    def __init__(self, app: App, allowed: Iterable[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # the server has no WebSockets
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        if scope["type"] == "http":
            given = [value for name, value in scope["headers"] if name == b"host"]
            if len(given) > 1:
                await _refuse(ApiError(400, f"the request has {len(given)} Host headers; send one"), scope, send)
                return
            host = given[0].decode("latin-1") if given else ""
            if host and not self._admits(_without_port(host), scope):
                message = (
                    f"this server does not answer for the host {show(host)}; start it with --allowed-host "
                    "and that name if it is meant"
                )
                await _refuse(ApiError(403, message, code="host_not_allowed"), scope, send)
                return
        await self._app(scope, receive, send)

    def _admits(self, name: str, scope: Scope) -> bool:
        if not self._allowed and not on_loopback(scope):
            return True
        if ANY in self._allowed or is_loopback(name) or is_ip(name):  # DNS rebinding needs a name
            return True
        return name in self._allowed or any(
            pattern.startswith("*.") and name.endswith(pattern[1:]) for pattern in self._allowed
        )


class Cors:
    """Answers CORS preflights, lets pages of allowed origins read responses, and refuses other origins (403).

    An origin is allowed if it is the same as Host, is among `cors_origins`, or is on this machine and `localhost` is
    among `cors_origins`. Other origins are refused if the server has no keys or the connection is to a loopback
    address. A request without Origin passes: from a foreign page it can only be a GET or HEAD, and the page cannot
    read the response.
    """

    def __init__(self, app: App, options: ServerOptions) -> None:
        self._app = app
        self._origins = frozenset(options.cors_origins)
        self._any = ANY in self._origins
        self._credentials = bool(options.cors_credentials)
        self._methods = ", ".join(options.cors_methods).encode()
        self._headers = ", ".join(options.cors_headers).encode()
        self._has_keys = bool(options.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope["headers"] if scope["type"] == "http" else ()
        origin = _header(headers, b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        text = origin.decode("latin-1")
        is_same = self._is_same(text, headers)
        is_allowed = is_same or self._allows(text)
        added = self._response_headers(origin) if is_allowed else []
        if scope["method"] == "OPTIONS" and _header(headers, b"access-control-request-method") is not None:
            await self._answer_preflight(added, headers, send)
            return
        if not is_allowed and (not self._has_keys or on_loopback(scope)):
            message = (
                f"pages of {show(text)} may not use this server; start it with --cors-origins and that origin if they "
                "are meant to"
            )
            await _refuse(ApiError(403, message, code="origin_not_allowed"), scope, send)
            return

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *added, (b"vary", b"Origin")]
            await send(message)

        await self._app(scope, receive, send_with)

    def _allows(self, origin: str) -> bool:
        if self._any or origin.lower() in self._origins:
            return True
        return LOCALHOST in self._origins and is_loopback(_origin_host(origin))

    @staticmethod
    def _is_same(origin: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        host = _header(headers, b"host")
        return host is not None and bool(host) and origin.lower().partition("://")[2] == host.decode("latin-1").lower()

    def _response_headers(self, origin: bytes) -> list[tuple[bytes, bytes]]:
        found = [(b"access-control-allow-origin", b"*" if self._any else origin)]
        found.append((b"access-control-expose-headers", _EXPOSED))
        if self._credentials:
            found.append((b"access-control-allow-credentials", b"true"))
        return found

    async def _answer_preflight(
        self, added: list[tuple[bytes, bytes]], headers: Iterable[tuple[bytes, bytes]], send: Send
    ) -> None:
        """Answers a preflight. Without `access-control-allow-origin` in `added`, the browser sends no request."""
        requested = _header(headers, b"access-control-request-headers")
        # "*" does not cover Authorization and has no effect with credentials (Fetch, CORS protocol), so the answer
        # names the requested headers instead.
        allowed = requested if self._headers == b"*" and requested and added else self._headers
        answer = [
            *added,
            (b"access-control-allow-methods", self._methods),
            (b"access-control-allow-headers", allowed),
            (b"access-control-max-age", _PREFLIGHT_S),
            (b"vary", b"Origin, Access-Control-Request-Headers"),
            (b"content-length", b"0"),
        ]
        if added and _header(headers, b"access-control-request-private-network") == b"true":
            answer.append((b"access-control-allow-private-network", b"true"))
        await send({"type": "http.response.start", "status": 200, "headers": answer})
        await send({"type": "http.response.body", "body": b""})


class KeyCheck:
    """Refuses requests without a valid key (401) and POST requests above the limits of their key (429).

    A key is a bearer token or the header x-api-key. Public paths need no key.

    Args:
        metrics: True if /metrics needs a key.
    """

    def __init__(self, app: App, keys: KeyRing, metrics: bool = True) -> None:
        self._app = app
        self._keys = keys
        self._public = frozenset(PUBLIC if metrics else (*PUBLIC, METRICS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_public(scope):
            given = _keys(scope["headers"])
            use = self._keys.find(given)
            if use is None:
                message = "the key is wrong" if given else "the request has no key"
                advice = "send Authorization: Bearer with a key of this server, or x-api-key"
                error = ApiError(
                    401,
                    f"{message}; {advice}",
                    type="authentication_error",  # llama-server's and Anthropic's type; the code is OpenAI's
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await _refuse(error, scope, send)
                return
            scope.get(SCOPE_KEY, []).append(use.key.name)
            if scope["method"] == "POST":
                try:
                    use.enter()
                except ApiError as error:
                    await _refuse(error, scope, send)
                    return
            key_use.set(use)
        await self._app(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        path = own_path(scope)
        return scope["method"] in ("GET", "HEAD") and (path in self._public or path.startswith(PUBLIC_FOLDER))


def own_path(scope: Mapping[str, Any], prefix: str = "") -> str:
    """Returns the path without the root path, for comparison with routes.

    Args:
        prefix: another prefix to remove.
    """
    path = str(scope["path"])
    for root in (str(scope.get("root_path", "")), prefix):
        path = path[len(root) :] if root and f"{path}/".startswith(f"{root}/") else path
    return path


def on_loopback(scope: Scope) -> bool:
    """True if the connection is to a loopback address. False for a UNIX socket, which no page can reach."""
    server = scope.get("server")
    return server is not None and server[1] is not None and is_loopback(str(server[0]))


def _keys(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    found = []
    for name, value in headers:
        if name in (b"authorization", b"x-api-key"):
            scheme, _, rest = value.strip().partition(b" ")
            # llama-server accepts both headers with and without "Bearer"
            found.append(rest.strip() if scheme.lower() == b"bearer" and rest else value.strip())
    return found


def _header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    return next((value for name, value in headers if name == wanted), None)


def _without_port(host: str) -> str:
    """Returns the name or address in a Host header, in lower case."""
    text = host.strip().lower()
    if text.startswith("["):
        return text.partition("]")[0][1:]
    return text.partition(":")[0].rstrip(".")


def _origin_host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


async def _refuse(error: ApiError, scope: Scope, send: Send) -> None:
    """Sends an error. Closes the connection if the request may have a body, because the body may be long."""
    if scope["method"] not in ("GET", "HEAD"):
        error.headers["Connection"] = "close"
    response = error.response(scope)
    await response(scope, _nothing, send)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}
