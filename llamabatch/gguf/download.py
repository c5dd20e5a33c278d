"""Downloads models from https addresses into the cache folder, resumes broken downloads, and checks the files."""

from __future__ import annotations

import base64
import contextlib
import email.message
import hashlib
import json
import math
import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from llamabatch.errors import ModelFileError
from llamabatch.gguf.header import part_names
from llamabatch.utils import paths
from llamabatch.utils.atomic_file import write_text
from llamabatch.utils.network import public, reachable
from llamabatch.utils.progress import DownloadBar
from llamabatch.utils.system import lock

TIMEOUT_S = 30.0  # seconds without a byte until a connection counts as broken
MOST_TRIES = 5  # the download fails after this many consecutive connections without a new byte
RECORD = ".json"  # suffix of the file with a model's Record, next to the model
PART = ".part"
_CHUNK = 2**20
_MAGIC = b"GGUF"
_SHA256 = re.compile("[0-9a-f]{64}")
_HUB = "https://huggingface.co"
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Record:
    """The facts about a file, as given by a server.

    Attributes:
        url: the address without parts that may be secret.
        n_bytes: size of the file; None if the server does not say.
        etag: the server's name for this version; None if the server gives none.
        sha256: digest of the file; None if the server gives none.
    """

    url: str
    n_bytes: int | None = None
    etag: str | None = None
    sha256: str | None = None


def models_folder() -> Path:
    """Returns the folder of models that were downloaded from addresses. The folder need not exist."""
    return paths.cache_dir() / "models"


def download(url: str) -> Path:
    """Returns the local file of an address, or the first of its parts.

    The file comes from the cache if the server has no other version or cannot be reached. Otherwise it is downloaded,
    with a progress bar on a terminal. If two processes need the same file, it is downloaded once.

    Args:
        url: address (https or http) of a .gguf file. An address of a file's page on Hugging Face means the file.
            Hugging Face's token (from HF_TOKEN or `hf auth login`) is sent only to its own host.

    Raises:
        ModelFileError: the server cannot be reached, refuses the request or sends unexpected data; the disk is full.
    """
    url = _file_address(url)
    split = urlsplit(url)
    before, _, name = split.path.rpartition("/")
    names = part_names(unquote(name))
    addresses = [urlunsplit(split._replace(path=f"{before}/{quote(each)}")) for each in names]
    if len(names) == 1:
        addresses = [url]
    # Only the public part is hashed, because the signature in an address differs each time.
    folder = models_folder() / hashlib.sha256(public(addresses[0]).encode(errors="replace")).hexdigest()[:20]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            for address, part in zip(addresses, names, strict=True):
                _fetch(address, folder / part)
    except OSError as error:
        raise ModelFileError(f"{public(url)} cannot be kept in {folder}: {error}") from error
    return folder / names[0]


def _file_address(url: str) -> str:
    """Returns the address of the file itself. Raises ModelFileError."""
    try:
        url.encode()  # raises UnicodeEncodeError, a ValueError, for half of a surrogate pair
        split = urlsplit(url)
        is_file = bool(split.hostname) and split.path.lower().endswith(".gguf")
    except ValueError:
        is_file = False
    if not is_file or any(character <= " " for character in url):
        raise ModelFileError(f"{public(url)} is no address of a model; give that of a .gguf file")
    if split.hostname == urlsplit(_hub()).hostname and "/blob/" in split.path:  # the address of a file's page
        split = split._replace(path=split.path.replace("/blob/", "/resolve/", 1))
    return urlunsplit(split._replace(fragment=""))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as file:
        lock(file.fileno(), patience=math.inf)
        yield


