"""Ray Serve: serve_app makes an application with the endpoints of `llamabatch serve`, over replicas with engines.

The application has two deployments. The ingress reads the whole request and chooses a replica by the prompt, whereas
Serve's own proxy would choose before it has read the body. In the second deployment, each replica has an engine and
answers with the ASGI application of `llamabatch serve`. The ingress forwards the parts of a response as they arrive.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llamabatch.config import with_paths
from llamabatch.errors import ConfigError
from llamabatch.integrations import needs
from llamabatch.integrations.ray_cluster import Node, Size, pool_size
from llamabatch.integrations.ray_replies import JOINED, Reply
from llamabatch.integrations.ray_router import Prefix, PrefixRouter, SlotScaling
from llamabatch.server.application import ERROR_SHAPES, engine_config, make_app
from llamabatch.server.batches.service import BatchService
from llamabatch.server.batches.upload import OVERHEAD_BYTES
from llamabatch.server.http.body_limits import BodyLimits
from llamabatch.server.http.errors import ApiError, error_body, exception_handlers
from llamabatch.server.http.middleware import EndsWithItsClient, ErrorShapes
from llamabatch.server.http.security import own_path, secured
from llamabatch.server.options import ServerOptions, is_loopback, split
from llamabatch.server.serving.serving import Serving
from llamabatch.utils.checks import show

with needs("ray", "ray"):
    import ray
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
    from ray.serve.exceptions import RayServeException

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions

logger = logging.getLogger(__name__)

_TRIES = 3  # a request goes to at most this many replicas, if replicas die before they answer
_UNBOUNDED = 100_000
_BESIDE = 64  # calls that a replica accepts in addition to slots and queue, because some calls do not need a slot
_MOST_WAITING = 4096  # calls that may wait while no replica can receive them
_ALL_S = 5.0  # seconds to wait for the replies of all replicas
_STATS_S = 1.0
_HEALTH_S = 5.0  # seconds between two checks; Serve replaces a replica after three failed ones
_AFTER_DRAIN_S = 15.0  # seconds for aborted requests and the engine's process to end
_MOST_FILE_BYTES = 64 * 2**20  # default of max_file_bytes: the ingress and Ray store a whole request in memory
_REPLICA = b"x-llamabatch-replica"  # the response header with Serve's id of the replica
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_OF_SERVE = {
    **dict.fromkeys(("host", "port", "root_path", "keep_alive_s"), "give it to serve.start(http_options=...)"),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"), "give it to serve.start(http_options=...)"),
    **dict.fromkeys(("uds", "reuse_port"), "Serve's proxies listen on host and port"),
    **dict.fromkeys(("max_header_bytes", "max_headers", "max_connections"), "Serve's proxies read requests"),
    **dict.fromkeys(("header_timeout_s", "body_timeout_s", "write_timeout_s"), "Serve's proxies read requests"),
    **dict.fromkeys(("page", "slots"), "each replica has figures of its own"),
    **dict.fromkeys(("props", "lora_dir"), "a change would reach one replica alone"),
    "log_file": "Ray keeps the logs of replicas",
}
_HIDDEN = (
    "this server has no key, and HAProxy (RAY_SERVE_ENABLE_HA_PROXY=1) hides the machine that a request comes from; "
    "give serve_app api_keys among server_options, or no_key=True to allow any caller"
)
_OF_ONE = "each replica has its own, and Ray Serve may ask any of them"
_REFUSED = {
    "/slots": _OF_ONE,
    "/props": "a change would reach one replica alone",
    "/lora-adapters": "a change would reach one replica alone; give adapters to serve_app",
    "/v1/load_lora_adapter": "a change would reach one replica alone; give adapters to serve_app",
    "/v1/unload_lora_adapter": "a change would reach one replica alone; give adapters to serve_app",
}
_STILL_READ = ("/props", "/lora-adapters")  # refused paths that still answer GET


def serve_app(
    model: str | os.PathLike[str],
    *,
    num_replicas: int | tuple[int, int] | None = None,
    target_occupancy: float = 0.8,
    ray_actor_options: Mapping[str, Any] | None = None,
    deployment_options: Mapping[str, Any] | None = None,
    ingress_options: Mapping[str, Any] | None = None,
    server_options: Mapping[str, Any] | None = None,
    **options: Unpack[EngineOptions],
) -> serve.Application:
    """Returns an application of Ray Serve with the endpoints of `llamabatch serve`, for serve.run.

    ::

        serve.run(serve_app("model.gguf", num_replicas=(1, 8), server_options={"api_keys": ["secret"]}))

    A request goes to a replica that has the beginning of its prompt and a free slot, else to the least loaded replica.
    Serve replaces a replica if its process or its node dies, or if its engine fails for good. After a crash of
    llama.cpp, the replica itself restarts its engine. If a replica dies before the first byte of an answer, the request
    goes to another replica.

    Args:
        model: as for LLM; a path must be readable on each node of the cluster.
        num_replicas: the number of replicas. With (minimum, maximum), Serve chooses the number by the slots in use.
            None: one replica for each GPU of the cluster, or for each node if there is no GPU.
        target_occupancy: with (minimum, maximum), the share of all slots that scaling keeps in use, above 0 and at most
            1. Requests that wait for a slot count as slots in use.
        ray_actor_options: options of a replica's actor, such as num_cpus, num_gpus, memory (bytes), resources and
            runtime_env. They override the values of the plan.
        deployment_options: more options of the engines' deployment: max_replicas_per_node, health_check_period_s ...
        ingress_options: options of the ingress' deployment: num_replicas (default 1), ray_actor_options ...
        server_options: as for llamabatch.server.app: api_keys, served_model_names, sampling ... Give options of
            addresses and connections to Serve instead. Files and batches need data_dir, a folder that all nodes share.
        **options: as for LLM. If n_slots, n_ctx or the threads are "auto", the plan sets them.

    Raises:
        ConfigError, UnknownOptionError: an argument is invalid, or HAProxy is in front of a server without API keys.
        ModelFileError: the node that makes the plan does not have the model's file, or the file is damaged.
        MemoryPlanError: the model does not fit on that node, or Ray has no node with enough memory for a replica.
        SetupError: no node has a CPU, or no node makes the plan within 300 s.
    """
    fewest, most = pool_size(num_replicas, "num_replicas", "replicas")
    if isinstance(target_occupancy, bool) or not isinstance(target_occupancy, (int, float)):
        raise ConfigError(f"target_occupancy is {show(target_occupancy)}; give a number above 0, at most 1")
    if not 0 < target_occupancy <= 1:
        raise ConfigError(f"target_occupancy is {target_occupancy}; give a number above 0, at most 1")
    server = _server_options(server_options)
    if is_behind_haproxy() and not server.api_keys and not server.no_key:
        raise ConfigError(_HIDDEN)
    given: dict[str, Any] = {**options}
    config = engine_config(model, given)
    if not ray.is_initialized():
        ray.init()
    paths = with_paths({**given, "model": model})
    nodes = Node.all()
    replica = Size.of(nodes, paths.pop("model"), paths, _at_once(most, len(nodes), deployment_options))
    number = replica.n_actors if most is None else most
    queue = _UNBOUNDED if config.max_queue is None else config.max_queue
    engines: dict[str, Any] = {
        "ray_actor_options": {**replica.resources, **(ray_actor_options or {})},
        "max_ongoing_requests": replica.n_slots + queue + _BESIDE,
        "max_queued_requests": _MOST_WAITING,
        "health_check_period_s": _HEALTH_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": {"enable_access_log": server.access_log},
        "graceful_shutdown_timeout_s": server.drain_s + _AFTER_DRAIN_S,
        "request_router_config": RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"n_slots": replica.n_slots},
            request_routing_stats_period_s=_STATS_S,
        ),
    }
    if fewest is None or fewest == number:
        engines["num_replicas"] = number
    else:
        engines["autoscaling_config"] = AutoscalingConfig(
            min_replicas=fewest,
            max_replicas=number,
            upscale_delay_s=10.0,
            policy=AutoscalingPolicy(policy_function=SlotScaling, policy_kwargs={"occupancy": float(target_occupancy)}),
        )
    ingress = {
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": _UNBOUNDED,
        "graceful_shutdown_wait_loop_s": 0.5,
        "logging_config": {"enable_access_log": server.access_log},
        "graceful_shutdown_timeout_s": server.drain_s + _AFTER_DRAIN_S,
        **(ingress_options or {}),
    }
    child = serve.deployment(Engines).options(**{**engines, **(deployment_options or {})})
    bound = child.bind(os.fspath(model), {**given, **replica.options}, server)
    return serve.deployment(serve.ingress()(Ingress)).options(**ingress).bind(bound, server)


def _at_once(most: int | None, n_nodes: int, options: Mapping[str, Any] | None) -> int | None:
    """Returns `most`, or less if max_replicas_per_node does not allow `most` replicas on the current nodes. More nodes
    may join later."""
    each = (options or {}).get("max_replicas_per_node")
    return most if most is None or each is None else min(most, each * n_nodes)


def build(args: dict[str, Any]) -> serve.Application:
    """Calls serve_app for a configuration file of Serve: `import_path: llamabatch.integrations.ray_serve:build`, with
    serve_app's arguments as `args`. num_replicas may be a list of two numbers, the minimum and the maximum.

    Waits up to 300 s for a node with a CPU, because KubeRay builds applications before its workers are up.
    """
    Node.wait()
    number = args.get("num_replicas")
    return serve_app(**{**args, "num_replicas": tuple(number) if isinstance(number, list) else number})


def _server_options(given: Mapping[str, Any] | None) -> ServerOptions:
    """Returns the server options of replicas. Raises ConfigError, UnknownOptionError."""
    settings = {} if given is None else dict(given)
    for name in settings:
        if name in _OF_SERVE:
            raise ConfigError(f"server_options has {name}, which does not go with Ray Serve: {_OF_SERVE[name]}")
    batches = settings.get("data_dir") is not None
    if settings.get("batches") and not batches:
        raise ConfigError("server_options has batches, which need data_dir: a folder that all nodes share")
    own = {"page": False, "slots": False, "batches": batches, "max_file_bytes": _MOST_FILE_BYTES}
    made, others = split({**own, **settings}, ())
    assert not others
    return replace(made, api_key_file=None)  # `made.api_keys` has the file's keys; other nodes may not have the file


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica.

    Attributes:
        scope: the plain data of the ASGI scope.
        body: the whole body.
        prefix: the beginnings of the prompt, for the choice of a replica.
        needs_batches: True if only the replica that has locked the folder of files and batches can answer.
    """

    scope: dict[str, Any]
    body: bytes
    prefix: Prefix
    needs_batches: bool


