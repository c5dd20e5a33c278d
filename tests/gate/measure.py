"""`make test-seconds`: measures the tests of files and folders, and writes the slow ones into slow.txt.

Each worker has a core of its own, as in the gate. Run it on a quiet machine.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.gate import marks
from tests.gate.run import TESTS, WORKERS, measured

HEAD = """\
# Tests that take more than {slow_s} s on a core, and the seconds; a name without brackets stands for all of its cases.
# Written by `make test-seconds`, for a machine where tests.gate.marks.yardstick_s is {yardstick_s} s.
"""


def slow_lines(seconds: dict[str, float], known: Iterable[str]) -> list[str]:
    """Returns the new lines of the file. Lines of `known` stay if their tests were not measured.

    Args:
        seconds: the seconds of each measured test, by its id.
        known: the old lines of the file.
    """
    cases = defaultdict(dict)
    for nodeid, took in seconds.items():
        cases[marks.function_of(nodeid)][nodeid] = took
    slow = {}
    for function, of_cases in cases.items():
        long = {nodeid: took for nodeid, took in of_cases.items() if took >= marks.SLOW_S}
        slow |= {function: max(long.values())} if long and len(long) == len(of_cases) else long
    files = {nodeid.partition("::")[0] for nodeid in seconds}
    lines = [f"{took:.1f} {nodeid}" for nodeid, took in slow.items()]
    lines += [line for line in known if _file_of(line) not in files and Path(_file_of(line)).exists()]
    return sorted(lines, key=lambda line: line.split(" ", 1)[1])


def _file_of(line: str) -> str:
    return line.split(" ", 1)[1].partition("::")[0]


def main(arguments: list[str]) -> int:
    code, seconds = measured([*WORKERS, *(arguments or TESTS)])
    if code > 1:
        print(f"pytest ended with {code}: {marks.FILE.name} stays as it was", file=sys.stderr)
        return code
    known = [line for line in marks.FILE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    slower = marks.yardstick_s() / marks.YARDSTICK_S
    seconds = {nodeid: took / slower for nodeid, took in seconds.items()}
    lines = slow_lines(seconds, known)
    head = HEAD.format(slow_s=marks.SLOW_S, yardstick_s=marks.YARDSTICK_S)
    marks.FILE.write_text(head + "".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(seconds)} tests took {sum(seconds.values()):.0f} s; {len(lines)} lines in {marks.FILE.name}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
