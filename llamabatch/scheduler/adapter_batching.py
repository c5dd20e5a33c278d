"""Requests with different adapters in flight at once: whose turn it is. Pure Python.

llama.cpp applies adapters to a whole context, so that a step computes sequences of one adapter set. Changing the set
has its price (on the bundled model 2 ms, a step of 32 rows takes 5), so a set keeps its turn for several steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from llamabatch.request.adapters import AdapterSet
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Call

# A turn lasts for this many steps, and a step's prompt tokens count as further ones: those of other sets wait for no
# longer when the set whose turn it is reads long prompts.
STEPS_A_TURN = 8
TOKENS_A_STEP = 64


class AdapterScheduler:
    """Sets in flight take turns, in order of their first coming; each gets one before any has a second.

    It is told of all requests in flight, so that those without adapters among themselves pay nothing for it.
    """

    def __init__(self) -> None:
        self.current: AdapterSet = ()
        self._order: list[AdapterSet] = []
        self._spent = 0
        self._names: Counter[str] = Counter()  # of the adapters of what is in flight

    def add(self, request: Request) -> None:
        """It is in flight from here on."""
        if request.adapters:
            self._names.update(name for name, _ in request.adapters)

    def remove(self, request: Request) -> None:
        """It has ended."""
        if request.adapters:
            self._names -= Counter(name for name, _ in request.adapters)

    @property
    def in_use(self) -> bool:
        """Does any request in flight use adapters?"""
        return bool(self._names)

    def uses(self, name: str) -> bool:
        """Does any request in flight use this one?"""
        return name in self._names

    def beside(self, sequence: Sequence, running: Iterable[Sequence]) -> list[int] | None:
        """The slots of its own set; None where it may stand anywhere. A set's rows in neighbouring slots stay in one
        pass over the weights."""
        others = [s for s in running if s.slot is not None] if self.in_use else []
        own = [s.slot for s in others if s.request.adapters == sequence.request.adapters and s.slot is not None]
        return own if others else None

    def choose(self, ready: list[Sequence]) -> list[Sequence]:
        """Those of the sequences that may compute in this step: all of one set."""
        here = dict.fromkeys(s.request.adapters for s in ready)
        if not here:
            return ready
        self._order = [one for one in self._order if one in here]
        self._order += [one for one in here if one not in self._order]
        if self.current not in here or (self._spent >= STEPS_A_TURN and len(here) > 1):
            if self.current in here:
                self._order.remove(self.current)
                self._order.append(self.current)
            self.current = self._order[0]
            self._spent = 0
        return ready if len(here) == 1 else [s for s in ready if s.request.adapters == self.current]

    def spend(self, calls: Iterable[Call]) -> None:
        """The turn of the current set is over after some steps' worth of these."""
        tokens = sum(span.length for call in calls if not call.is_decode for span in call.spans)
        self._spent += 1 + tokens // TOKENS_A_STEP
