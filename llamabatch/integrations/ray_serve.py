"""Ray Serve: serve_app makes an application with the endpoints of `llamabatch serve`, over replicas with engines.

Two deployments. The ingress reads a request whole, since the choice of a replica needs its prompt, which Serve's own
proxy has not read when it chooses; the engines answer it, each with the ASGI application of `llamabatch serve`. What an
answer is made of passes through as it comes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llamabatch.config import with_paths
from llamabatch.errors import ConfigError
from llamabatch.integrations import needs
from llamabatch.integrations.ray_cluster import Node, Size, pool_size
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

_TRIES = 3  # of a request whose replica is gone before it has answered
_UNBOUNDED = 100_000
_BESIDE = 64  # calls at once on a replica that need no slot
_MOST_WAITING = 4096  # calls that wait for a replica, while there is none
_STATS_S = 1.0
_HEALTH_S = 5.0  # Serve replaces a replica after three checks that failed
_AFTER_DRAIN_S = 15.0  # for aborted requests to end, and the engine's process
_MOST_FILE_BYTES = 64 * 2**20  # unless given: a request is held whole, on its way to a replica, too
_REPLICA = b"x-llamabatch-replica"  # a header of responses: the replica's id, as Serve has it
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_OF_SERVE = {
    **dict.fromkeys(("host", "port", "root_path", "keep_alive_s"), "give it to serve.start(http_options=...)"),
    **dict.fromkeys(("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"), "give it to serve.start(http_options=...)"),
    **dict.fromkeys(("uds", "reuse_port"), "Serve's proxies listen on host and port"),
    **dict.fromkeys(("max_header_bytes", "max_headers", "max_connections"), "Serve's proxies read requests"),
    **dict.fromkeys(("header_timeout_s", "body_timeout_s", "write_timeout_s"), "Serve's proxies read requests"),
    **dict.fromkeys(("page", "slots", "metrics_without_key"), "each replica has figures of its own"),
    **dict.fromkeys(("props", "lora_dir"), "a change would reach one replica alone"),
    "log_file": "Ray keeps the logs of replicas",
}
_HIDDEN = (
    "this server has no key, and HAProxy (RAY_SERVE_ENABLE_HA_PROXY=1) hides the machine that a request comes from; "
    "give serve_app api_keys among server_options, or no_key=True to allow any caller"
)
_OF_ONE = "each replica has its own, and Ray Serve may ask any of them"
_REFUSED = {
    "/metrics": f"{_OF_ONE}; look at the metrics that Ray exports",
    "/slots": _OF_ONE,
    "/load": _OF_ONE,
    "/props": "a change would reach one replica alone",
    "/lora-adapters": "a change would reach one replica alone; give adapters to serve_app",
    "/v1/load_lora_adapter": "a change would reach one replica alone; give adapters to serve_app",
    "/v1/unload_lora_adapter": "a change would reach one replica alone; give adapters to serve_app",
    "/reset_prefix_cache": "it would reach one replica alone",
}
_STILL_READ = ("/props", "/lora-adapters")  # with GET


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
    """An application of Ray Serve with the endpoints of `llamabatch serve`; give it to serve.run.

    ::

        serve.run(serve_app("model.gguf", num_replicas=(1, 8), server_options={"api_keys": ["secret"]}))

    A request goes to a replica that has the beginning of its prompt, while that has a free slot, else to the least
    loaded one. A replica is replaced when its process or its node is gone, or its engine for good; a crash of llama.cpp
    is repaired within it. Requests that had no byte of their answer by then are sent to another one.

    Args:
        model: as of LLM; a path that each node of the cluster can read.
        num_replicas: replicas, or (fewest, most) between which Serve scales them by the slots in use. None: one for
            each GPU of the cluster, or without GPUs one for each node.
        target_occupancy: with (fewest, most), the share of all slots that is in use where the number is right, above 0
            and at most 1; requests that wait for a slot count.
        ray_actor_options: of a replica, in place of those of the plan: num_cpus, num_gpus, memory (bytes), resources,
            runtime_env and others.
        deployment_options: further ones of the engines' deployment: max_replicas_per_node, health_check_period_s ...
        ingress_options: of the ingress' deployment: num_replicas (1 unless given), ray_actor_options ...
        server_options: as of llamabatch.server.app: api_keys, served_model_names, sampling ... Those of addresses and
            connections are Serve's. Files and batches need data_dir, a folder that all nodes share.
        **options: as of LLM. n_slots, n_ctx and threads that are "auto" are those of the plan.

    Raises:
        ConfigError, UnknownOptionError: an argument is wrong, or there is no key behind HAProxy.
        ModelFileError: the model is no file of the node that makes the plan, or damaged.
        MemoryPlanError: it does not fit there, or a replica is larger than any node is for Ray.
        SetupError: no node with a CPU, or none makes the plan within 300 s.
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
    """Replicas that share the nodes of now: not more than max_replicas_per_node lets be, as more nodes may come."""
    each = (options or {}).get("max_replicas_per_node")
    return most if most is None or each is None else min(most, each * n_nodes)


def build(args: dict[str, Any]) -> serve.Application:
    """serve_app for a configuration file of Serve: `import_path: llamabatch.integrations.ray_serve:build`, and its
    arguments as `args`. A list of two numbers is (fewest, most) of num_replicas.

    Waits 300 s for a node with a CPU: KubeRay has applications built once the head is up, before the workers are.
    """
    Node.wait()
    number = args.get("num_replicas")
    return serve_app(**{**args, "num_replicas": tuple(number) if isinstance(number, list) else number})


