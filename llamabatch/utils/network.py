"""Checks within a second that a server can be reached, and removes secrets from addresses."""

from __future__ import annotations

import socket
import threading
from urllib.parse import urlsplit, urlunsplit

PROBE_S = 0.7  # seconds to wait. To connect around the earth takes 0.2 s; libraries would retry for half a minute


def reachable(url: str, budget_s: float = PROBE_S) -> bool:
    """Returns True if the server of an address, or its proxy, accepts a connection within `budget_s` seconds.

    A thread connects, because no socket option limits the time to look up the name.
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
    """Returns the host and port to connect to. Raises ValueError."""
    import urllib.request  # imported late, because this import is slow

    parts = urlsplit(url)
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if not parts.hostname:
        raise ValueError(f"{url} names no host")
    return parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme, 1080)


def public(url: str) -> str:
    """Returns an address for messages and files: without user, password, query and fragment, which may be secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the address"
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
