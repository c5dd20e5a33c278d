"""The strategies: policies for the same step loop. Each policy has an order of admission and chooses the rows to
compute.

To add a policy, add its row to POLICIES. `llamabatch compare` then treats the new policy as the most complex one and
draws it in black, because tools/compare/advice.py and plot.py have an order and colors only for the present policies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llamabatch.errors import ConfigError
from llamabatch.request.sequence import Sequence
from llamabatch.utils.checks import choice

Key = Callable[[Sequence], tuple[Any, ...]]
Admits = Callable[[int, int], int]
Select = Callable[[list[Sequence]], list[Sequence]]


@dataclass(frozen=True)
class Policy:
    """One strategy of the step loop.

    Attributes:
        name: the policy's name among the options.
        summary: one line for help texts.
        key: sorts the waiting sequences. The sequence with the lowest key is admitted first. Each key starts with
            Request.group, so that later groups cannot overtake a request forever.
        admits: (number of running sequences, number of free slots) -> number of sequences that may be admitted now.
        select: running sequences that could compute -> the sequences that compute in this step.
        one_slot: True if the policy uses only one slot.
        by_family: True if the key uses Sequence.family.
    """

    name: str
    summary: str
    key: Key
    admits: Admits
    select: Select
    one_slot: bool = False
    by_family: bool = False


def by_arrival(sequence: Sequence) -> tuple[Any, ...]:
    return (sequence.request.group,)


def shortest_prompt_first(sequence: Sequence) -> tuple[Any, ...]:
    return (sequence.request.group, sequence.num_prompt)


def longest_first(sequence: Sequence) -> tuple[Any, ...]:
    """Sorts by expected output, longest first. Short requests then fill slots that would be empty at the end.

    Prompts that start with the same text stay together, so that later prompts can copy from the first. Requests with
    the same adapters also stay together, because other adapters need separate calls.
    """
    longest, first = sequence.family
    return (sequence.request.group, sequence.request.adapters, -longest, first, -sequence.request.expected_tokens)


def any_free_slot(running: int, free: int) -> int:
    return free


def once_all_finished(running: int, free: int) -> int:
    return 0 if running else free


def all_running(running: list[Sequence]) -> list[Sequence]:
    return running


def round_robin(running: list[Sequence]) -> list[Sequence]:
    """Returns the sequence that has waited longest for a step."""
    return [min(running, key=lambda s: s.last_step)] if running else []


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy(
            "sequential",
            "one after another, in order of arrival",
            by_arrival,
            any_free_slot,
            all_running,
            one_slot=True,
        ),
        Policy(
            "length-sorted",
            "one after another, shortest prompt first",
            shortest_prompt_first,
            any_free_slot,
            all_running,
            one_slot=True,
        ),
        Policy("interleaved", "N slots, one sequence a step in turn", by_arrival, any_free_slot, round_robin),
        Policy(
            "static",
            "batches of N of like length; the next begins when all have finished",
            shortest_prompt_first,
            once_all_finished,
            all_running,
        ),
        Policy(
            "batched",
            "N slots, enter and leave at any step",
            longest_first,
            any_free_slot,
            all_running,
            by_family=True,
        ),
    )
}

# The last two names are not policies. They choose how engines are made; see planning/capacity.py and client/connect.py.
STRATEGIES: tuple[str, ...] = (*POLICIES, "multi-instance", "auto")


def has_one_slot(strategy: str) -> bool:
    """Returns True if a strategy uses one slot only, even if n_slots is larger."""
    return strategy in POLICIES and POLICIES[strategy].one_slot


def policy(name: str) -> Policy:
    """Returns the policy with this name. Raises ConfigError with a list of the known names for any other name."""
    choice(ConfigError, "strategy", name, POLICIES)
    return POLICIES[name]
