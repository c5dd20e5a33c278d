"""The upload of a file: multipart/form-data that is streamed to the disk, a block at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from llamabatch.server.batches.records import PURPOSE as BATCH
from llamabatch.server.batches.records import FileRecord, expiry_of, new_file_id, safe_name
from llamabatch.server.batches.store import Store
from llamabatch.server.http.errors import ApiError
from llamabatch.utils.checks import show
from llamabatch.utils.format import file_size

OVERHEAD_BYTES = 64 * 2**10  # maximum number of bytes in a body in addition to its file
_BLOCK = 2**20
_MOST_PARTS = 16
_MOST_FIELD = 4096  # maximum number of bytes in a field that is not a file
_MOST_HEADERS = 8192  # maximum number of bytes in the headers of a part
_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")
_FIELDS = ("purpose", *_EXPIRY)


async def receive_file(
    headers: Mapping[str, str], stream: AsyncIterator[bytes], store: Store, max_bytes: int
) -> FileRecord:
    """Stores the file of a body and returns the file's record.

    Args:
        headers: the headers of the request, with names in lower case.
        max_bytes: the largest size of the file.

    Raises:
        ApiError: 415: the body is not multipart/form-data. 400: the form is damaged, or has no file or no purpose. 413:
            the file is too large. 507: there is no room.
    """
    form = Form(headers.get("content-type", ""))
    file_id, loop = new_file_id(), asyncio.get_running_loop()
    await loop.run_in_executor(None, store.check_count)
    file = await loop.run_in_executor(None, store.unfinished(file_id).open, "wb")
    try:
        async for chunk in stream:
            form.feed(chunk)
            if form.file_bytes > max_bytes:
                raise ApiError(
                    413,
                    f"the file has more than {file_size(max_bytes)} ({max_bytes:,} bytes), which is the limit here "
                    "(--max-file-bytes)",
                    headers={"Connection": "close"},
                )
            if len(form.data) >= _BLOCK:
                await _whole(loop.run_in_executor(None, _write, store, file, form.take()))
        form.finish()
        await _whole(loop.run_in_executor(None, _write, store, file, form.take()))
        record = _record(form, file_id, int(store.clock()))
        await _whole(loop.run_in_executor(None, _finish, store, file, record))
    except BaseException:
        await asyncio.shield(loop.run_in_executor(None, _discard, store, file, file_id))
        raise
    return record


async def _whole(work: asyncio.Future[None]) -> None:
    """Waits until a thread has finished its work, even if the task is cancelled. The caller can then close the file."""
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


def _discard(store: Store, file: BinaryIO, file_id: str) -> None:
    try:
        file.close()
    except OSError:  # a full disk has no room for the rest of the buffer either
        pass
    finally:
        store.discard(file_id)


def _write(store: Store, file: BinaryIO, data: bytes) -> None:
    store.reserve(len(data))
    try:
        file.write(data)
    finally:
        store.written(len(data))


def _finish(store: Store, file: BinaryIO, record: FileRecord) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
    store.add_file(record)


def _record(form: Form, file_id: str, now: int) -> FileRecord:
    fields = form.fields
    if form.filename is None:
        raise ApiError(400, "the form has no file; send it as a part named file, with a filename", param="file")
    for name in fields:
        if name not in _FIELDS:
            raise ApiError(400, f"a form has no field {show(name)}; it has file, {', '.join(_FIELDS)}", param=name)
    if fields.get("purpose") != BATCH:
        given = show(fields["purpose"]) if "purpose" in fields else "not given"
        raise ApiError(400, f"purpose is {given}; only {BATCH!r} is known here", param="purpose")
    given_expiry = {name[len("expires_after[") : -1]: fields[name] for name in _EXPIRY if name in fields}
    expiry: dict[str, Any] = dict(given_expiry)
    if str(expiry.get("seconds", "")).isdecimal() and len(expiry["seconds"]) < 12:
        expiry["seconds"] = int(expiry["seconds"])
    seconds = expiry_of(expiry or None)
    expires_at = None if seconds is None else now + seconds
    return FileRecord(file_id, form.file_bytes, now, safe_name(form.filename), BATCH, expires_at)


@dataclass
class _Part:
    n_header_bytes: int = 0
    name: str = ""
    is_file: bool = False
    value: bytearray | None = None


class Form:
    """A parser for a body of multipart/form-data that comes in pieces.

    Attributes:
        fields: the fields that are not a file.
        filename: the client's name of the file; None: no file has come.
        file_bytes: the size of the file so far.
        data: the bytes of the file that `take` has not returned yet.

    Raises:
        ApiError: the body is not a form, or the form exceeds a limit.
    """

    def __init__(self, content_type: str) -> None:
        from python_multipart.multipart import MultipartParser, parse_options_header

        self._parse_options = parse_options_header
        kind, options = parse_options_header(content_type)
        if kind.lower() != b"multipart/form-data":
            raise ApiError(415, f"content-type is {show(content_type)}; send the file as multipart/form-data")
        boundary = options.get(b"boundary")
        if not boundary or len(boundary) > 256:
            raise ApiError(400, f"content-type is {show(content_type)}, without a boundary of 1 to 256 characters")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        self.file_bytes = 0
        self.data = bytearray()
        self._n_parts = 0
        self._part = _Part()
        self._field = self._value = b""
        self._has_ended = False
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value", "header_end", "end")
        callbacks: Any = {f"on_{name}": getattr(self, f"_on_{name}") for name in names}
        callbacks["on_headers_finished"] = self._on_headers
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, data: bytes) -> None:
        """Parses the next bytes of the body."""
        from python_multipart.exceptions import FormParserError

        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(400, f"this is no multipart/form-data: {error}") from error

    def finish(self) -> None:
        """Checks that the form is complete. Raises ApiError if the body ended too early."""
        if not self._has_ended:
            raise ApiError(400, "the form ends before its last boundary")

    def take(self) -> bytes:
        """Returns the bytes of the file that have come since the last call."""
        data, self.data = bytes(self.data), bytearray()
        return data

    def _on_part_begin(self) -> None:
        self._n_parts += 1
        if self._n_parts > _MOST_PARTS:
            raise ApiError(400, f"the form has more than {_MOST_PARTS} parts")
        self._part = _Part()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._count_headers(end - start)

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._count_headers(end - start)

    def _count_headers(self, n_bytes: int) -> None:
        self._part.n_header_bytes += n_bytes
        if self._part.n_header_bytes > _MOST_HEADERS:
            raise ApiError(400, f"a part of the form has headers of more than {_MOST_HEADERS} bytes")

    def _on_header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            _, options = self._parse_options(self._value)
            self._part.name = options.get(b"name", b"").decode(errors="replace")
            filename = options.get(b"filename")
            if filename is not None:
                self._part.is_file = True
                if self._part.name != "file" or self.filename is not None:
                    raise ApiError(
                        400,
                        "the form has a second file, or a file in another part; send one, in the part named file",
                        param="file",
                    )
                self.filename = filename.decode(errors="replace")
        self._field = self._value = b""

    def _on_headers(self) -> None:
        if not self._part.name:
            raise ApiError(400, "a part of the form has no name")
        if not self._part.is_file:
            self._part.value = bytearray()

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part.value is None:
            self.file_bytes += end - start
            self.data += data[start:end]
        elif len(self._part.value) + end - start > _MOST_FIELD:
            raise ApiError(400, f"{show(self._part.name)} has more than {_MOST_FIELD} bytes", param=self._part.name)
        else:
            self._part.value += data[start:end]

    def _on_part_end(self) -> None:
        if self._part.value is not None:
            if self._part.name in self.fields:
                raise ApiError(400, f"{show(self._part.name)} comes twice", param=self._part.name)
            self.fields[self._part.name] = self._part.value.decode(errors="replace")

    def _on_end(self) -> None:
        self._has_ended = True
