"""Texts that wait to be embedded, and which of them go through the model together. Pure Python.

llama.cpp pools what one pass has computed of a text, so that a text goes through in one pass, with as many others as
fit beside it.
"""

from __future__ import annotations

from collections import deque

from llamabatch.config import EngineConfig
from llamabatch.request import Request
from llamabatch.turns import SHORT, STEPS_BETWEEN

MAX_TEXTS = 64  # in a pass: each is a sequence of the context
LOOK_AHEAD = 256  # texts that are looked at for those that still fit, so that a step costs the same for any queue


def longest_text(config: EngineConfig) -> int:
    """Tokens of a text at most; the config is resolved."""
    return min(config.number("n_ctx"), config.n_batch)


class EmbedQueue:
    """Requests in order of arrival.

    Args:
        n_pack: tokens in a pass, unless one text alone has more.
    """

    def __init__(self, n_pack: int) -> None:
        self._n_pack = n_pack
        self._waiting: deque[Request] = deque()
        self._ids: set[str] = set()
        self._since = STEPS_BETWEEN

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ids

    def add(self, request: Request) -> None:
        self._waiting.append(request)
        self._ids.add(request.request_id)

    def remove(self, request_id: str) -> Request:
        """Takes one out that waits."""
        self._ids.remove(request_id)
        found = next(request for request in self._waiting if request.request_id == request_id)
        self._waiting.remove(found)
        return found

    def uses(self, name: str) -> bool:
        """Does anything that waits use this adapter?"""
        return any(name == used for request in self._waiting for used, _ in request.adapters)

    def take(self, beside_others: bool) -> list[Request]:
        """What goes through the model in this step: the oldest, and younger ones with the same adapters that fit.

        Args:
            beside_others: others wait for their next token. Texts then pay what long prompts pay (turns.py): up to 64
                tokens a step, and one full pass in 30 steps.
        """
        is_full_turn = not beside_others or self._since >= STEPS_BETWEEN
        self._since = STEPS_BETWEEN if not beside_others else 0 if is_full_turn else self._since + 1
        room = self._n_pack if is_full_turn else min(SHORT, self._n_pack)
        taken: list[Request] = []
        passed: list[Request] = []
        while self._waiting and len(taken) < MAX_TEXTS and len(passed) < LOOK_AHEAD and room > 0:
            request = self._waiting.popleft()
            n = len(request.prompt_token_ids)
            alike = not taken or request.adapters == taken[0].adapters
            if alike and (n <= room or (is_full_turn and not taken)):
                taken.append(request)
                room -= n
            else:
                passed.append(request)
        self._waiting.extendleft(reversed(passed))
        self._ids.difference_update(request.request_id for request in taken)
        return taken
