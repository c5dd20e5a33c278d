"""The picture of README.md, drawn from benchmarks/results/compare-tiny.json as `llamabatch compare --plot` draws it.

python -m benchmarks.compare_plot
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from llamabatch.tools.compare.plot import figure
from llamabatch.tools.compare.report import Advice, Report, Row, Spread
from llamabatch.utils.plotting import save

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "compare-tiny.json"
PICTURE = ROOT / "docs" / "images" / "compare.png"


def report(document: Mapping[str, Any]) -> Report:
    """Returns the parts of a comparison that its picture shows, read from the comparison's JSON document."""
    machine, workload = document["machine"], document["workload"]
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    parts = {
        "model": document["model"]["name"],
        "machine": SimpleNamespace(summary=f"{machine['cpu']}, {machine['cores']} cores, {memory}"),
        "workload": SimpleNamespace(prompts=[None] * workload["prompts"]),
        "rows": tuple(_row(row) for row in document["rows"]),
        "sweep": None,
        "advice": Advice(**document["advice"]),
    }
    return cast(Report, SimpleNamespace(**parts))


def _row(row: Mapping[str, Any]) -> Row:
    names = ("queued_s", "ttft_s", "total_s", "token_times_s")
    outputs = [
        SimpleNamespace(error=request["error"], timings=SimpleNamespace(**{name: request[name] for name in names}))
        for request in row["requests"]
    ]
    return Row(
        strategy=row["strategy"],
        chosen=row["chosen"],
        n_slots=row["n_slots"],
        instances=row["instances"],
        wall_s=row["wall_s"],
        tokens_per_s=row["tokens_per_s"],
        ttft=Spread(**row["ttft_s"]),
        latency=Spread(**row["latency_s"]),
        measurement=cast(Any, SimpleNamespace(outputs=outputs)),
    )


if __name__ == "__main__":
    save(lambda: figure(report(json.loads(RESULT.read_text(encoding="utf-8")))), PICTURE, dpi=110)
