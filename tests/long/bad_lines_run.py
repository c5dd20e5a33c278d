"""`llamabatch run` on a file with all kinds of bad line."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.long.bad_kinds import EARLIER
from tests.long.bad_lines import all_different, good_line, lines_with, write

HOLDS = (
    "through `llamabatch run`, a file with 200 kinds of bad line gives one row for each of its lines: an error with "
    "its reason for the bad ones, the whole text for all others, and exit code 1"
)
TOTAL = 6
QUICK = 1

# ways to call the command: options, and marks for a compressed input or an input on stdin
_WAYS: tuple[tuple[str, ...], ...] = (
    (),
    ("--order", "finished"),
    ("--shape", "openai"),
    ("--shape", "flat", "--order", "finished"),
    ("gz",),
    ("stdin",),
)


def case(number: int, folder: Path) -> None:
    """Calls the command in one way."""
    way = _WAYS[number]
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    write(source, lines_with(all_different()), number)
    content = source.read_bytes()
    if way == ("gz",):
        source.write_bytes(gzip.compress(content, 1))
    options = [each for each in way if each not in ("gz", "stdin")]
    given = "-" if way == ("stdin",) else str(source)
    done = subprocess.run(
        [sys.executable, "-m", "llamabatch", "run", given, str(out), "-t", "0", "--token-ids", *options],
        input=content if given == "-" else None, capture_output=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr.decode()[-2000:]
    found = {row: rest for row, *rest in (_plain(json.loads(line)) for line in out.read_bytes().splitlines())}
    order = [row for row, *_ in (_plain(json.loads(line)) for line in out.read_bytes().splitlines())]
    assert sorted(order) == list(range(402))
    assert order == sorted(order) or "finished" in way
    assert [found[row][:2] for row in (0, 1)] == [["0", None], [EARLIER, None]]
    for i, kind in enumerate(all_different()):
        bad_id, error, _ = found[2 * i + 2]
        assert error is not None, kind.name
        assert kind.says in error, (kind.name, error)
        assert f", line {2 * i + 3}: " in error, kind.name
        assert bad_id == kind.id, kind.name
        good_id, error, n_tokens = found[2 * i + 3]
        assert (good_id, error) == (json.loads(good_line(i))["id"], None), kind.name
        assert n_tokens == json.loads(good_line(i))["max_tokens"], kind.name  # ignore_eos: the text does not end early


def _plain(record: dict[str, Any]) -> tuple[int, str | None, str | None, int]:
    """Returns number, id, error and number of generated tokens of a record, which is flat or in OpenAI's format."""
    if "row" in record:
        return record["row"], record["id"], record["error"], len(record.get("token_ids", ()))
    number = int(record["id"].removeprefix("batch_req_"))
    if record["error"] is not None:
        return number, record["custom_id"], record["error"]["message"], 0
    return number, record["custom_id"], None, record["response"]["body"]["usage"]["completion_tokens"]
