"""Converts a report to the JSON document that docs/compare.md describes. An incompatible change needs a new
SCHEMA_VERSION."""

from __future__ import annotations

import dataclasses
from typing import Any

from llamabatch.request.outputs import RequestOutput
from llamabatch.tools.compare.report import Report, Row, Spread, Sweep
from llamabatch.utils.format import attributes

SCHEMA_VERSION = 1
_SPEEDS = ("wall_s", "requests_per_s", "tokens_per_s")


def document(report: Report) -> dict[str, Any]:
    """Returns the report as plain values: times in seconds, sizes in bytes, missing figures as None."""
    return {
        "schema_version": SCHEMA_VERSION,
        "created": report.created,
        **report.machine.document(),
        "model": {"name": report.model, "bytes": report.model_bytes},
        "workload": {
            "source": report.workload.source,
            "prompts": len(report.workload.prompts),
            "prompt_tokens": report.workload.n_prompt_tokens,
            "max_tokens": report.max_tokens,
            "temperature": 0,
        },
        "others_cpu_percent": _rounded(report.others.percent),
        "rows": [_row(row) for row in report.rows],
        "slots": None if report.sweep is None else _sweep(report.sweep),
        "advice": None if report.advice is None else dataclasses.asdict(report.advice),
    }


def _sweep(sweep: Sweep) -> dict[str, Any]:
    rows = [
        {**_row(row), "efficiency": _rounded(efficiency)}
        for row, efficiency in zip(sweep.rows, sweep.efficiency, strict=True)
    ]
    return {"strategy": "batched", "knee": sweep.knee, "rows": rows}


def _row(row: Row) -> dict[str, Any]:
    measurement = row.measurement
    return {
        **attributes(row, "strategy", "chosen", "n_slots", "instances", "error"),
        **{name: _rounded(getattr(row, name)) if row.measured else None for name in _SPEEDS},
        "speed_up": _rounded(row.speed_up),
        "ttft_s": _spread(row.ttft),
        "inter_token_s": _spread(row.inter_token),
        "latency_s": _spread(row.latency),
        "peak_memory_bytes": row.peak_memory_bytes,
        "rows_per_step": _rounded(row.rows_per_step),
        "passes_per_step": _rounded(row.passes_per_step),
        "equal_to_sequential": _rounded(row.equal),
        "rounds_tokens_per_s": [_rounded(speed) for speed in row.rounds],
        "options": None if measurement is None else dataclasses.asdict(measurement.plan.config.requested()),
        "counts": None if measurement is None else measurement.stats.counts(),
        "requests": [] if measurement is None else [_request(i, out) for i, out in enumerate(measurement.outputs)],
    }


def _request(index: int, output: RequestOutput) -> dict[str, Any]:
    timings = output.timings
    return {
        "prompt": index,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(output.token_ids),
        "finish_reason": output.finish_reason.value,
        "error": output.error,
        "text": output.text,
        **{name: _rounded(getattr(timings, name)) for name in ("queued_s", "ttft_s", "total_s")},
        "token_times_s": [_rounded(time) for time in timings.token_times_s],
    }


def _spread(spread: Spread) -> dict[str, float | None]:
    return {"p50": _rounded(spread.p50), "p95": _rounded(spread.p95)}


def _rounded(value: float | None) -> float | None:
    """Rounds to microseconds, because the clock is not more precise, and the files become half as long."""
    return None if value is None else round(value, 6)
