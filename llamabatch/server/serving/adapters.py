"""Adapters of a server: the files of loaded adapters, and checks of files in requests."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path

from llamabatch.errors import AdapterError, ModelFileError
from llamabatch.server.http.errors import ApiError
from llamabatch.server.options import ServerOptions
from llamabatch.server.serving.serving import Serving
from llamabatch.utils.checks import show

logger = logging.getLogger(__name__)

MAX_NAME = 256
MAX_PATH = 4096


class AdapterFiles:
    """The files of a server's adapters. The methods block, so call them on a worker thread."""

    def __init__(self, serving: Serving) -> None:
        self._serving = weakref.ref(serving)
        self._paths = dict(serving.plan.config.adapters)
        self._lock = threading.Lock()  # allows one load or unload at a time

    def path(self, name: str) -> str:
        """Returns an adapter's path within the folder of adapters. If the file is in another folder, returns only its
        name. Returns "" for an unknown adapter."""
        path, serving = Path(self._paths.get(name, "")), self._serving()
        folder = None if serving is None else serving.options.lora_dir
        is_below = folder is not None and Path(os.path.realpath(folder)) in path.parents
        return str(path.relative_to(os.path.realpath(folder or ""))) if is_below else path.name

    def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Loads an adapter from the folder of adapters. Requests may give its name as their model.

        Args:
            in_place: True: a loaded adapter of this name is unloaded first. False: such an adapter is an error.

        Raises:
            ApiError: 400 if the name or the file is refused, 403 if the server has no folder of adapters or the file is
                outside of this folder, 404 if the file does not exist.
        """
        serving = self._checked(name)
        file = allowed_file(path, serving.options)
        with self._lock:
            if name in serving.client.adapters:
                if not in_place:
                    raise ApiError(
                        400,
                        f"the adapter {show(name)} is loaded already; give load_inplace to load it again",
                        code="adapter_exists",
                        param="lora_name",
                    )
                self._unload(serving, name)
            try:
                serving.client.call("load_adapter", name, str(file))
            except AdapterError as error:
                raise ApiError(400, str(error), param="lora_name") from error
            except ModelFileError as error:
                logger.warning("the adapter %s is refused: %s", show(name), error)
                raise ApiError(400, str(error), code="bad_adapter", param="lora_path") from error
            self._paths[name] = str(file)

    def unload(self, name: str) -> None:
        """Frees an adapter.

        Raises:
            ApiError: 404 if no adapter has this name, 409 while requests use it.
        """
        serving = self._serving()
        assert serving is not None
        with self._lock:
            if name not in serving.client.adapters:
                raise ApiError(
                    404,
                    f"there is no adapter {show(name)}; loaded are {', '.join(serving.client.adapters) or 'none'}",
                    code="adapter_not_found",
                    param="lora_name",
                )
            self._unload(serving, name)

    def _unload(self, serving: Serving, name: str) -> None:
        try:
            serving.client.call("unload_adapter", name)
        except AdapterError as error:
            raise ApiError(409, str(error), code="adapter_in_use", param="lora_name") from error
        self._paths.pop(name, None)
        scales = serving.options.default_adapters
        if name in scales:  # otherwise all requests without adapters would fail
            left = {other: scale for other, scale in scales.items() if other != name}
            serving.set_options(default_adapters=left)

    def _checked(self, name: str) -> Serving:
        serving = self._serving()
        assert serving is not None
        if not 1 <= len(name) <= MAX_NAME or not name.isprintable() or name != name.strip():
            raise ApiError(
                400,
                f"lora_name is {show(name)}; give 1 to {MAX_NAME} printable characters, without blanks at its ends",
                param="lora_name",
            )
        if name in serving.names:
            raise ApiError(
                400, f"lora_name is {show(name)}, which is the name of the model; give another one", param="lora_name"
            )
        return serving


def allowed_file(path: str, options: ServerOptions) -> Path:
    """Returns the file at a path from a request. After links are resolved, the file must be in the folder of adapters.

    Args:
        path: relative to the folder of adapters, or absolute.

    Raises:
        ApiError: 403 if there is no folder of adapters or the file is outside of this folder, 404 if the file does not
            exist, 400 if the path is invalid or is not a file.
    """
    if options.lora_dir is None:
        raise ApiError(
            403, "requests may not load adapters; start the server with --lora-dir and a folder", param="lora_path"
        )
    if not 1 <= len(path) <= MAX_PATH or "\0" in path:
        raise ApiError(400, f"lora_path is {show(path)}; give a file in the folder of adapters", param="lora_path")
    folder = Path(os.path.realpath(options.lora_dir))
    file = Path(os.path.realpath(folder / path))
    if folder not in file.parents:
        raise ApiError(
            403,
            f"lora_path is {show(path)}, which lies outside the folder of adapters (--lora-dir); give a file in it",
            code="path_not_allowed",
            param="lora_path",
        )
    if not file.exists():
        raise ApiError(
            404, f"lora_path is {show(path)}; there is no such file in the folder of adapters", param="lora_path"
        )
    if not file.is_file():
        raise ApiError(400, f"lora_path is {show(path)}, which is no file; give a GGUF file", param="lora_path")
    return file


_files: weakref.WeakKeyDictionary[Serving, AdapterFiles] = weakref.WeakKeyDictionary()


def files_of(serving: Serving) -> AdapterFiles:
    """Returns the AdapterFiles of a server. Raises ApiError before the model is loaded."""
    files = _files.get(serving)
    if files is None:
        files = _files.setdefault(serving, AdapterFiles(serving))
    return files
