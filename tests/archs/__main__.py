"""`make test-archs`: every architecture that llama.cpp can write, alone and in each way to compute it with others.

python -m tests.archs [--only NAME]... [--write] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from llamabatch.native_build.tools import main_guard, say
from tests.archs import models, running, table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.archs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this architecture alone")
    parser.add_argument("--write", action="store_true", help="write the table of docs/models.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all that was found")
    options = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="llamabatch-archs-") as place:
        paths = models.write(Path(place), options.only)
        say(f"{len(paths)} models, written after {time.monotonic() - start:.0f} s")
        results = running.run(paths, tell)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    problems = table.failures(results)
    if options.write:
        table.write(results)
    elif not options.only and table.lines(results) != table.committed():
        problems.append("the table of docs/models.md is another one: make test-archs ARGS=--write")
    refused = sum(bool(found.get("refused")) for found in results.values())
    say(f"{len(results)} models, {refused} of them refused by name, in {time.monotonic() - start:.0f} s")
    print("\n".join(problems) if problems else "0 dead, 0 different beyond the rule")
    sys.exit(bool(problems))


def tell(name: str, found: dict[str, Any]) -> None:
    """Prints the failures of a model as soon as it is done."""
    for problem in table.failures({name: found}):
        say(problem)


if __name__ == "__main__":
    sys.exit(main_guard(main))
