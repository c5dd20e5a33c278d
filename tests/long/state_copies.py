"""Random histories in which states of hybrid, recurrent and windowed models are forked, saved, restored, preempted."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path

from tests.archs import models
from tests.model.state_copies import KINDS, Histories
from tests.unit.small_prefixes import small_thresholds

HOLDS = (
    "chats in three slots fork, save, restore and preempt the states of a hybrid, recurrent or sliding-window model at "
    "random: each request has the logprobs of a fresh engine, the same bits where the plan promises them"
)
EACH = 1000
TOTAL = EACH * len(KINDS)
QUICK = 8


def case(number: int, folder: Path) -> None:
    """Runs one history of one kind. Neighbouring cases have different kinds."""
    del folder
    with small_thresholds():
        _histories(number % len(KINDS)).case(number // len(KINDS))


@cache
def _histories(kind: int) -> Histories:
    name, options, tolerance = KINDS[kind]
    place = tempfile.TemporaryDirectory(prefix="llamabatch-states-")
    atexit.register(place.cleanup)
    path, *_ = models.write(Path(place.name), [name])
    return Histories(path, tolerance, **options)
