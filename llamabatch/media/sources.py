"""Reads media from allowed places outside a request: web addresses, or files below a folder."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import math
import os
import queue
import socket
import ssl
import threading
import time
from dataclasses import dataclass, replace
from pathlib import PurePath
from urllib.parse import SplitResult, quote, urljoin, urlsplit
from urllib.request import url2pathname

from llamabatch.errors import PromptError, describe
from llamabatch.utils.checks import show
from llamabatch.utils.network import public
from llamabatch.utils.version import __version__

FETCH_S = 10.0
"""Maximum seconds for one address with its redirections, and for all addresses of a prompt together."""
ANY_HOST = "*"
_MOST_HOPS = 5
_MOVED = (301, 302, 303, 307, 308)
_PIECE = 2**16
_KEPT = "/%:@!$&'()*+,;=~-._?[]"  # characters that are not percent-encoded in an address
_FAULTS = (OSError, http.client.HTTPException, ValueError)  # ValueError: the address is invalid
# These networks are not public, but older Python releases say that they are. 168.63.129.16 is a host service of Azure.
_NOT_PUBLIC = tuple(
    map(ipaddress.ip_network, ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32", "3fff::/20", "fec0::/10"))
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


@dataclass(frozen=True)
class MediaSources:
    """The addresses that may be read for a prompt, in addition to data: addresses.

    Attributes:
        folder: file:// addresses may name files below this folder; None: no file may be read.
        domains: the allowed hosts of http:// and https:// addresses; "*": any host. A host must have only public IP
            addresses.
        end: the time.monotonic() by which all reads must end.
    """

    folder: str | None = None
    domains: tuple[str, ...] = ()
    end: float = math.inf

    def from_now(self) -> MediaSources:
        """Returns these sources for one prompt. All downloads together may take FETCH_S seconds from now."""
        return replace(self, end=time.monotonic() + FETCH_S)

    def __bool__(self) -> bool:
        return self.folder is not None or bool(self.domains)

    def read(self, address: str, most_bytes: int, what: str = "a picture") -> bytes:
        """Returns the bytes at an address. Stops once there are more than `most_bytes` bytes.

        Args:
            what: the thing at the address, for messages.

        Raises:
            PromptError: the address is not allowed, or cannot be read.
        """
        try:
            parts = urlsplit(address)
            scheme, host = parts.scheme.lower(), parts.hostname or ""
        except ValueError as error:
            raise PromptError(f"{what} has the invalid address {show(address)}: {error}") from error
        if scheme == "file" and self.folder is not None:
            return _of_file(parts, self.folder, most_bytes, what)
        if scheme in ("http", "https") and self.domains:
            return _fetched(address, self.domains, most_bytes, what, min(self.end, time.monotonic() + FETCH_S))
        raise PromptError(f"{what} has the address {show(public(address))}; {self._allowed(scheme, host)}")

    def _allowed(self, scheme: str, host: str) -> str:
        if scheme in ("http", "https") and host:
            return (
                f"addresses are fetched only from hosts in allowed_media_domains: {host} is none of them; or give "
                "data:…;base64,…"
            )
        if scheme == "file":
            return "files are read only below allowed_local_media_path; or give data:…;base64,…"
        return "give data:…;base64,… with the bytes"


NOWHERE = MediaSources()


def _of_file(parts: SplitResult, folder: str, most_bytes: int, what: str) -> bytes:
    """Returns the bytes at a file:// address. As in llama-server, file://a/path is relative to `folder`. file:///a/path
    is absolute, or relative to `folder` if the absolute path is not below `folder`."""
    name = url2pathname(parts.path if parts.netloc in ("", "localhost") else parts.netloc + parts.path)
    root = os.path.realpath(folder)
    try:
        path, below = (os.path.realpath(os.path.join(root, each)) for each in (name, name.lstrip("/")))
        if not _is_below(root, path) and _is_below(root, below) and os.path.exists(below):
            path = below
    except ValueError as error:  # the name has a NUL character
        raise PromptError(f"the file {show(name)} of {what} cannot be read: {error}") from error
    if not _is_below(root, path):
        raise PromptError(f"the file {show(name)} of {what} is not below allowed_local_media_path")
    try:
        if not os.path.isfile(path):
            raise FileNotFoundError(2, os.strerror(2))
        with open(path, "rb") as file:
            return file.read(most_bytes + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise PromptError(f"the file {show(name)} of {what} cannot be read: {reason}") from error


def _is_below(root: str, path: str) -> bool:
    return PurePath(path).is_relative_to(root)


def _fetched(address: str, domains: tuple[str, ...], most_bytes: int, what: str, end: float) -> bytes:
    for _ in range(_MOST_HOPS):
        try:
            parts = urlsplit(address)
            host = (parts.hostname or "").rstrip(".")
            if parts.scheme not in ("http", "https") or not host:
                raise ValueError("it is no address of http or https")
            if ANY_HOST not in domains and host.lower() not in domains:
                raise ValueError(f"{show(host)} is none of the hosts in allowed_media_domains")
            found, moved_to = _answer(parts, host, end, most_bytes)
        except _FAULTS as error:
            reason = str(error) if type(error) is ValueError else describe(error)
            if time.monotonic() >= end:
                reason = f"the addresses of a prompt may take {FETCH_S:g} s"
            raise PromptError(f"{what} at {public(address)} cannot be fetched: {reason}") from error
        if found is not None:
            return found
        address = moved_to
    raise PromptError(f"{what} at {public(address)} cannot be fetched: more than {_MOST_HOPS} addresses in a row")


def _answer(parts: SplitResult, host: str, end: float, most_bytes: int) -> tuple[bytes | None, str]:
    """Returns (body, ""), or (None, the new address) for a redirection. Raises OSError, HTTPException, ValueError."""
    port = parts.port or {"https": 443, "http": 80}[parts.scheme]
    stream = socket.create_connection((_public_ip(host, port, end), port), timeout=_left(end))
    try:
        if parts.scheme == "https":
            stream = ssl.create_default_context().wrap_socket(stream, server_hostname=host)
        timer = threading.Timer(_left(end), _shut, (stream,))  # for all reads; a socket's timeout is for one read
        timer.daemon = True
        timer.start()
        try:
            connection = http.client.HTTPConnection(host, port)
            connection.sock = stream
            target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_KEPT)
            headers = {"User-Agent": f"llamabatch/{__version__}", "Accept": "image/*, audio/*", "Connection": "close"}
            connection.request("GET", target, headers=headers)
            response = connection.getresponse()
            if response.status in _MOVED and (moved := response.getheader("location")):
                return None, urljoin(parts.geturl(), moved)
            if response.status != 200:
                raise http.client.HTTPException(f"the server answers {response.status} {response.reason}")
            body = bytearray()
            while len(body) <= most_bytes and (piece := response.read(_PIECE)):
                body += piece
            if time.monotonic() >= end:  # the timer has closed the connection
                raise TimeoutError
            if response.length and len(body) <= most_bytes:
                raise http.client.HTTPException(f"the answer ends {response.length:,} bytes early")
            return bytes(body), ""
        finally:
            timer.cancel()
    finally:
        stream.close()


def _public_ip(host: str, port: int, end: float) -> str:
    """Returns an IP address of a host. All its addresses must be public, because a name may point to a private network.

    Raises:
        OSError: the host is unknown, one of its addresses is not public, or `end` has passed.
    """
    answers: queue.SimpleQueue[list[str] | OSError | UnicodeError] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            answers.put([str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except (OSError, UnicodeError) as error:
            answers.put(error)

    # getaddrinfo runs on a thread, because it has no timeout
    threading.Thread(target=look_up, name="llamabatch-look-up", daemon=True).start()
    try:
        found = answers.get(timeout=_left(end))
    except queue.Empty:
        raise TimeoutError from None
    if not isinstance(found, list):
        raise OSError(str(found)) from found
    for each in found:
        if not is_public(each):
            raise OSError("its host has an address that is not public")
    return found[0]


def is_public(address: str) -> bool:
    """Returns True for a public IP address. If an IPv6 address contains IPv4 addresses, only these count."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        teredo = ip.teredo
        within = [ip.ipv4_mapped, ip.sixtofour, *(teredo or ())]
        if ip in _NAT64:
            within.append(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF))
        held = [each for each in within if each is not None]
        if held:
            return all(is_public(str(each)) for each in held)
    is_listed = any(ip in network for network in _NOT_PUBLIC if network.version == ip.version)
    return ip.is_global and not (is_listed or ip.is_multicast or ip.is_reserved)


def _left(end: float) -> float:
    """Returns the seconds until `end`, a time.monotonic(). Raises TimeoutError if `end` has passed."""
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _shut(stream: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the connection may have ended
        stream.shutdown(socket.SHUT_RDWR)