def _server_options(given: Mapping[str, Any] | None) -> ServerOptions:
    """The options of replicas. Raises ConfigError, UnknownOptionError."""
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
    return replace(made, api_key_file=None)  # whose keys are among api_keys; replicas may be on other nodes


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica.

    Attributes:
        scope: of ASGI, as far as it is plain data.
        body: whole.
        prefix: the beginnings of its prompt, for the choice of a replica.
        needs_batches: only the replica that has the folder of files and batches can answer.
    """

    scope: dict[str, Any]
    body: bytes
    prefix: Prefix
    needs_batches: bool


class Ingress:
    """The deployment that requests come to."""

    def __init__(self, engines: Any, options: ServerOptions) -> None:
        self._engines = engines.options(stream=True)
        self._options = options

    def __serve_build_asgi_app__(self) -> Any:
        """Called by Serve."""
        return ingress_app(self._engines.respond.remote, self._options)


def ingress_app(respond: Any, options: ServerOptions) -> Any:
    """The ASGI application of the ingress.

    Args:
        respond: makes of a Call the messages of its response, as Serve's handles do.
    """
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Mount

    limits = {"/v1/files": options.max_file_bytes + OVERHEAD_BYTES}
    return Starlette(
        routes=[Mount("/", app=Forward(respond, options))],
        middleware=[
            Middleware(ErrorShapes, ERROR_SHAPES),
            Middleware(secured, options),
            Middleware(BodyLimits, options.max_body_bytes, options.max_bodies_bytes, limits),
            Middleware(EndsWithItsClient),
        ],
        exception_handlers=exception_handlers(),
    )


class Forward:
    """An ASGI application that has a replica answer."""

    def __init__(self, respond: Any, options: ServerOptions) -> None:
        self._respond = respond
        self._options = options

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path, method = own_path(scope), str(scope["method"])
        check_call(path, method, scope.get("client"), self._options)
        body = await _read(receive)
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        plain |= {name: tuple(scope[name]) for name in ("client", "server") if scope.get(name)}
        needs_batches = _is_below(path, "/v1/files") or _is_below(path, "/v1/batches")
        call = Call(plain, body, Prefix.of(path, body) if method == "POST" else Prefix(), needs_batches)
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

    async def _answer(self, call: Call, send: _Sent) -> None:
        response = self._respond(call)
        try:
            async for messages in response:
                for message in messages:
                    await send(message)
        finally:
            if not send.has_ended:  # the client is gone: the replica must know, and the request frees its slot
                response.cancel()


class _Sent:
    """The sending side of a request.

    Attributes:
        has_begun: the status is out. has_ended: the whole response is.
        kind: its content-type.
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
    """Ends a response that has begun: a stream with the event of an error, others by the end of the connection."""
    failure = ApiError(503, "the replica that answered is gone; send the request again", code="replica_gone")
    if send.has_ended:
        return
    if not send.kind.startswith(b"text/event-stream"):
        raise failure from error
    document = error_body(failure, scope)
    name = f"event: {document['type']}\n" if "type" in document else ""  # Anthropic's events are named by their type
    event = f"{name}data: {json.dumps(document)}\n\n".encode()
    await send({"type": "http.response.body", "body": event, "more_body": False})


def check_call(path: str, method: str, client: Any, options: ServerOptions) -> None:
    """Raises ApiError for a call that is not for this kind of server: 501, or 403."""
    why = _REFUSED.get(path)
    if why is not None and not (method == "GET" and path in _STILL_READ):
        raise ApiError(501, f"{path} is not served under Ray Serve: {why}")
    if not options.batches and (_is_below(path, "/v1/files") or _is_below(path, "/v1/batches")):
        raise ApiError(
            501,
            f"{path} is not served here: give serve_app data_dir among server_options, a folder that all nodes share",
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
    """True if HAProxy stands before the deployments of this process: every caller then seems to have its address."""
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
    """The deployment with the engines: a replica is one Serving with its application.

    Args:
        model, options: of the engine.
        server: of the application.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, model: str, options: dict[str, Any], server: ServerOptions
    ) -> None:
        self._app = make_app(engine_config(model, options), server)
        self._serving: Serving = self._app.state.serving
        # One replica at a time has the folder, whichever comes first, and another one after its end: not the load, but
        # a look from time to time takes it.
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
        """The messages of a response as they come, those of a moment together."""
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
            gone.set()  # where the caller is gone: the application ends the request
            if handler.done() and not handler.cancelled():
                handler.exception()

    def check_health(self) -> None:
        """Called by Serve. Raises where the engine is gone for good; one that is being replaced is well."""
        if self._serving.state == "failed":
            raise RuntimeError(f"the engine is gone: {self._serving.error}")

    async def record_routing_stats(self) -> dict[str, Any]:
        """Called by Serve: what the router knows of this replica."""
        if self._serving.options.batches and not self._has_folder and self._serving.state == "ready":
            self._has_folder = await self._serving.on_thread(self._batches.take_over)
        return {
            "slots": self._serving.admission.n_slots,
            "in_flight": self._serving.admission.n_in_flight,
            "calls": self._serving.n_open,
            "batches": self._has_folder,
        }

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve: what SlotScaling knows of this replica."""
        admission = self._serving.admission
        return {"slots": float(admission.n_slots), "in_flight": float(admission.n_in_flight)}

    def __del__(self) -> None:
        """Called by Serve once the calls under way have ended, or their time is over."""
        serving: Serving | None = getattr(self, "_serving", None)
        if serving is not None:
            self._batches.stop()
            serving.close()
