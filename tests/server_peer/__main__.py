"""`make test-llama-server`: runs the tests that llama-server passes against `llamabatch serve`.

python -m tests.server_peer [--only TEXT] [--failed]  ours; status 1 where failures.json is not exact
python -m tests.server_peer --record                  ours; writes failures.json, whose reasons people write
python -m tests.server_peer --server real --record    llama-server itself, all ids; writes passed.json
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import click

from benchmarks import llama_programs
from llamabatch.native_build import machine, source
from llamabatch.native_build.tools import SetupFailure, cache_dir, make_folder
from tests.server_peer import expectations, suite
from tests.server_peer.suite import ROOT, Outcome

COMMAND = "python -m tests.server_peer --server real --record"
_TIMES = 3
"""Runs of llama-server for a record: an id counts where it passes each time."""


def say(text: str) -> None:
    click.echo(text, err=True)


@click.command()
@click.option("--server", type=click.Choice(["ours", "real"]), default="ours", show_default=True)
@click.option("--only", default="", metavar="TEXT", help="Only ids with this text.")
@click.option("--failed", is_flag=True, help="Only ids of failures.json, of ours.")
@click.option("--record", is_flag=True, help="Write the ids that passed, or the ids of ours that failed.")
def main(server: str, only: str, failed: bool, record: bool) -> None:
    """Run llama.cpp's own server tests."""
    log = make_folder(cache_dir() / "logs") / f"server-peer-{server}.log"
    log.write_bytes(b"")
    try:
        with tempfile.TemporaryDirectory(prefix="llamabatch-peer-", ignore_cleanup_errors=True) as place:
            unpacked = suite.prepare(Path(place), say)
            if server == "real":
                _real(unpacked, only, record, log)
            else:
                expected = expectations.read_failures()
                ids = list(expected) if failed else expectations.read_passed()["ids"]
                _ours(unpacked, [name for name in ids if only in name], expected, record, log)
    except SetupFailure as failure:
        raise click.ClickException(str(failure)) from failure


def _real(unpacked: suite.Suite, only: str, record: bool, log: Path) -> None:
    program = llama_programs.programs(machine.make_plan("auto")) / "llama-server"
    ids = [name for name in expectations.read_passed()["ids"] if only in name] if only else None
    runs = [suite.run(unpacked, [str(program)], {}, ids, log, _tell) for _ in range(_TIMES if record else 1)]
    passed = sorted(name for name in runs[0] if all(run[name].outcome == "passed" for run in runs))
    click.echo(f"llama-server: {len(passed)} of {len(runs[0])} passed (log: {log})")
    if record and not only:
        expectations.write(
            expectations.PASSED,
            {
                "llama_cpp_python": source.VERSION,
                "llama.cpp": unpacked.commit,
                "command": COMMAND,
                "aside": suite.ASIDE,
                "ids": passed,
            },
        )


def _ours(unpacked: suite.Suite, asked: list[str], expected: dict[str, str], record: bool, log: Path) -> None:
    command = [sys.executable, "-m", "llamabatch", "serve"]
    outcomes = suite.run(unpacked, command, {"PYTHONPATH": str(ROOT)}, asked, log, _tell)
    found = expectations.compare(asked, {name: each.outcome for name, each in outcomes.items()}, expected)
    totals, passed = expectations.counts(asked), expectations.counts(found.passed)
    for module in sorted(totals):
        click.echo(f"{module:34} {passed[module]:3} of {totals[module]:3}")
    click.echo(f"llamabatch serve: {len(found.passed)} of {len(asked)} passed (log: {log})")
    for title, names in (
        ("fails, and is not in failures.json", found.unexpected),
        ("passes, and is in failures.json", found.cured),
        ("had no outcome", found.missing),
    ):
        for name in names:
            click.echo(f"{title}: {name}")
    if record:
        kept = {name: reason for name, reason in expected.items() if name not in asked}
        expectations.write_failures(
            kept | {name: expected.get(name, f"not known yet: {outcomes[name].why}") for name in found.failed}
        )
    elif not found.is_exact:
        sys.exit(1)


def _tell(name: str, outcome: Outcome) -> None:
    mark = {"passed": "ok", "failed": "FAILED", "skipped": "skipped"}[outcome.outcome]
    say(f"{mark:7} {outcome.seconds:6.1f} s  {name}" + (f"  {outcome.why}" if outcome.why else ""))


if __name__ == "__main__":
    main()