class Ingress:
    """The deployment that receives requests."""

    def __init__(self, engines: Any, options: ServerOptions) -> None:
        self._engines = engines.options(stream=True)
        self._options = options

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the ASGI application. Serve calls it."""
        return ingress_app(self._engines.respond.remote, self._ask_all, self._options)

    async def _ask_all(self, call: Call) -> list[Reply]:
        """Sends a call to all replicas, and returns the replies that arrive in time."""
        response = self._engines.broadcast("reply", call)
        found = await response.results_async(timeout_s=_ALL_S, return_exceptions=True)
        return [each for each in found if isinstance(each, Reply)]


def ingress_app(respond: Any, ask_all: Callable[[Call], Awaitable[list[Reply]]], options: ServerOptions) -> Any:
    """Returns the ASGI application of the ingress.

    Args:
        respond: sends a Call to one replica, and returns the messages of the response, as Serve's handles do.
        ask_all: sends a Call to all replicas, and returns their replies.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Mount

    limits = {"/v1/files": options.max_file_bytes + OVERHEAD_BYTES}
    return Starlette(
        routes=[Mount("/", app=Forward(respond, ask_all, options))],
        middleware=[
            Middleware(ErrorShapes, ERROR_SHAPES),
            Middleware(secured, options),
            Middleware(BodyLimits, options.max_body_bytes, options.max_bodies_bytes, limits),
            Middleware(EndsWithItsClient),
        ],
        exception_handlers=exception_handlers(),
    )


