"""Joins the replies of all replicas of Ray Serve: for /metrics, /load and /reset_prefix_cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Reply:
    """The whole response of a replica to a call.

    Attributes:
        replica: Serve's id of the replica.
    """

    replica: str
    status: int
    content_type: bytes
    body: bytes


def _metrics(replies: Sequence[Reply]) -> Reply:
    """Joins texts in Prometheus' format. Adds the label `replica` to each sample."""
    heads: dict[str, list[str]] = {}  # name of a metric family -> its HELP and TYPE lines
    samples: dict[str, list[str]] = {}
    for reply in sorted(replies, key=lambda each: each.replica):
        family = ""
        for line in reply.body.decode().splitlines():
            if line.startswith("# "):
                family = line.split(" ", 3)[2]
                if line not in (head := heads.setdefault(family, [])):
                    head.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, reply.replica))
    lines = [line for family, head in heads.items() for line in (*head, *samples.get(family, ()))]
    return replace(replies[0], body="".join(f"{line}\n" for line in lines).encode())


def _labelled(sample: str, replica: str) -> str:
    """Returns a sample line with the label `replica`. In a line, the name is followed by "{" if there are labels, else
    by a space."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'


def _load(replies: Sequence[Reply]) -> Reply:
    """Joins replies to vLLM's /load: adds up the numbers of running calls."""
    total = sum(json.loads(each.body)["server_load"] for each in replies)
    return replace(replies[0], body=json.dumps({"server_load": total}).encode())


def _first(replies: Sequence[Reply]) -> Reply:
    return replies[0]


JOINED: dict[tuple[str, str], Callable[[Sequence[Reply]], Reply]] = {
    ("GET", "/metrics"): _metrics,
    ("GET", "/load"): _load,
    ("POST", "/reset_prefix_cache"): _first,
}
