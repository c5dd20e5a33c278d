"""The records of a file and of a batch, in OpenAI's format and as JSON on the disk."""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from llamabatch.errors import InputError
from llamabatch.utils.checks import integer, mapping, show, string

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[Status] = frozenset(("failed", "completed", "expired", "cancelled"))

PURPOSE, OUTPUT_PURPOSE = "batch", "batch_output"
LEAST_EXPIRY_S, MOST_EXPIRY_S = 3600, 30 * 86400  # OpenAI's bounds for expires_after, in seconds
MAX_METADATA, MAX_KEY, MAX_VALUE = 16, 64, 512
_MOST_NAME = 200  # maximum number of characters in a file's name
_FILE_ID = re.compile(r"file-[0-9a-f]{24}")
_BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")


def new_file_id() -> str:
    """Returns a new id for a file. The id cannot be guessed."""
    return f"file-{secrets.token_hex(12)}"


def new_batch_id() -> str:
    """Returns a new id for a batch. The id cannot be guessed."""
    return f"batch_{secrets.token_hex(12)}"


def is_file_id(text: str) -> bool:
    return _FILE_ID.fullmatch(text) is not None


def is_batch_id(text: str) -> bool:
    return _BATCH_ID.fullmatch(text) is not None


def safe_name(name: str) -> str:
    """Returns a client's name for a file, without folders and without special characters of headers and terminals."""
    name = name.replace("\\", "/").rsplit("/", 1)[-1]
    kept = "".join(each for each in name if unicodedata.category(each)[0] not in "CZ" or each == " ")
    kept = kept.replace('"', "").strip(" .")[:_MOST_NAME]
    return kept or "file.jsonl"


@dataclass(frozen=True)
class FileRecord:
    """An uploaded file, or a file of results.

    Attributes:
        id: the id, which is also the name on the disk.
        bytes: the size of the content.
        created_at, expires_at: seconds since 1970; expires_at None: the file does not expire.
        filename: the name for people.
        purpose: "batch" or "batch_output".
    """

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str = PURPOSE
    expires_at: int | None = None

    def to_openai(self) -> dict[str, Any]:
        return {"id": self.id, "object": "file", **_but(asdict(self), "id"), "status": "processed"} | {
            "status_details": None
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> FileRecord:
        """Reads the record of a file from a document on the disk. Raises KeyError or TypeError for other documents."""
        return cls(**{each.name: document[each.name] for each in fields(cls)})


@dataclass(frozen=True)
class BatchRecord:
    """A batch and its state.

    Attributes:
        id: the id, which is also the name of the batch's folder.
        endpoint: the url in all lines, a path.
        input_file_id: the id of the input file.
        completion_window: the window as the caller wrote it, such as "24h".
        status: the status, named as in OpenAI's API.
        created_at … cancelled_at: when the batch entered each status, in seconds since 1970; None: not yet, or never.
        expires_at: the end of the window, in seconds since 1970.
        output_file_id, error_file_id: the ids of the result files; None: there is no file, or the batch has not ended.
        total, completed, failed: numbers of lines. They are updated from time to time while the batch runs.
        errors: the errors of the check, or the error that ended the batch: objects with code, line, message, param.
        metadata: the metadata of the caller.
        output_expires_s: the seconds after which the result files expire; None: they do not expire.
        model: name, size and digest of the model at the start of the batch.
        output_id, error_id: the ids of the result files, chosen before the files are written.
        ending: the status that follows "finalizing".
    """

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: Status = "validating"
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: tuple[Mapping[str, Any], ...] = ()
    metadata: Mapping[str, str] | None = None
    output_expires_s: int | None = None
    model: Mapping[str, Any] | None = None
    output_id: str = field(default_factory=new_file_id)
    error_id: str = field(default_factory=new_file_id)
    ending: Status | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def entered(self, status: Status, now: float, **more: Any) -> BatchRecord:
        """Returns the batch with another status, entered at `now`."""
        changed: dict[str, Any] = {"status": status, f"{status}_at": int(now), **more}
        return replace(self, **changed)

    def to_openai(self) -> dict[str, Any]:
        times = {each.name: getattr(self, each.name) for each in fields(self) if each.name.endswith("_at")}
        errors = None if not self.errors else {"object": "list", "data": [dict(each) for each in self.errors]}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": errors,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            **times,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": None if self.metadata is None else dict(self.metadata),
        }

    def document(self) -> dict[str, Any]:
        """Returns the record as the JSON object that is stored on the disk."""
        return asdict(self)

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> BatchRecord:
        """Reads the record of a batch from a document on the disk. Raises KeyError or TypeError for other documents."""
        values = {each.name: document[each.name] for each in fields(cls)}
        return cls(**{**values, "errors": tuple(values["errors"])})


def expiry_of(given: object, name: str = "expires_after") -> int | None:
    """Returns the seconds of {"anchor": "created_at", "seconds": …}; None: nothing is given. Raises InputError."""
    if given is None:
        return None
    values = mapping(given)
    if values is None or set(values) != {"anchor", "seconds"} or values["anchor"] != "created_at":
        raise InputError(f'{name} is {show(given)}; give {{"anchor": "created_at", "seconds": 86400}}')
    return integer(InputError, f"{name}.seconds", values["seconds"], LEAST_EXPIRY_S, MOST_EXPIRY_S)


def metadata_of(given: object) -> dict[str, str] | None:
    """Returns the metadata of a caller: texts by name. Raises InputError."""
    if given is None:
        return None
    values = mapping(given)
    if values is None or len(values) > MAX_METADATA:
        raise InputError(f"metadata is {show(given)}; give an object with at most {MAX_METADATA} texts")
    for name, value in values.items():
        if string(name) is None or not 1 <= len(name) <= MAX_KEY:
            raise InputError(f"metadata has the name {show(name)}; names have 1 to {MAX_KEY} characters")
        if string(value) is None or len(value) > MAX_VALUE:
            raise InputError(f"metadata.{name} is {show(value)}; give a text of at most {MAX_VALUE} characters")
    return dict(values)


def _but(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