def _fetch(url: str, path: Path) -> None:
    """Puts the file of an address at `path`. Raises ModelFileError, OSError."""
    known = _read_record(path) if path.exists() else None
    if known is not None and (_offline() or not reachable(url)):
        return
    if _offline():
        raise ModelFileError(f"{public(url)} is not in the cache, and HF_HUB_OFFLINE is set")
    if not reachable(url):
        raise ModelFileError(f"{public(url)} cannot be fetched: {urlsplit(url).hostname} is out of reach")
    part = path.with_name(path.name + PART)
    n_failures = 0
    while True:
        had = part.stat().st_size if part.exists() else 0
        try:
            if _transfer(url, path, part, known):
                return
        except urllib.error.HTTPError as error:
            with error:
                if known is not None:  # the cached file is still good, although the address no longer works
                    return
                raise ModelFileError(f"{public(url)} cannot be fetched: {_refusal(error, url)}") from None
        except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
            if known is not None:
                return
            n_failures = 0 if part.exists() and part.stat().st_size > had else n_failures + 1
            if n_failures >= MOST_TRIES or not reachable(url):
                why = getattr(error, "reason", None) or error or type(error).__name__
                raise ModelFileError(
                    f"{public(url)} cannot be fetched: {why}; the same command continues "
                    f"after the {had:,} bytes that it has"
                ) from None


