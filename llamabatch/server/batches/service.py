"""The files and batches of one Serving: where they are stored, and when they run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import platformdirs

from llamabatch.client.base import EngineClient
from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, LlamaBatchError
from llamabatch.gguf.resolve import model_identity
from llamabatch.jobs.output.output import OutputOptions
from llamabatch.jobs.output.records import RecordOptions
from llamabatch.jobs.rows import ReadOptions
from llamabatch.jobs.settings import Settings
from llamabatch.server.batches.runner import Batches, ReadLine
from llamabatch.server.batches.store import Store
from llamabatch.server.http.errors import ApiError
from llamabatch.server.serving.serving import Serving

logger = logging.getLogger(__name__)

ReaderOf = Callable[[Serving, str], ReadLine]

# Options of the engine that are not passed to a job. A job refuses them or sets its own values.
_OF_THE_SERVER = ("model", "max_queue", "isolate")


class BatchService:
    """The files and batches of a server. The methods wait for the disk, so call none of them on the event loop.

    If `data_dir` is set, its folder is opened before the model is loaded. The default folder is made with the first
    file, so that a server without files writes nothing.

    Args:
        serving: the model.
        reader_of: returns the reader for the lines of an endpoint.
    """

    def __init__(self, serving: Serving, reader_of: ReaderOf) -> None:
        self._serving = serving
        self._reader_of = reader_of
        self._store: Store | None = None
        self._batches: Batches | None = None
        self._mutex = threading.RLock()

    def open(self) -> None:
        """Opens the folder `data_dir` if it is set, before the model is loaded. Raises ConfigError as Store does."""
        options = self._serving.options
        if options.batches and options.data_dir is not None:
            with self._mutex:
                if self._store is None:
                    self._store = Store(Path(options.data_dir), options.max_disk_bytes)

    def start(self) -> None:
        """Continues the batches of an earlier process, once the model is loaded."""
        if not self._serving.options.batches:
            return
        try:
            with self._mutex:
                if self._store is not None or self._folder().exists():
                    self._started()
        except Exception as error:  # the server still serves other requests
            known = isinstance(error, (LlamaBatchError, ApiError, OSError))
            logger.warning("there are no batches on this server: %s", error, exc_info=not known)

    def take_over(self) -> bool:
        """Opens the folder and continues its batches. Returns False if the folder is in use or cannot be written."""
        with self._mutex:
            try:
                self._started()
            except ConfigError:
                return False
        return True

    def look(self) -> Batches | None:
        """Returns the batches; None: no file was ever uploaded. Does not make the folder. Raises ApiError."""
        if self._serving.options.batches:
            self._serving.check_ready()
            with self._mutex:
                if self._store is None and not self._folder().exists():
                    return None
        return self.batches()

    def batches(self) -> Batches:
        """Returns the batches. Makes and opens their folder if needed. Raises ApiError."""
        if not self._serving.options.batches:
            raise ApiError(501, "this server takes no files and no batches; start it without --no-batches")
        self._serving.check_ready()
        with self._mutex:
            try:
                return self._started()
            except ConfigError as error:
                raise ApiError(503, str(error), code="batches_unavailable") from error

    @property
    def has_work(self) -> bool:
        """True while a batch runs or may begin."""
        batches = self._batches
        return batches is not None and batches.has_work

    def stop(self) -> None:
        """Interrupts all batches, and releases the folder. May be called twice. `start` may be called again."""
        with self._mutex:
            batches, self._batches = self._batches, None
            store, self._store = self._store, None
        if batches is not None:
            batches.stop()
        if store is not None:
            store.close()

    def _started(self) -> Batches:
        if self._batches is None:
            if self._store is None:
                self._store = Store(self._folder(), self._serving.options.max_disk_bytes)
            self._batches = Batches(self._store, ServingHost(self._serving, self._reader_of))
            self._batches.start()
        return self._batches

    def _folder(self) -> Path:
        options = self._serving.options
        if options.data_dir is not None:
            return Path(options.data_dir)
        model = self._serving.model.path
        return usual_folder() / f"{model.stem}-{model_identity(model)['sha256'][:12]}"


def usual_folder() -> Path:
    """Returns the default folder, for a server without `data_dir`. The folder contains one folder for each model."""
    return Path(platformdirs.user_data_dir("llamabatch", appauthor=False)) / "server"


class ServingHost:
    """The engine of a Serving, for batches."""

    def __init__(self, serving: Serving, reader_of: ReaderOf) -> None:
        self._serving = serving
        self._reader_of = reader_of

    @property
    def client(self) -> EngineClient:
        return self._serving.client

    def model_identity(self) -> dict[str, Any]:
        return model_identity(self._serving.model.path)

    def settings(self, source: Path, journal: Path) -> Settings:
        serving = self._serving
        return Settings(
            (str(source),),
            str(journal),
            model=str(serving.model.path),
            reading=ReadOptions(),
            # `force` lets a job continue with its remaining lines after a restart with other options.
            writing=OutputOptions(
                order="finished", force=True, records=RecordOptions(shape="openai", times=True, model=serving.names[0])
            ),
            engine=_options_of(serving.config),
            max_start_errors=0,
        )

    def reader(self, endpoint: str) -> ReadLine:
        return self._reader_of(self._serving, endpoint)


def _options_of(config: EngineConfig) -> dict[str, Any]:
    return {each.name: getattr(config, each.name) for each in fields(config) if each.name not in _OF_THE_SERVER}
