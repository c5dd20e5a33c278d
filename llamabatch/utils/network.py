"""The network: whether a server can be reached at all, known within a second."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit, urlunsplit

PROBE_S = 0.7  # a connection takes a fifth of a second around the earth; libraries try again for half a minute


def reachable(url: str, budget_s: float = PROBE_S) -> bool:
    """True if the server of an address, or the proxy in front of it, takes a connection within that many seconds.

    The time holds for the look-up of the name, too, which no socket option bounds.
    """
    found: list[bool] = []

    def connect() -> None:
        try:
            with socket.create_connection(_server(url), timeout=budget_s):
                found.append(True)
        except (OSError, ValueError):
            pass

    thread = threading.Thread(target=connect, name="llamabatch-probe", daemon=True)
    thread.start()
    thread.join(budget_s)
    return bool(found)


def _server(url: str) -> tuple[str, int]:
    """Host and port to connect to. Raises ValueError."""
    import urllib.request  # takes longer to import than most commands have

    parts = urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not parts.hostname:
        raise ValueError(f"{url} names no host")
    return parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme, 1080)


def public(url: str) -> str:
    """An address for messages and files: without its user, password, query and fragment, which may be secrets."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the address"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
