"""`llamabatch top` and a metrics file show the same figures as a job's own summary."""

import json
import subprocess
import sys

from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families

from llamabatch.cli import cli
from tests.waiting import until

ROWS = 12
FEW = ("--n-slots", "2", "--n-threads", "1", "--strategy", "batched")


def test_top_and_the_metrics_file_say_what_the_summary_says(tmp_path, monkeypatch, steps):
    lines = [json.dumps({"prompt": f"Once {i} upon", "max_tokens": 50, "ignore_eos": True}) for i in range(ROWS)]
    lines[7] = '{"prompt": 5}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))

    def start(*arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "llamabatch", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def top() -> list[dict]:
        told = CliRunner().invoke(cli, ["top", "--json"]).stdout  # in this process: a program takes a second to start
        return json.loads(told or "[]")

    seen = []
    try:
        with steps.held(20):
            job = start("run", "in.jsonl", "out.jsonl", "--metrics-file", "x.prom", "--json", "-", *FEW)
            until(lambda: seen.extend(top()) or any(one["running"] and one["job"]["total"] == ROWS for one in seen))
        told, errors = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 1, errors  # one bad row
    summary = json.loads(told)
    assert {one["title"] for one in seen} == {"run out.jsonl · tiny.gguf"}
    assert max(one["machine"]["memory_bytes"] for one in seen) > 50 << 20  # this includes the engine's child
    assert top() == []
    found = {
        sample.name + "".join(sample.labels.get("finished_reason", "")): sample.value
        for family in text_string_to_metric_families((tmp_path / "x.prom").read_text())
        for sample in family.samples
    }
    ok = sum(found[f"llamabatch:request_success_total{reason}"] for reason in ("stop", "length"))
    assert ok == summary["rows"]["ok"] == ROWS - 1
    assert found["llamabatch:generation_tokens_total"] == summary["tokens"]["generated"]
    assert found["llamabatch:prompt_tokens_total"] == summary["tokens"]["prompt"]
    assert found["llamabatch:num_requests_running"] == 0
