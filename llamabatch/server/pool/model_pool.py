"""ModelPool: several models of one server. A request loads its model. Several models stay loaded if memory allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from llamabatch.errors import ConfigError, EngineClosedError, MemoryPlanError
from llamabatch.server.http.errors import ApiError, model_not_found
from llamabatch.server.http.security import App
from llamabatch.server.monitor.live import live_of
from llamabatch.server.pool.options import LookAgain, ModelSpec, PoolOptions, check_names
from llamabatch.server.serving.serving import Serving, unavailable

logger = logging.getLogger(__name__)

ModelState = Literal["unloaded", "loading", "loaded", "unloading", "sleeping"]
_TICK_S = 0.001  # minimum duration of a timer in seconds; a shorter timer could fire early, again and again
_WORK_S = 1.0  # seconds between two checks of a model whose batches keep it loaded
_FIRST_LOAD_S = 2.0  # assumed duration of a first load in seconds


class PooledModel:
    """One model of a pool.

    Args:
        spec: the options of the model.
        serving: the Serving of the model, not started.
        app: the application for `serving`.

    Attributes:
        state: "sleeping" means that the model was unloaded because no request came.
        error: the reason why the last load failed; None: it did not fail.
        is_leaving: True while `unload` waits for the end of the model's requests. Meanwhile the model accepts no new
            requests.
        n_users: the number of requests that use the model.
        used_s: the event loop's time at the end of the last use.
        keep_s: the model sleeps after this many seconds without a request, as requested by the last client; math.inf:
            it never sleeps; None: the options decide.
        last_load_s: duration of the last successful load in seconds; None: no load has succeeded.
        n_loads: the number of loads since the start.
        began_s: the event loop's time at the start of the last load.
    """

    def __init__(self, spec: ModelSpec, serving: Serving, app: App) -> None:
        self.spec = spec
        self.serving = serving
        self.app = app
        self.state: ModelState = "unloaded"
        self.error: BaseException | None = None
        self.is_leaving = False
        self.n_users = 0
        self.used_s = 0.0
        self.keep_s: float | None = None
        self.last_load_s: float | None = None
        self.began_s = 0.0
        self.n_loads = 0

    @property
    def load_s(self) -> float:
        """The expected duration of a load in seconds."""
        return _FIRST_LOAD_S if self.last_load_s is None else self.last_load_s

    @property
    def name(self) -> str:
        """The first name of the model."""
        return self.serving.names[0]

    @property
    def adapters(self) -> list[str]:
        """The names of the loaded adapters. If the model is not loaded: the names of the adapters in its
        configuration."""
        if self.state == "loaded" and self.serving.state in ("ready", "restarting"):
            return self.serving.client.adapters
        return [name for name, _ in self.serving.config.adapters]


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class _Wait:
    """The requests that wait for one model.

    Attributes:
        since_s: the event loop's time when the first request came.
        entered: a future for each request, which is done when the request may use the model.
        is_asked: True: the model must be loaded, even if no request waits for the model any more.
    """

    since_s: float = field(default_factory=_now)
    entered: list[asyncio.Future[None]] = field(default_factory=list)
    is_asked: bool = False


class ModelPool:
    """The models of a server, by name. Call the methods on one event loop.

    A request for a loaded model runs at once. A request for another model waits until that model is loaded. Models are
    loaded one after another, in the order of their first waiting requests. If there is no room for a model, idle models
    are unloaded first, beginning with the longest idle. If this is not enough, a busy model must be unloaded. First,
    the busy model continues for the duration of the waiting model's last load. Then it accepts no new requests, and is
    unloaded when its running requests have ended.

    Args:
        takes_any: requests with an unknown name use the first model.
        look_again: searches for new models; None: there are never new models.
        make: makes a PooledModel from the spec of a new model.

    Attributes:
        models: the models. Requests without a model use the first one.
        load_error: always None; run.py reads this attribute of a Serving or a ModelPool.
    """

    def __init__(
        self,
        options: PoolOptions,
        *,
        takes_any: bool = False,
        look_again: LookAgain | None = None,
        make: Callable[[ModelSpec], PooledModel] | None = None,
    ) -> None:
        self.models: list[PooledModel] = []
        self._look_again = look_again
        self._make = make
        self._looking = asyncio.Lock()
        self.options = options
        self.load_error: BaseException | None = None
        self._takes_any = takes_any
        self._waiting: dict[PooledModel, _Wait] = {}
        self._closing: set[PooledModel] = set()  # busy models that accept no new requests
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: dict[PooledModel | None, asyncio.TimerHandle] = {}
        self._starting: list[PooledModel] = []
        self._started: Future[None] | None = None
        self._is_draining = False
        self._changed = asyncio.Event()

    # run.py uses these members. A Serving has the same members.

    @property
    def state(self) -> str:
        """The state: "loading" until the initial models are loaded or have failed, then "ready", or "draining"."""
        return "draining" if self._is_draining else "loading" if self._starting else "ready"

    @property
    def is_loading(self) -> bool:
        """True while a model loads."""
        return any(model.serving.is_loading for model in self.models)

    def start(self) -> Future[None]:
        """Starts to load the initial models. The future is done when each of them is loaded or has failed."""
        if self._started is None:
            self._started = Future()
            self._started.set_running_or_notify_cancel()  # no caller can cancel the future now
            for model in self.models:
                if not model.spec.on_startup:
                    continue
                if self._fit([*self._starting, model]):
                    self._starting.append(model)
                    self._waiting.setdefault(model, _Wait()).is_asked = True
                else:
                    logger.warning("%s is not loaded at the start: it does not fit beside the others", model.name)
            self._look()
        return self._started

    async def drain(self, seconds: float) -> None:
        """Refuses new requests, waits for running requests, and aborts the requests that still run after `seconds`."""
        self._is_draining = True
        self._refuse_waiting()
        await asyncio.gather(*(model.serving.drain(seconds) for model in self._loaded()))

    async def aclose(self) -> None:
        """Ends all requests and frees all models."""
        self._is_draining = True
        self._refuse_waiting()
        for timer in self._timers.values():
            timer.cancel()
        await asyncio.gather(*(model.serving.aclose() for model in self.models))

    def close(self) -> None:
        """Ends all requests and frees all models. May be called on any thread."""
        for model in self.models:
            model.serving.close()

    # Search for models by name.

    def has(self, name: str) -> bool:
        """Returns True if a model or an adapter has this name."""
        return any(name in model.serving.names or name in model.adapters for model in self.models)

    def find(self, name: str | None) -> PooledModel:
        """Returns the model with this name, alias or adapter. Returns the first model if the name is None. Raises
        ApiError (404)."""
        if name is None:
            return self.models[0]
        for model in self.models:
            if name in model.serving.names:
                return model
        for model in self.models:
            if name in model.adapters:
                return model
        if self._takes_any:
            return self.models[0]
        raise model_not_found(name, [model.name for model in self.models])

    # Loading and use of models.

    @contextlib.asynccontextmanager
    async def using(
        self,
        model: PooledModel,
        loads: bool | None = None,
        *,
        looks: bool = False,
        holds: bool = True,
        keep_s: float | None = None,
    ) -> AsyncIterator[None]:
        """Loads a model, unless it is loaded, and keeps it loaded until the end of the block.

        Args:
            loads: replaces the pool's autoload; None: the pool's autoload applies.
            looks: True: the block only reads, so the idle time of the model does not start again.
            holds: True: the model is not unloaded before the end of the block. False: the model may be unloaded
                earlier. Requests that may last as long as a page is open need False.
            keep_s: the model sleeps after this many seconds without a request, counted from the end of the block;
                math.inf: never; None: the options decide. No effect with `looks`, or without `holds`.

        Raises:
            ApiError: the model is not loaded and `loads` is False (400); its load fails, or the server ends (503).
        """
        if self._is_draining:
            raise unavailable("draining")
        if self.is_open(model):
            model.n_users += 1
        elif model in self._waiting or (self.options.autoload if loads is None else loads):
            await self._wait_for(model)
        else:
            raise ApiError(
                400, f"the model {model.name} is not loaded; POST /models/load loads it", code="model_not_loaded",
                param="model",
            )  # fmt: skip
        if not holds:
            model.n_users -= 1
            self._look()
            yield
            return
        try:
            yield
        finally:
            model.n_users -= 1
            if not looks:
                model.used_s, model.keep_s = _now(), keep_s
            self._look()

    def is_open(self, model: PooledModel) -> bool:
        """Returns True if a request for the model would start without waiting."""
        return model.state == "loaded" and not model.is_leaving and model not in self._closing

    def load(self, model: PooledModel) -> None:
        """Starts to load a model, unless it is loaded."""
        if not self.is_open(model):
            self._waiting.setdefault(model, _Wait()).is_asked = True
            self._look()

    async def unload(self, model: PooledModel) -> None:
        """Unloads a model once its running requests have ended. Later requests load it again."""
        while model.state in ("loading", "unloading"):
            await self._next_change()
        if model.state == "sleeping":
            model.state = "unloaded"
        if model.state != "loaded":
            return
        model.is_leaving = True
        try:
            while model.n_users and model.state == "loaded":
                await self._next_change()
        finally:
            model.is_leaving = False
            if model.state == "loaded" and not model.n_users:
                await self._begin_close(model)
            else:
                self._look()

    def left_s(self, model: PooledModel) -> float | None:
        """Returns the seconds until a loaded model sleeps if no request comes; None: the model never sleeps."""
        wishes = (model.keep_s, model.spec.sleep_idle_s, self.options.sleep_idle_s)
        idle_s = next((each for each in wishes if each is not None), math.inf)
        if idle_s == math.inf:
            return None
        return max(0.0, idle_s + (0.0 if model.n_users else model.used_s - _now()))

    async def reload(self) -> None:
        """Adds new models. Removes each model whose files are gone, unless the model is loaded.

        Raises:
            ApiError: the folder of the models or the file of presets cannot be read, or two models share a name (503).
        """
        if self._look_again is None or self._make is None:
            return
        async with self._looking:
            known = [name for model in self.models for name in model.serving.names]
            try:
                found = await asyncio.to_thread(self._look_again, known)
                check_names([*(model.spec for model in self.models), *found.new])
            except (ConfigError, OSError) as error:
                raise ApiError(503, f"the models cannot be listed again: {error}") from error
            self.models += map(self._make, found.new)
            for model in list(self.models):
                is_idle = model.state in ("unloaded", "sleeping") and model not in self._waiting
                if is_idle and not found.names & set(model.serving.names) and len(self.models) > 1:
                    self.models.remove(model)

    def wait_in_words(self, model: PooledModel) -> str:
        """Returns the reason why a request for a model has to wait, in one line."""
        if model.state != "loading":
            return f"{model.name} waits for the end of other models' requests"
        last = "" if model.last_load_s is None else f"; its last load took {model.last_load_s:.0f} s"
        return f"{model.name} has been loading for {_now() - model.began_s:.0f} s{last}"

    # Internal methods.

    def _loaded(self) -> list[PooledModel]:
        return [model for model in self.models if model.state == "loaded"]

    async def _wait_for(self, model: PooledModel) -> None:
        """Waits until the model is loaded. This request is then already counted as a user of the model."""
        entered = asyncio.get_running_loop().create_future()
        wait = self._waiting.setdefault(model, _Wait())
        wait.entered.append(entered)
        self._look()
        try:
            await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled() and entered.exception() is None:
                model.n_users -= 1  # _let_in had already counted this request
            if entered in wait.entered:
                wait.entered.remove(entered)
            is_over = not (wait.entered or wait.is_asked) and model.state != "loading"
            if is_over and self._waiting.get(model) is wait:
                del self._waiting[model]
            self._look()
            raise

    def _refuse_waiting(self) -> None:
        for wait in self._waiting.values():
            for entered in wait.entered:
                if not entered.done():
                    entered.set_exception(unavailable("draining"))
        self._waiting.clear()
        self._look()

    def _look(self) -> None:
        """Serves the requests that have waited longest, and puts idle models to sleep. Call it after each change."""
        self._changed.set()
        if not self._is_draining:
            self._serve_waiting()
            self._put_to_sleep()
        self._starting = [model for model in self._starting if model in self._waiting]
        if self._started is not None and not self._starting and not self._started.done():
            self._started.set_result(None)

    def _serve_waiting(self) -> None:
        before, self._closing = self._closing, set()
        for model, wait in list(self._waiting.items()):
            if model.state != "loaded":
                if any(each.state in ("loading", "unloading") for each in self.models):
                    self._closing = before  # _look runs again when the load or unload ends
                else:
                    self._make_room(model, wait, before)
                return
            if not model.is_leaving:
                self._let_in(model)

    def _let_in(self, model: PooledModel) -> None:
        for entered in self._waiting.pop(model).entered:
            if not entered.done():
                model.n_users += 1
                entered.set_result(None)

    def _make_room(self, model: PooledModel, wait: _Wait, before: set[PooledModel]) -> None:
        """Loads the model if it fits. Otherwise unloads idle models, or lets busy models end their work.

        Args:
            before: the models that already accept no new requests.
        """
        leaving = self._leaving_for(model, before)
        busy = [each for each in leaving if each.n_users]
        left_s = 0.0 if self.options.in_order else wait.since_s + model.load_s - _now()
        if not leaving:
            self._begin_load(model)
        elif not busy:
            for each in leaving:
                self._begin_close(each)
        elif left_s > 0:
            self._later(None, left_s)
        else:
            self._closing.update(busy)

    def _leaving_for(self, model: PooledModel, before: set[PooledModel]) -> list[PooledModel]:
        """Returns the loaded models that must be unloaded to make room for this model. Idle models go first, then
        busy models in `before`, which accept no new requests, then other busy models. In each group, the least recently
        used model goes first."""
        staying = sorted(self._loaded(), key=lambda each: (each.n_users > 0, each not in before, each.used_s))
        leaving = []
        while staying and not self._fit([*staying, model]):
            leaving.append(staying.pop(0))
        return leaving

    def _fit(self, models: list[PooledModel]) -> bool:
        """Returns True if these models can be loaded together."""
        options = self.options
        if options.max_loaded and len(models) > options.max_loaded:
            return False
        needs = [each.spec.bytes for each in models]
        return all(sum(need) <= free for need, free in zip(zip(*needs, strict=True), options.free_bytes, strict=True))

    def _put_to_sleep(self) -> None:
        for model in self._loaded():
            left_s = self.left_s(model)
            if left_s is None or model.n_users or model.is_leaving or model in self._waiting:
                continue
            if any(part.has_work for part in model.serving.parts):
                model.used_s = _now()
                self._later(model, _WORK_S)
                continue
            if left_s <= 0:
                self._begin_close(model, "sleeping")
            else:
                self._later(model, left_s)

    def _begin_load(self, model: PooledModel) -> None:
        model.state, model.error = "loading", None
        self._begin(self._load(model))

    async def _load(self, model: PooledModel) -> None:
        error = await self._load_once(model)
        while isinstance(error, MemoryPlanError):
            # Memory that was free when the models were planned is now in use by other programs. To make room, an idle
            # model is unloaded.
            idle = min(
                (each for each in self._loaded() if not each.n_users), key=lambda each: each.used_s, default=None
            )
            if idle is None:
                break
            await self._begin_close(idle)
            error = await self._load_once(model)
        if error is None:
            model.state, model.used_s = "loaded", _now()
        else:
            model.state, model.error = "unloaded", error
            logger.warning("%s could not be loaded: %s", model.name, error)
            refusal = f"the model {model.name} could not be loaded: {error}"
            wait = self._waiting.pop(model, None)
            for entered in wait.entered if wait is not None else ():
                if not entered.done():
                    entered.set_exception(ApiError(503, refusal, type="unavailable_error", code="model_failed"))
        self._look()

    @staticmethod
    async def _load_once(model: PooledModel) -> BaseException | None:
        """Loads a model. After an error, frees what was loaded and returns the error."""
        model.n_loads += 1
        model.began_s = _now()
        try:
            await asyncio.wrap_future(model.serving.start())
        except Exception as error:
            await model.serving.aclose()
            return error
        model.last_load_s = _now() - model.began_s
        logger.info("%s is loaded after %.1f s", model.name, model.last_load_s)
        return None

    def _begin_close(self, model: PooledModel, state: ModelState = "unloaded") -> asyncio.Task[None]:
        model.state = "unloading"
        return self._begin(self._close(model, state))

    async def _close(self, model: PooledModel, state: ModelState) -> None:
        try:
            with contextlib.suppress(ApiError, EngineClosedError):
                await live_of(model.serving).look()  # stores the last figures for /metrics
            await model.serving.aclose()
        except Exception:
            logger.exception("%s could not be unloaded in good order", model.name)
        model.state = state
        logger.info("%s is %s", model.name, state)
        self._look()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)  # keeps the task alive, because asyncio has only a weak reference
        task.add_done_callback(self._tasks.discard)
        return task

    def _later(self, which: PooledModel | None, seconds: float) -> None:
        before = self._timers.pop(which, None)
        if before is not None:
            before.cancel()
        self._timers[which] = asyncio.get_running_loop().call_later(max(seconds, _TICK_S), self._look)
