"""Tests each program of docs/agents.md, from its first turn to the edited file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.agents.conftest import PROGRAMS, WAIT_S, Program, Server, calls, ended
from tests.agents.figures import MEASURED

LAST = "a mark of no prompt: 7f3b9c"
# SECOND_COMPUTES is checked only for requests of at least so many tokens. Shorter ones have no beginning that is worth
# reusing: the program llm, for example, sends no system prompt.
LONG = 2000
SECOND_COMPUTES = 0.10


def test_a_text_comes_as_a_stream(program: Program, server: Server, home: Path) -> None:
    server.script(program.needs, [(LAST, "The sky is blue today.")])
    out = ended(program.run(home, "Why is the sky blue?"))
    assert "The sky is blue today." in out, out
    records = server.turns(program)  # several, if the program also asks for suggestions of the next message
    assert {(record.status, record.whole) for record in records} == {(200, True)}
    record = next(each for each in records if each.body.get("stream"))
    assert record.answer.count("data: ") > 2  # text, end and [DONE]; on a busy machine all of the text is one event


def test_it_changes_a_file_and_goes_on_with_the_results(program: Program, server: Server, home: Path) -> None:
    edits = [
        each.replace("{}", str(home / "work")) if isinstance(each, str) else calls(_placed(each, home))
        for each in program.edits
    ]
    turns = [(f"Step {n}.", f"Step {n}.\n\n{edit}") for n, edit in enumerate(edits)]
    server.script(program.needs, [*turns, (LAST, "All is done.")])
    out = ended(program.run(home, "Change the file."))
    assert (home / "work" / "file.txt").read_text() == "one\nturn\n", out
    assert "All is done." in out or program.title == "aider", out
    records = server.turns(program)
    assert [record.status for record in records] == [200] * len(records)
    assert len(records) == (2 if program.title == "aider" else 3), out
    # Some programs number the lines. Aider shows the file already in its first request, and then the changed file.
    lines = r"one\\n.{0,12}three" if program.title == "aider" else r"one\\n.{0,12}two"
    assert [bool(re.search(lines, json.dumps(record.body))) for record in records[:2]] == [False, True]
    _keep_figures(program, server, home)


def _placed(call: tuple[str, dict[str, str]], home: Path) -> tuple[str, dict[str, str]]:
    name, arguments = call
    return name, {key: value.replace("{}", str(home / "work")) for key, value in arguments.items()}


def _keep_figures(program: Program, server: Server, home: Path) -> None:
    """Checks how many tokens of the second request are computed, and writes the figures to build/test-agents.json."""
    first, second = server.turns(program)[:2]
    if '"usage"' not in second.answer:
        return  # aider asks for no counts in its streams
    n_prompt, n_cached = second.usage()
    figures = {
        "first_request_bytes": len(json.dumps(first.body)),
        "first_request_tokens": first.usage()[0],
        "second_request_tokens": n_prompt,
        "second_request_computed": n_prompt - n_cached,
    }
    server.script(program.needs, [(LAST, "All is done.")])
    ended(program.run(home, "What does the file say?"))
    n_next, n_known = server.turns(program)[0].usage()
    figures |= {"next_conversation_tokens": n_next, "next_conversation_computed": n_next - n_known}
    path = MEASURED
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | {program.title: figures}, indent=1) + "\n")
    if n_prompt >= LONG:
        assert n_prompt - n_cached < SECOND_COMPUTES * n_prompt, figures


def test_a_stop_in_mid_stream_frees_the_slot(program: Program, server: Server, home: Path) -> None:
    server.script(program.needs, [(LAST, "")])
    child = program.run(home, "Tell me a story.")
    try:
        _until(lambda: server.n_decoding() > 0 or child.poll() is not None)
        assert child.poll() is None, ended(child)
    finally:
        _signal(child, signal.SIGINT)
    _until(lambda: server.n_running() == 0)
    _signal(child, signal.SIGTERM)  # after SIGINT, some programs only ask whether they should end
    ended(child)
    records = server.turns(program)
    assert records
    assert not any(record.whole for record in records)


def test_a_full_context_ends_in_an_error_that_says_the_option(
    program: Program, full_server: Server, home: Path
) -> None:
    full_server.script(program.needs, [(LAST, "The sky is blue today.")])
    out = ended(program.run(home, "Why is the sky blue? " * 100, full_server.port))
    assert "The sky is blue today." not in out
    records = [record for record in full_server.turns(program) if record.status != 503]
    assert records, out
    assert {record.status for record in records} == {400}
    assert all("with -c " in record.answer for record in records)
    assert len(records) < 12, "it asks again and again"


def test_codex_calls_tools_of_one_name_from_two_servers(server: Server, home: Path) -> None:
    program = PROGRAMS["codex"]
    config = home / ".codex" / "config.toml"
    program.write_files(home)
    mcp = json.dumps(str(Path(__file__).with_name("mcp_server.py")))
    with config.open("a") as file:
        for name in ("near", "far"):
            file.write(f'[mcp_servers.{name}]\ncommand = "{sys.executable}"\nargs = [{mcp}, "{name}"]\n')
    near, far = (calls((f"mcp__{name}__look", {})) for name in ("near", "far"))
    server.script(
        program.needs,
        [("Step 0.", f"Step 0.\n{near}"), ("Step 1.", f"Step 1.\n{far}"), (LAST, "All is done.")],
    )
    out = ended(program.run(home, "Look around."))
    assert "All is done." in out, out
    last = json.dumps(server.turns(program)[-1].body["input"])
    assert last.index("seen near") < last.index("seen far")


def _signal(child: subprocess.Popen[str], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not found():
        assert time.monotonic() < end
        time.sleep(0.1)