class Forward:
    """An ASGI application that forwards a request to one replica, or to all replicas if its path is in JOINED."""

    def __init__(self, respond: Any, ask_all: Callable[[Call], Awaitable[list[Reply]]], options: ServerOptions) -> None:
        self._respond = respond
        self._ask_all = ask_all
        self._options = options

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, method = own_path(scope), str(scope["method"])
        check_call(path, method, scope.get("client"), self._options)
        body = await _read(receive)
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        plain |= {name: tuple(scope[name]) for name in ("client", "server") if scope.get(name)}
        needs_batches = _is_below(path, "/v1/files") or _is_below(path, "/v1/batches")
        call = Call(plain, body, Prefix.of(path, body) if method == "POST" else Prefix(), needs_batches)
        if (method, path) in JOINED:
            await self._answer_of_all(method, path, call, send)
            return
        for left in reversed(range(_TRIES)):
            sent = _Sent(send)
            try:
                await self._answer(call, sent)
                return
            except (RayActorError, RayServeException) as error:
                if sent.has_begun:
                    await _end(scope, sent, error)
                    return
                if not left or not isinstance(error, RayActorError):
                    raise ApiError(503, f"no replica answers: {_why(error)}; try again", code="replica_gone") from error
                logger.warning("a replica is gone, and its request goes to another one: %s", _why(error))

    async def _answer_of_all(self, method: str, path: str, call: Call, send: Any) -> None:
        """Answers with the joined replies of all replicas. Raises ApiError (503) if no replica replies."""
        try:
            replies = await self._ask_all(call)
        except (RayServeException, TimeoutError, asyncio.TimeoutError) as error:
            raise ApiError(503, f"no replica answers: {_why(error)}; try again", code="replica_gone") from error
        if not replies:
            raise ApiError(503, "no replica answers; try again", code="replica_gone")
        reply = next((each for each in replies if each.status >= 400), None) or JOINED[method, path](replies)
        headers = [(b"content-length", str(len(reply.body)).encode())]
        headers += [(b"content-type", reply.content_type)] if reply.content_type else []
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _answer(self, call: Call, send: _Sent) -> None:
        response = self._respond(call)
        try:
            async for messages in response:
                for message in messages:
                    await send(message)
        finally:
            if not send.has_ended:  # the client is gone, so the replica must end the request and free its slot
                response.cancel()