def _transfer(url: str, path: Path, part: Path, known: Record | None) -> bool:
    """Makes one connection. Returns True if `path` is now complete, and False if the partial file had to be removed.

    Raises ModelFileError, OSError, HTTPException.
    """
    begun = _read_record(part) if part.exists() else None
    had = part.stat().st_size if begun is not None and begun.etag is not None else 0
    headers = {"Accept-Encoding": "identity", "User-Agent": "llamabatch"}
    if known is not None and known.etag is not None:
        headers["If-None-Match"] = known.etag
    elif had and begun is not None and begun.etag is not None:
        headers |= {"Range": f"bytes={had}-", "If-Range": begun.etag}
    redirects = _Redirects()
    try:
        response = urllib.request.build_opener(redirects).open(_request(url, headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code == 304:
            return True
        if error.code != 416 or not had:
            raise
        part.unlink()  # the partial file is longer than the server's file
        return False
    with response:
        record, start = _facts(url, response, redirects.passed)
        if known is not None and known.etag is None and record.n_bytes == path.stat().st_size:
            return True
        if start not in (0, had):
            part.unlink(missing_ok=True)
            return False
        _check_room(record, start, path.parent, url)
        write_text(_record_of(part), json.dumps(asdict(record)))
        digest = _write(response, part, start, record)
    n_bytes = part.stat().st_size
    if record.n_bytes is not None and n_bytes < record.n_bytes:
        raise ConnectionError(f"the connection ended after {n_bytes:,} of {record.n_bytes:,} bytes")
    if (record.n_bytes is not None and n_bytes > record.n_bytes) or (record.sha256 and digest != record.sha256):
        part.unlink()
        what = f"sha256 is {digest}" if n_bytes == record.n_bytes else f"size is {n_bytes:,} bytes"
        wanted = record.sha256 if n_bytes == record.n_bytes else f"{record.n_bytes:,}"
        raise ModelFileError(f"{public(url)} arrived damaged: its {what}, but the server says {wanted}; fetch it again")
    write_text(_record_of(path), json.dumps(asdict(record)))
    part.replace(path)
    _record_of(part).unlink(missing_ok=True)
    return True


def _write(response: HTTPResponse, part: Path, start: int, record: Record) -> str:
    """Writes the bytes from `start` on. Returns the file's sha256, which is wrong if a download is continued without
    `record.sha256`.

    Raises ModelFileError, OSError, HTTPException.
    """
    digest = hashlib.sha256()
    if start and record.sha256:
        with part.open("rb") as begun:
            while piece := begun.read(_CHUNK):
                digest.update(piece)
    name = part.name.removesuffix(PART)
    with part.open("ab" if start else "wb") as file, DownloadBar(name, start, record.n_bytes) as bar:
        while piece := response.read(_CHUNK):
            if file.tell() == 0 and not piece.startswith(_MAGIC[: len(piece)]):
                raise ModelFileError(f"{record.url} is not a GGUF file: it begins with {piece[:16]!r}")
            file.write(piece)
            if record.sha256:
                digest.update(piece)
            bar.advance(len(piece))
    return digest.hexdigest()


def _facts(url: str, response: HTTPResponse, passed: list[email.message.Message]) -> tuple[Record, int]:
    """Reads the headers of the response and of redirects. Returns the file's Record, and the offset of the first byte
    sent.

    The offset is -1 if the server's Content-Range cannot be parsed.
    """
    headers = [*passed, response.headers]

    def header(name: str) -> str | None:
        return next((found for each in headers if (found := each.get(name))), None)

    start, n_bytes = 0, response.headers.get("Content-Length")
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", ""))
        if match is None:
            return Record(public(url)), -1
        start, n_bytes = int(match[1]), match[2]
    size = header("X-Linked-Size") or n_bytes
    etag = response.headers.get("ETag")
    named = [header("X-Linked-Etag"), etag]  # the hub's etags of large files are digests
    digests = [text.strip('"').lower() for text in named if text]
    if found := re.search(r"sha-256=:?([A-Za-z0-9+/=]+?):?(?:,|$)", header("Repr-Digest") or header("Digest") or ""):
        with contextlib.suppress(ValueError):
            digests.insert(0, base64.b64decode(found[1]).hex())
    sha256 = next((text for text in digests if _SHA256.fullmatch(text)), None)
    strong = etag if etag is not None and not etag.startswith("W/") else None
    return Record(public(url), int(size) if size and size.isdigit() else None, strong, sha256), start


def _check_room(record: Record, start: int, folder: Path, url: str) -> None:
    left = (record.n_bytes or 0) - start
    free = shutil.disk_usage(folder).free
    if left > free:
        raise ModelFileError(
            f"{public(url)} needs {left / 1e9:.1f} GB more in {folder}, where {free / 1e9:.1f} GB are free; make room, "
            "or set LLAMABATCH_CACHE to another disk"
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, except from https to http, and keeps the headers of each redirect."""

    def __init__(self) -> None:
        self.passed: list[email.message.Message] = []

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self.passed.append(headers)
        scheme = urlsplit(newurl).scheme
        if scheme not in ("https", "http") or (scheme == "http" and req.type == "https"):
            raise urllib.error.HTTPError(public(req.full_url), code, f"it leads to {public(newurl)}", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _request(url: str, headers: dict[str, str]) -> urllib.request.Request:
    """Returns a request. Its secrets are in headers that urllib drops after a redirect."""
    split = urlsplit(url)
    user, _, host = split.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit(split._replace(netloc=host)), headers=headers)
    if user:
        code = base64.b64encode(unquote(user).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {code}")
    elif (token := _token(split.hostname or "", split.scheme)) is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT") or _HUB


def _token(host: str, scheme: str) -> str | None:
    """Returns the hub's token if `host` is the hub, else None. Over http, only a hub on this machine gets a token."""
    if host != urlsplit(_hub()).hostname or (scheme != "https" and host not in _LOCAL):
        return None
    token = os.environ.get("HF_TOKEN") or os.environ.get("HUGGING_FACE_HUB_TOKEN")
    if not token:
        file = Path(os.path.expanduser(os.environ.get("HF_TOKEN_PATH") or str(paths.hub_home() / "token")))
        with contextlib.suppress(OSError, ValueError):
            token = file.read_text(encoding="utf-8")
    token = "".join((token or "").split())
    return token if token.isascii() and token else None


def _refusal(error: urllib.error.HTTPError, url: str) -> str:
    text = f"the server says {error.code} {error.reason}"
    if error.code in (401, 403):
        if urlsplit(url).hostname == urlsplit(_hub()).hostname:
            return f"{text}; the model may be private or gated: set HF_TOKEN to a token that may read it"
        return f"{text}; it wants a user and a password, or the address has expired"
    return text


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").strip().upper() in ("1", "ON", "YES", "TRUE")


def _record_of(path: Path) -> Path:
    return path.with_name(path.name + RECORD)


def _read_record(path: Path) -> Record | None:
    """Returns the record stored next to a file; None if there is no readable record."""
    return read_record(_record_of(path))


def read_record(file: Path) -> Record | None:
    """Reads a record from its file. Returns None if it cannot be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Record(**found)
    except (OSError, ValueError, TypeError):
        return None
