"""The server as a program: uvicorn on our sockets, with a graceful shutdown.

When uvicorn ends, it first stops accepting connections. A load balancer could then not learn that the server is
draining. Therefore the first signal only drains the Serving, and uvicorn ends after that. Meanwhile /readyz answers
503. A second signal ends the process at once, and the engine's child process with it. Several signals within a second
count as one: `timeout`, `npm` and `uv run` send a signal to the process and to its group, so the signal arrives twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, SetupError
from llamabatch.server.options import ServerOptions
from llamabatch.server.serving.serving import Serving

try:
    import uvicorn
    from uvicorn.config import create_ssl_context
except ImportError as error:
    raise SetupError(f'the server needs the extra: pip install "llamabatch[server]" ({error})') from error

from starlette.applications import Starlette

from llamabatch.server.application import make_app, make_pool_app
from llamabatch.server.http.file_watch import watch
from llamabatch.server.http.protocol import allow_open_files, bounded
from llamabatch.server.pool.model_pool import ModelPool
from llamabatch.server.pool.options import LookAgain, ModelSpec, PoolOptions
from llamabatch.utils import interrupts, system
from llamabatch.utils.checks import show

_FLUSH_S = 5  # seconds to send the last bytes of responses, after all requests have ended
_BACKLOG = 2048
_TURN_S = 0.001
_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name)]


def serve(
    config: EngineConfig,
    options: ServerOptions,
    started: Callable[[list[str]], None] | None = None,
    ready: Callable[[float], None] | None = None,
) -> None:
    """Serves until a signal has come and the running requests have ended.

    Args:
        started: called when connections are accepted, with the URLs; the model may still be loading.
        ready: called when requests are accepted, with the seconds since the call of `serve`.

    Raises:
        ConfigError: the server cannot listen on an address, or cannot use a TLS file. The errors of the load are raised
            as well.
    """
    _run(lambda: make_app(config, options), options, started, ready)


def serve_several(
    models: Sequence[ModelSpec],
    options: ServerOptions,
    pool_options: PoolOptions,
    started: Callable[[list[str]], None] | None = None,
    look_again: LookAgain | None = None,
) -> None:
    """Serves several models as `serve` serves one. Models with on_startup are loaded at the start. Any other model is
    loaded by the first request that names the model.

    Args:
        look_again: as for make_pool_app.
    """
    _run(lambda: make_pool_app(models, options, pool_options, look_again=look_again), options, started)


def _run(
    make: Callable[[], Starlette],
    options: ServerOptions,
    started: Callable[[list[str]], None] | None = None,
    ready: Callable[[float], None] | None = None,
) -> None:
    began = time.perf_counter()
    allow_open_files(options.max_connections)
    check_tls(options)
    sockets = listen(options)
    try:
        application = make()
        serving: Serving | ModelPool = application.state.serving
        server = DrainingServer(uvicorn_config(application, options), serving, options.drain_s)
        if started is not None:
            server.on_started = lambda: started(urls(sockets, options))
        if ready is not None:
            server.on_ready = lambda: ready(time.perf_counter() - began)
        with server.handling_signals(), _short_turns():
            server.run(sockets=sockets)
            serving.close()  # in case the lifespan has not closed it
    finally:
        for each in sockets:
            each.close()
        for path in options.sockets:
            with contextlib.suppress(OSError):
                os.unlink(path)
    if serving.load_error is not None:
        raise serving.load_error
    if serving.is_loading:  # the thread that loads the model cannot be stopped
        sys.stderr.flush()
        os._exit(0)


@contextlib.contextmanager
def _short_turns() -> Iterator[None]:
    """Shortens Python's switch interval from 5 ms to 1 ms, so that the event loop gets the interpreter lock sooner. The
    loop releases the lock at each system call, and one response needs several system calls."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def check_tls(options: ServerOptions) -> None:
    """Raises ConfigError for TLS files that cannot be read, are invalid, or do not belong together."""
    names = [name for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs") if getattr(options, name) is not None]
    for name in names:
        path = getattr(options, name)
        try:
            with open(path, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ConfigError(f"{name} {show(path)} cannot be read: {error.strerror}") from error
    if not names:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pair = f"ssl_certfile {show(options.ssl_certfile)} and ssl_keyfile {show(options.ssl_keyfile)}"
    try:
        context.load_cert_chain(str(options.ssl_certfile), options.ssl_keyfile, _refuse_passphrase)
        if options.ssl_ca_certs is not None:
            pair = f"ssl_ca_certs {show(options.ssl_ca_certs)}"
            context.load_verify_locations(options.ssl_ca_certs)
    except OSError as error:  # also ssl.SSLError, a subclass
        reason = getattr(error, "reason", None) or error.strerror or "it is no file of PEM"
        raise ConfigError(f"{pair} cannot be used: {str(reason).replace('_', ' ').lower()}") from error


def _refuse_passphrase() -> str:
    raise ConfigError(
        "the key in ssl_keyfile is encrypted, and a server cannot ask for its passphrase; give one without, as "
        "openssl pkey -in KEY -out PLAIN writes it"
    )


def uvicorn_config(application: Any, options: ServerOptions) -> uvicorn.Config:
    """Returns uvicorn's configuration for our options."""
    return uvicorn.Config(
        application,
        http=bounded(options, application.state.http_counts),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=max(1, round(options.keep_alive_s)),
        timeout_graceful_shutdown=_FLUSH_S,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if options.ssl_ca_certs else ssl.CERT_NONE,
    )


class DrainingServer(uvicorn.Server):
    """A uvicorn server that drains a Serving before it ends. The server also ends if the model cannot be loaded.

    Args:
        drain_s: seconds for running requests to end.

    Attributes:
        on_started: called when connections are accepted.
        on_ready: called when requests are accepted.
    """

    def __init__(self, config: uvicorn.Config, serving: Serving | ModelPool, drain_s: float) -> None:
        super().__init__(config)
        self.on_started: Callable[[], None] | None = None
        self.on_ready: Callable[[], None] | None = None
        self._serving = serving
        self._drain_s = drain_s
        self._draining: asyncio.Task[None] | None = None
        self._loading: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._signalled_s: float | None = None  # time.monotonic() of the first signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loop = asyncio.get_running_loop()
        self._loading = self._loop.create_task(self._end_unless_loaded())
        certificates = [path for path in (self.config.ssl_certfile, self.config.ssl_keyfile) if path is not None]
        if self.config.ssl is not None and certificates:
            self._watching = self._loop.create_task(
                watch([str(path) for path in certificates], self._load_certificate, "certificate and its key")
            )
        if self.on_started is not None:
            self.on_started()

    def _load_certificate(self) -> None:
        """Reads the certificate again into a new TLS context, for later connections. Runs on a thread. Raises OSError.

        The files are not loaded into the present context, for two reasons. If the new key had another type, the present
        context would also keep the old certificate. If certificate and key did not match, the present context would
        still get the new certificate.
        """
        config = self.config
        assert config.ssl is not None
        assert config.ssl_certfile is not None
        assert self._loop is not None
        new = create_ssl_context(
            config.ssl_certfile,
            config.ssl_keyfile,
            config.ssl_keyfile_password,
            config.ssl_version,
            config.ssl_cert_reqs,
            config.ssl_ca_certs,
            config.ssl_ciphers,
        )
        switch = partial(setattr, config.ssl, "sni_callback", lambda each, _, __: setattr(each, "context", new))
        self._loop.call_soon_threadsafe(switch)

    async def _end_unless_loaded(self) -> None:
        try:
            await asyncio.wrap_future(self._serving.start())
        except Exception:  # serving.load_error has this exception, and _run raises it
            self.should_exit = True
            return
        if self.on_ready is not None and self._serving.state == "ready":
            self.on_ready()

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Handles signals until uvicorn and the engine are closed. A repeated signal then cannot break the shutdown."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Does not capture signals. uvicorn's own method would send each signal again before the engine is closed."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drains the server at the first signal. A later signal, or a signal before the start, ends the process."""
        if self._loop is None:  # there is nothing to drain yet
            os._exit(128 + sig)
        if self._signalled_s is None:
            self._signalled_s = time.monotonic()
            with contextlib.suppress(RuntimeError):  # the loop is closed, because the server has ended
                self._loop.call_soon_threadsafe(self._begin_to_end)
        elif not interrupts.is_same(self._signalled_s):
            os._exit(128 + sig)

    def _begin_to_end(self) -> None:
        if self._draining is None and self._loop is not None:
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._serving.drain(self._drain_s)
        finally:
            self.should_exit = True


def listen(options: ServerOptions) -> list[socket.socket]:
    """Opens the sockets on the addresses of the options. Raises ConfigError."""
    opened: list[socket.socket] = []
    try:
        for path in options.sockets:
            opened.append(_unix_socket(path))
        for host in options.addresses:
            opened.append(_socket(host, options))
    except BaseException:
        for each in opened:
            each.close()
        raise
    return opened


def _socket(host: str, options: ServerOptions) -> socket.socket:
    name, port = host.strip("[]"), options.port
    try:
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(
            f"host is {name!r}, which is no address of this machine: {error.strerror or error}"
        ) from error
    try:
        if sys.platform != "win32":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if options.reuse_port:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(address)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ConfigError(
            f"port {port} of {name} cannot be listened on: {error.strerror or error}; choose another one with --port "
            "(0: any free one)"
        ) from error
    return made


def _unix_socket(path: str) -> socket.socket:
    made = system.unix_socket()
    if made is None:
        raise ConfigError(f"{path} is a UNIX socket, which this system does not have")
    try:
        if _is_stale(path):
            os.unlink(path)
        made.bind(path)
        made.listen(_BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise ConfigError(f"the socket {path} cannot be listened on: {error.strerror or error}") from error
    return made


def _is_stale(path: str) -> bool:
    """True for a socket that no process listens on any more. Raises FileExistsError for a file that is not a socket."""
    if not os.path.exists(path):
        return False
    if not stat.S_ISSOCK(os.stat(path).st_mode):
        raise FileExistsError(errno.EEXIST, "there is a file of this name, which is no socket")
    probe = system.unix_socket()
    if probe is None:
        return False
    with probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def urls(sockets: list[socket.socket], options: ServerOptions) -> list[str]:
    """Returns the URL of each socket."""
    scheme = "https" if options.ssl_certfile else "http"
    found = []
    for each in sockets:
        if each.family == getattr(socket, "AF_UNIX", None):
            found.append(f"{scheme}+unix://{each.getsockname()}{options.root_path}")
            continue
        host, port = each.getsockname()[:2]
        found.append(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{options.root_path}")
    return found
