"""SlotFiles: saves texts of requests with an id_slot to files, and loads the files again, for POST
/slots/N?action=…."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llamabatch.engine.prefix_file import has_media
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.saved_prefix import CROWDED, ONE_TOKEN, TRIES, tokens_to_save
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import ConfigError, InputError
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.http.errors import ApiError, retry_after
from llamabatch.server.serving.serving import Serving
from llamabatch.utils.checks import show

LEAST_FREE = 2**30  # minimum number of free bytes on the file system
MOST_NAME_BYTES = 200


class SlotFiles:
    """The files in the folder `slot_save_path` of a server, and the last text of each id_slot.

    The scheduler gives a request any free slot, so an id_slot is only a label for a text. `save` writes the prompt and
    the answer of the last request with this id_slot. `restore` loads a file. All later requests that begin with the
    file's tokens can use the file, whatever their id_slot.
    """

    def __init__(self, serving: Serving, folder: str) -> None:
        self._serving = serving
        self._folder = Path(folder)
        self._texts: dict[int, tuple[int, ...]] = {}  # number -> the tokens of its last request
        self._restored: dict[int, Path] = {}  # number -> the file that was loaded for the number
        self._lock = threading.Lock()  # no thread may free a file that another thread has just loaded again
        try:
            self._make_room()
        except InputError as error:
            raise ConfigError(str(error)) from error

    def noted(self, number: int) -> Callable[[RequestOutput], None] | None:
        """Forgets the text of an id_slot, because a new request uses the slot. Returns a function that stores the
        tokens of the finished request; None: no slot has this number."""
        self._texts.pop(number, None)
        return partial(self._note, number) if 0 <= number < self._serving.admission.n_slots else None

    def _note(self, number: int, output: RequestOutput) -> None:
        if output.error is None:
            # The last token of an answer is left out, because it has no cell yet.
            self._texts[number] = (*output.prompt_token_ids, *output.outputs[0].token_ids[:-1])

    async def save(self, number: int, name: object) -> tuple[int, int]:
        """Writes the last text of slot `number` to a file. Returns the numbers of tokens and of bytes.

        Raises:
            ApiError: 400: there is no text, `name` is not a file name, or other requests took the cells of a text with
                media. 503: the text was computed again several times, but other requests always took its cells.
            InputError: the text is too short, or the file cannot be written.
            ConfigError: no engine could load the file.
        """
        path = self._path(name)
        token_ids = self._texts.get(number)
        if token_ids is None:
            message = (
                f"the last request with id_slot {number} is not finished, has an adapter or a cache_salt, or is missing"
            )
            raise ApiError(400, message, param="id_slot")
        serving, saved = self._serving, tokens_to_save(token_ids)

        def prepared(processor: InputProcessor) -> Submission:
            return processor.prompts(saved, ONE_TOKEN, None, "raise")

        for _ in range(TRIES):
            n_bytes = await serving.on_thread(partial(self._save, saved, path))
            if n_bytes is not None:
                return len(saved), n_bytes
            if has_media(saved):  # media cannot be computed again from tokens
                message = (
                    "other requests took the cells of this text, which has pictures or sounds; send its prompt again "
                    "with the same id_slot, and save after that"
                )
                raise ApiError(400, message, param="id_slot")
            await (await serving.submit(prepared)).outputs()
        raise ApiError(503, CROWDED, headers=retry_after(1))

    def _save(self, token_ids: list[int], path: Path) -> int | None:
        """Returns the size of the written file in bytes; None: no slot has exactly these tokens."""
        self._make_room()
        if not self._serving.client.call("save_prefix", token_ids, str(path)):
            return None
        with contextlib.suppress(OSError):  # another program has removed the file
            path.chmod(0o600)
            return path.stat().st_size
        return 0

    async def restore(self, number: int, name: object) -> tuple[int, int]:
        """Loads a file for a number, and frees the file that was loaded earlier for this number. Returns the sizes of
        the file in tokens and in bytes. Raises InputError if the file is missing, damaged, or from another model."""
        return await self._serving.on_thread(partial(self._restore, number, self._path(name)))

    def _restore(self, number: int, path: Path) -> tuple[int, int]:
        with self._lock:
            n_tokens: int = self._serving.client.call("load_prefix", str(path))
            before = self._restored.get(number)
            self._restored[number] = path
            self._free(before)
        with contextlib.suppress(OSError):
            return n_tokens, path.stat().st_size
        return n_tokens, 0

    async def erase(self, number: int) -> int:
        """Forgets the text of the slot `number`, and frees the file that was loaded for this slot. Returns how many
        tokens the text had."""
        n_tokens = len(self._texts.pop(number, ()))
        await self._serving.on_thread(partial(self._erase, number))
        return n_tokens

    def _erase(self, number: int) -> None:
        with self._lock:
            self._free(self._restored.pop(number, None))

    def _free(self, path: Path | None) -> None:
        """Frees a file, unless it is still loaded for another number."""
        if path is not None and path not in self._restored.values():
            with contextlib.suppress(InputError):  # the model was unloaded meanwhile, with its prefixes
                self._serving.client.call("unload_prefix", str(path))

    def _path(self, name: object) -> Path:
        text = name if isinstance(name, str) and name.isprintable() else ""
        is_short = 0 < len(text.encode(errors="replace")) <= MOST_NAME_BYTES
        if is_short and not text.startswith(".") and not any(sign in text for sign in '/\\:*?"<>|'):
            return self._folder / text
        rule = f"a name without a folder and without a dot in front, up to {MOST_NAME_BYTES} bytes"
        raise ApiError(400, f"filename is {show(name)}; give {rule}", param="filename")

    def _make_room(self) -> None:
        """Makes the folder. Raises InputError if that fails, or if the file system is almost full."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            raise InputError(f"slot_save_path is {self._folder}, which cannot be used: {error.strerror}") from error
        if free < LEAST_FREE:
            raise InputError(f"the disk of slot_save_path has {free / 2**20:.0f} MiB free; 1,024 MiB must stay free")
