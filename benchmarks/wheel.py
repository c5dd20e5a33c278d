"""The speed of the portable build of llama.cpp, which the wheel has, beside the one that was built for this CPU.

    python -m benchmarks.wheel FOLDER [--pairs N] [--workload NAME]... [--json FILE]

FOLDER is a package `llamabatch_llama`: of an unpacked wheel, or installed. The other one is the installed llama_cpp
that `make setup` built. Both engines are up at once and run the same requests in turn; each pair gives a ratio of
tokens/s. Printed are the median ratio of the wheel over the other and its 95 % bootstrap interval.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from benchmarks import places
from benchmarks.pairs import Side, compare, options
from benchmarks.process import PeerFailure
from llamabatch.planning import binding_choice

COMPARED = ("burst", "tiny")


def sides(package: Path) -> tuple[Side, Side]:
    """The wheel's build, and the one for this CPU. Raises PeerFailure."""
    native = binding_choice.installed(binding_choice.FOREIGN)
    if native is None or (binding_choice.read_marker(native / "lib") or {}).get("variants"):
        raise PeerFailure("the build for this CPU is not installed: run make setup")
    python = Path(sys.executable)
    return (
        Side("wheel", places.ROOT, python, variables={binding_choice.VARIABLE: str(package.resolve())}),
        Side("native", places.ROOT, python, variables={binding_choice.VARIABLE: str(native)}),
    )


@click.command()
@click.argument("package", metavar="FOLDER", type=click.Path(path_type=Path, exists=True, file_okay=False))
@options
def main(package: Path, **given: Any) -> None:
    """Measure the build in FOLDER and the one for this CPU, alternating."""
    compare(lambda: sides(package), COMPARED, "python -m benchmarks.wheel", build=package.name, **given)


if __name__ == "__main__":
    main()
