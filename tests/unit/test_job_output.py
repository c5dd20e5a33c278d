"""The output of a job: every row once, whatever happens; in order; of one job alone."""

import json
import random

import pytest

from llamabatch.errors import ConfigError
from llamabatch.jobs.output import ORDERS, Output, OutputOptions

SETTINGS = {"model": {"name": "tiny.gguf", "sha256": "ab"}, "sampling": {"temperature": 0.0}, "inputs": [{"name": "a"}]}


def rec(number, error=None, text="some text"):
    reason = "stop" if error is None else "error"
    return {"row": number, "id": f"id-{number}", "text": text, "finish_reason": reason, "error": error}


def shuffled(n, seed=1):
    numbers = list(range(n))
    random.Random(seed).shuffle(numbers)
    return numbers


def run(out, numbers, options=None, settings=SETTINGS, error=lambda n: None):
    """One run of a job to its end; returns the numbers that it had to do."""
    with Output(out, settings, options) as output:
        left = [n for n in numbers if not output.is_done(n)]
        for n in left:
            output.write(n, rec(n, error(n)))
        output.finish(sum(error(n) is not None for n in left))
    return left


def rows(out):
    return [json.loads(line)["row"] for line in out.read_bytes().splitlines()]


@pytest.mark.parametrize("order", ORDERS)
def test_each_row_once_and_nothing_is_left_beside(tmp_path, order):
    out = tmp_path / "out.jsonl"
    numbers = shuffled(300)
    assert run(out, numbers, OutputOptions(order=order)) == numbers
    assert rows(out) == (list(range(300)) if order == "input" else numbers)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.job.json"]
    with Output(out, SETTINGS, OutputOptions(order=order)) as again:
        assert again.finished
        assert again.is_done(299)


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_that_ends_early_is_gone_on_with(tmp_path, order):
    out = tmp_path / "out.jsonl"
    numbers, options = shuffled(300), OutputOptions(order=order)
    with Output(out, SETTINGS, options) as output:
        seed = output.seed
        for n in numbers[:200]:
            output.write(n, rec(n))
    with Output(out, SETTINGS, options) as output:
        assert (output.resumed, output.n_before, output.seed) == (True, 200, seed)
    assert run(out, numbers, options) == numbers[200:]
    assert sorted(rows(out)) == list(range(300))


def test_another_setting_is_refused_by_name_and_forced(tmp_path):
    out = tmp_path / "out.jsonl"
    with Output(out, SETTINGS) as output:
        output.write(0, rec(0))
    changed = {**SETTINGS, "sampling": {"temperature": 0.7}}
    with pytest.raises(ConfigError, match=r"sampling\.temperature: 0\.0, now 0\.7"):
        Output(out, changed)
    assert run(out, range(3), OutputOptions(force=True), changed) == [1, 2]
    with pytest.raises(ConfigError, match=r"temperature: 0\.7, now 0\.0"):
        Output(out, SETTINGS)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_that_failed_are_done_again_in_their_places(tmp_path, order):
    out = tmp_path / "out.jsonl"
    run(out, shuffled(100), OutputOptions(order=order), error=lambda n: "no" if n % 7 == 3 else None)
    again = OutputOptions(order=order, retry_errors=True)
    assert sorted(run(out, range(100), again)) == [n for n in range(100) if n % 7 == 3]
    assert rows(out) == list(range(100)) if order == "input" else sorted(rows(out)) == list(range(100))
    assert all(json.loads(line)["error"] is None for line in out.read_bytes().splitlines())
