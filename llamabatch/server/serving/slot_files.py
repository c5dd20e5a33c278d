"""SlotFiles: saves the text of a request with an id_slot to a file, and loads it again, for POST /slots/N?action=…."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.saved_prefix import CROWDED, ONE_TOKEN, TRIES, tokens_to_save
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import EngineError, InputError
from llamabatch.request.outputs import RequestOutput
from llamabatch.server.http.errors import ApiError
from llamabatch.server.serving.serving import Serving
from llamabatch.utils.checks import show

LEAST_FREE = 2**30  # bytes of the file system that stay free


class SlotFiles:
    """The files in the folder `slot_save_path` of a server, and the last text of each id_slot.

    The scheduler gives a request any free slot, so a slot's number is only a name here. `save` writes the prompt and
    the answer of the last request that named the number. `restore` loads a file for every later request that begins
    with its tokens, whatever number this request names.
    """

    def __init__(self, serving: Serving, folder: str) -> None:
        self._serving = serving
        self._folder = Path(folder)
        self._texts: dict[int, tuple[int, ...]] = {}  # number -> the tokens of its last request
        self._restored: dict[int, Path] = {}  # number -> the file that was loaded for it

    def noted(self, number: int | None) -> Callable[[RequestOutput], None] | None:
        """Returns a function that keeps the tokens of a finished request with this id_slot; None: nothing is kept."""
        if number is None or not 0 <= number < self._serving.admission.n_slots:
            return None
        return partial(self._note, number)

    def _note(self, number: int, output: RequestOutput) -> None:
        if output.error is None:
            # The last token of an answer is not computed before a next request begins with it.
            self._texts[number] = (*output.prompt_token_ids, *output.outputs[0].token_ids[:-1])

    async def save(self, number: int, name: object) -> tuple[int, int]:
        """Writes the last text of a number to a file. Returns the numbers of tokens and of bytes.

        Raises:
            ApiError: no request has named the number, its text has a picture or a sound, or the name is no file name
                (400); the disk is full (507). InputError: the text is too short, or the file cannot be written.
            EngineError: other requests needed the cells.
        """
        path = self._path(name)
        token_ids = self._texts.get(number)
        if token_ids is None:
            raise ApiError(400, f"no request has named id_slot {number} yet", param="id_slot")
        if min(token_ids) < 0:
            raise ApiError(400, "the text has a picture or a sound; only texts can be saved", param="id_slot")
        serving, saved = self._serving, tokens_to_save(token_ids)
        await serving.on_thread(self._make_room)

        def prepared(processor: InputProcessor) -> Submission:
            return processor.prompts(saved, ONE_TOKEN, None, "raise")

        for _ in range(TRIES):
            if await serving.on_thread(partial(serving.client.call, "save_prefix", saved, str(path))):
                return len(saved), path.stat().st_size
            await (await serving.submit(prepared)).outputs()
        raise EngineError(CROWDED)

    async def restore(self, number: int, name: object) -> tuple[int, int]:
        """Loads a file, and frees the file that was loaded for this number before. Returns the numbers of tokens and of
        bytes. Raises ApiError (400) if the file is missing, damaged or of another model."""
        path, client = self._path(name), self._serving.client
        n_tokens: int = await self._serving.on_thread(partial(client.call, "load_prefix", str(path)))
        if self._restored.get(number) != path:
            await self._free(number)
        self._restored[number] = path
        return n_tokens, path.stat().st_size

    async def erase(self, number: int) -> int:
        """Frees the file that was loaded for a number, and forgets its text. Returns the number of tokens of the
        text."""
        await self._free(number)
        return len(self._texts.pop(number, ()))

    async def _free(self, number: int) -> None:
        path = self._restored.pop(number, None)
        if path is None or path in self._restored.values():
            return
        with contextlib.suppress(InputError):  # the model was unloaded meanwhile, and its prefixes with it
            await self._serving.on_thread(partial(self._serving.client.call, "unload_prefix", str(path)))

    def _path(self, name: object) -> Path:
        if not isinstance(name, str) or not name or name.startswith(".") or not name.isprintable():
            raise ApiError(400, f"filename is {show(name)}; give the name of a file", param="filename")
        if any(sign in name for sign in '/\\:*?"<>|') or len(name.encode(errors="replace")) > 200:
            message = f"filename is {show(name)}; give a name without a folder, up to 200 bytes"
            raise ApiError(400, message, param="filename")
        return self._folder / name

    def _make_room(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if free < LEAST_FREE:
            raise ApiError(507, f"the file system of slot_save_path has {free / 2**20:.0f} MiB free; 1,024 stay free")