class _Sent:
    """A wrapper of a request's ASGI `send` that records how far the response is.

    Attributes:
        has_begun: True once the status is sent.
        has_ended: True once the whole response is sent.
        kind: the content-type of the response.
    """

    def __init__(self, send: Any) -> None:
        self._send = send
        self.has_begun = self.has_ended = False
        self.kind = b""

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            self.kind = dict(message.get("headers", ())).get(b"content-type", b"")
        elif not message.get("more_body", False):
            self.has_ended = True
        await self._send(message)


async def _end(scope: Any, send: _Sent, error: Exception) -> None:
    """Ends a response that has begun. Adds an error event to a stream. For any other response, raises ApiError, which
    closes the connection."""
    failure = ApiError(503, "the replica that answered is gone; send the request again", code="replica_gone")
    if send.has_ended:
        return
    if not send.kind.startswith(b"text/event-stream"):
        raise failure from error
    document = error_body(failure, scope)
    name = f"event: {document['type']}\n" if "type" in document else ""  # Anthropic names events by their type
    event = f"{name}data: {json.dumps(document)}\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": False})


def check_call(path: str, method: str, client: Any, options: ServerOptions) -> None:
    """Raises ApiError if a call is not served under Ray Serve (501) or the caller is not allowed (403)."""
    why = _REFUSED.get(path)
    if why is not None and not (method == "GET" and path in _STILL_READ):
        raise ApiError(501, f"{path} is not served under Ray Serve: {why}")
    if not options.batches and (_is_below(path, "/v1/files") or _is_below(path, "/v1/batches")):
        raise ApiError(
            501,
            f"{path} needs a folder that all nodes share: serve_app(..., server_options={{'data_dir': FOLDER}})",
        )
    if options.api_keys or options.no_key:
        return
    if is_behind_haproxy():
        raise ApiError(403, _HIDDEN, code="key_needed")
    if client and not is_loopback(str(client[0])):
        raise ApiError(
            403,
            "this server has no key, and you are on another machine; give serve_app api_keys among server_options, or "
            "no_key=True to allow any caller",
            code="key_needed",
        )


