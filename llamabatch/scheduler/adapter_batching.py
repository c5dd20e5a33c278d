"""Gives turns to adapter sets while requests with different adapters are in flight. Pure Python.

llama.cpp applies adapters to a whole context, so a step computes sequences of one adapter set. A change of the set
takes time, so a set keeps its turn for several steps (bundled model: a change takes 2 ms, and a step of 32 rows 5 ms).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from llamabatch.request.adapters import AdapterSet
from llamabatch.request.request import Request
from llamabatch.request.sequence import Sequence
from llamabatch.scheduler.output import Call

# A turn lasts for this many steps. Each TOKENS_A_STEP prompt tokens count as a further step. Otherwise sequences of
# other sets would wait longer while the current set reads long prompts.
STEPS_A_TURN = 8
TOKENS_A_STEP = 64


class AdapterScheduler:
    """Gives turns to the adapter sets in flight, in order of first use. No set gets a second turn before each set has
    had one.

    `add` and `remove` count the adapters in flight. So the other methods cost no time while no request uses adapters.

    Attributes:
        current: the set that has the turn.
    """

    def __init__(self) -> None:
        self.current: AdapterSet = ()
        self._order: list[AdapterSet] = []
        self._steps = 0  # number of steps in the current turn
        self._names: Counter[str] = Counter()  # adapter -> number of requests in flight that use it

    def add(self, request: Request) -> None:
        """Counts the adapters of a request that is now in flight."""
        if request.adapters:
            self._names.update(name for name, _ in request.adapters)

    def remove(self, request: Request) -> None:
        """Subtracts the adapters of a request that has ended."""
        if request.adapters:
            self._names -= Counter(name for name, _ in request.adapters)

    @property
    def in_use(self) -> bool:
        """True if any request in flight uses adapters."""
        return bool(self._names)

    def uses(self, name: str) -> bool:
        """True if any request in flight uses this adapter."""
        return name in self._names

    def neighbours(self, sequence: Sequence, running: Iterable[Sequence]) -> list[int] | None:
        """Returns the slots of the running sequences that have the same adapter set as `sequence`; None if no adapters
        are in use, or if no sequence runs.

        Rows of one set need only one pass over the weights if their slots are neighbours.
        """
        others = [s for s in running if s.slot is not None] if self.in_use else []
        own = [s.slot for s in others if s.request.adapters == sequence.request.adapters and s.slot is not None]
        return own if others else None

    def choose(self, ready: list[Sequence]) -> list[Sequence]:
        """Returns the ready sequences of the current set. If the turn of this set has expired, or none of its sequences
        is ready, the next set gets the turn first."""
        here = dict.fromkeys(s.request.adapters for s in ready)
        if not here:
            return ready
        self._order = [one for one in self._order if one in here]
        self._order += [one for one in here if one not in self._order]
        if self.current not in here or (self._steps >= STEPS_A_TURN and len(here) > 1):
            if self.current in here:
                self._order.remove(self.current)
                self._order.append(self.current)
            self.current = self._order[0]
            self._steps = 0
        return ready if len(here) == 1 else [s for s in ready if s.request.adapters == self.current]

    def count_step(self, calls: Iterable[Call]) -> None:
        """Counts a step of the current turn. Each TOKENS_A_STEP prompt tokens of the step count as a further step."""
        tokens = sum(span.length for call in calls if not call.is_decode for span in call.spans)
        self._steps += 1 + tokens // TOKENS_A_STEP
