"""`llamabatch top`: what it draws and writes, and the engines that it finds."""

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner
from rich.console import Console

from llamabatch.cli import cli
from llamabatch.engine.stats import EngineStats
from llamabatch.monitor import status
from llamabatch.monitor.gpu import GpuSample
from llamabatch.monitor.host import MachineSample
from llamabatch.monitor.snapshot import Snapshot
from llamabatch.monitor.top import draw, figures
from tests.unit.fakes import times

STATS = EngineStats(
    running=31, waiting=12, free_slots=1, kv_cells=1000, kv_cells_used=120, submitted=1280, finished_stop=1000,
    finished_length=234, errors=3, generated_tokens=54321, prompt_tokens=600, decode_calls=1000, decode_rows=30400,
    decode_passes=1003, prefix_hits=17, preemptions=2, restarts=1, ttft_s=times(*[0.012] * 100),
    inter_token_s=times(*[0.0006] * 100),
)  # fmt: skip
MACHINE = MachineSample(197.4, 88.0, 1300 << 20, 5 << 30, 31.2, (GpuSample(0, "Card", 93.0, 3 << 30, 8 << 30, 70.0),))


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def published():
    told = status.StatusFile("m.gguf", 1.0, lambda: {"rows": 1237000, "total": 2000000, "errors": 3, "left_s": 86340.0})
    for second in range(1, 21):
        tokens = EngineStats(generated_tokens=100 * second)
        told.write(Snapshot(time.time(), float(second), STATS + tokens, 1.0, tokens, MACHINE))
    yield told
    told.remove()


def drawn(statuses, width: int) -> str:
    console = Console(record=True, width=width, file=io.StringIO())
    console.print(draw(statuses))
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120, 200])
def test_one_panel_says_it_all(published, width):
    text = drawn(status.running(), width)
    assert max(map(len, text.splitlines())) <= width
    lines = [re.sub(r"[│━╸╺\s]+", " ", line).strip() for line in text.splitlines()]
    assert f"m.gguf · pid {os.getpid()} · 20.0 s" in lines[0]
    assert lines[1] == "rows 62% 1,237,000 of 2,000,000 · 23 h 59 min left"
    assert lines.pop(2) == "3 failed"
    assert lines[2] == "requests 31 running · 12 waiting · 1,234 ok · 3 errors · 0 aborted"
    assert lines[3] == "slots 31 of 32 · KV cache 12%"
    assert re.fullmatch("tokens/s [▁▂▃▄▅▆▇█]{14} 100 generated · 0 of prompts", lines[4])
    assert lines[4].split()[1][-1] == "█"
    assert lines[5] == "p50 p95 p99"
    assert re.fullmatch(r"first token 11\.\d ms 12\.\d ms 12\.\d ms", lines[7])
    assert lines[9] == "whole request – – –"
    assert lines[10] == "a step 30.4 rows · 1.00 passes over the weights"
    assert lines[11] == "engine 17 prefix hits · 2 preemptions · 1 restart"
    assert lines[12] == "machine CPU 197% · 88% of all cores · memory 1.3 GiB · 5.0 GiB free · 31 W"
    assert lines[13] == "gpu 0 Card · 93% · 3.0 GiB of 8.0 GiB · 70 W"


def test_a_narrow_panel_has_no_bars_and_breaks_no_word(published):
    text = drawn(status.running(), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert "…" not in text
    assert "━" not in text
    words = re.sub("[│╭╮╰╯─]", " ", text).split()
    for told in ("62%", "1,237,000", "2,000,000", "whole", "12.5", "preemptions", "generated", "8.0"):
        assert (told in words) == (told != "whole")  # nothing is known of "whole"


def test_an_estimated_total_is_marked(published):
    [known] = status.running()
    assert "7 of ~90" in drawn([replace(known, job={"rows": 7, "total": 90, "estimated": True})], 80)


def test_what_is_not_known_is_left_out(published):
    [known] = status.running()
    bare = replace(known, stats=EngineStats(), recent=EngineStats(), machine=MachineSample(), job={}, speeds=())
    text = drawn([bare, replace(bare, job={"rows": 7, "total": None, "left_s": None}, title="")], 80)
    assert "rows      7" in text
    assert "gpu" not in text
    assert "GiB" not in text
    assert text.count("0 of 0 · KV cache 0%") == 2
    assert "no news for 1 min" in drawn([replace(bare, written_s=time.time() - 60)], 80)


def test_figures_are_plain(published):
    [known] = status.running()
    told = json.loads(json.dumps(figures(known)))
    assert told["requests"] == {"submitted": 1280, "in_flight": 43, "ok": 1234, "errors": 3, "aborted": 0}
    assert told["generated_tokens_per_s"] == pytest.approx(100)
    assert told["ttft_s"]["p95"] == pytest.approx(0.012, rel=0.25)
    assert told["e2e_s"] is None
    assert told["machine"]["gpus"][0]["name"] == "Card"
    assert told["counts"]["restarts"] == 1


def test_once_and_json_and_whom(published):
    run = CliRunner().invoke
    assert "31 running" in run(cli, ["top"]).output  # stdout is no terminal here
    assert "31 running" in run(cli, ["top", "--once"]).output
    for what in (str(os.getpid()), str(published.path)):
        [told] = json.loads(run(cli, ["top", "--json", what]).stdout)
        assert told["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["top"], 1, "no job is running"),
        (["top", "--json"], 1, "no job is running"),
        (["top", "999999"], 1, "999999 is no running job"),
        (["top", "no-such-file.json"], 2, "neither a process id nor a file"),
        (["top", __file__], 2, "no status file"),
        (["top", "--every", "0"], 2, "--every"),
    ],
)
def test_nothing_to_show(arguments, code, message):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code
    assert message in result.output


def test_in_a_terminal_it_goes_on_until_nothing_runs(published):
    ours, theirs = pty.openpty()
    arguments = [sys.executable, "-m", "llamabatch", "top", "--every", "0.1"]
    process = subprocess.Popen(arguments, stdout=theirs, stderr=subprocess.PIPE, text=True)
    os.close(theirs)
    seen = b""
    while seen.count(b"requests") < 3:  # it draws again and again
        seen += os.read(ours, 4096)
    published.remove()
    try:
        while os.read(ours, 4096):
            pass
    except OSError:
        pass  # the other end is closed
    assert process.stderr.read() == "no job runs any more\n"
    assert process.wait(20) == 0
    os.close(ours)
    process.stderr.close()