def is_behind_haproxy() -> bool:
    """Returns True if HAProxy is in front of the deployments. Every caller then seems to have HAProxy's address."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _why(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


async def _read(receive: Any) -> bytes:
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise asyncio.CancelledError
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class Engines:
    """The deployment with the engines. Each replica has one Serving and its application.

    Args:
        model, options: the engine's model and options.
        server: the application's options.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits __init__
        self, model: str, options: dict[str, Any], server: ServerOptions
    ) -> None:
        self._app = make_app(engine_config(model, options), server)
        self._serving: Serving = self._app.state.serving
        # Only one replica at a time can lock the folder of batches. When this replica ends, another must take over.
        # So a replica starts without the folder, and record_routing_stats tries again and again to lock the folder.
        self._batches: BatchService = self._app.state.batches
        self._serving.parts.remove(self._batches)
        try:
            await asyncio.wrap_future(self._serving.start())
        except BaseException:
            await self._serving.aclose()
            raise
        self._has_folder = False
        self._name = serve.get_replica_context().replica_id.unique_id.encode()

    async def respond(self, call: Call) -> AsyncIterator[list[dict[str, Any]]]:
        """Yields the messages of a response as they come. Messages that are ready at the same time come in one list."""
        waiting: list[dict[str, Any]] = []
        news, gone, is_read = asyncio.Event(), asyncio.Event(), False

        async def receive() -> dict[str, Any]:
            nonlocal is_read
            if not is_read:
                is_read = True
                return {"type": "http.request", "body": call.body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (_REPLICA, self._name)]}
            waiting.append(message)
            news.set()

        handler = asyncio.ensure_future(self._app({**call.scope, "asgi": {"version": "3.0"}}, receive, send))
        handler.add_done_callback(lambda _: news.set())
        try:
            while True:
                await news.wait()
                news.clear()
                if waiting:
                    messages, waiting[:] = list(waiting), []
                    yield messages
                elif handler.done():
                    handler.result()
                    return
        finally:
            gone.set()  # if the caller is gone, the application gets a disconnect and ends the request
            if handler.done() and not handler.cancelled():
                handler.exception()

    async def reply(self, call: Call) -> Reply:
        """Returns the whole response to a call."""
        messages = [each async for some in self.respond(call) for each in some]
        start, *parts = messages
        kind = dict(start.get("headers", ())).get(b"content-type", b"")
        body = b"".join(each.get("body", b"") for each in parts)
        return Reply(self._name.decode(), start["status"], kind, body)

    def check_health(self) -> None:
        """Raises RuntimeError if the engine has failed for good, but not while it restarts. Serve calls this."""
        if self._serving.state == "failed":
            raise RuntimeError(f"the engine has ended: {self._serving.error}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Returns figures for the router. Also locks the folder of batches if no replica has it. Serve calls this."""
        if self._serving.options.batches and not self._has_folder and self._serving.state == "ready":
            self._has_folder = await self._serving.on_thread(self._batches.take_over)
        return {
            "slots": self._serving.admission.n_slots,
            "in_flight": self._serving.admission.n_in_flight,
            "calls": self._serving.n_open,
            "batches": self._has_folder,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns this replica's figures for SlotScaling. Serve calls this."""
        admission = self._serving.admission
        return {"slots": float(admission.n_slots), "in_flight": float(admission.n_in_flight)}

    def __del__(self) -> None:
        """Closes the engine. Serve calls this once the calls in progress have ended or their time is over."""
        serving: Serving | None = getattr(self, "_serving", None)
        if serving is not None:
            self._batches.stop()
            serving.close()
