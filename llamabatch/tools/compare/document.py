"""A report as JSON. docs/compare.md documents the shape; a change that breaks readers raises SCHEMA_VERSION."""

from __future__ import annotations

import dataclasses
from typing import Any

from llamabatch.request.outputs import RequestOutput
from llamabatch.tools.compare.report import Report, Row, Spread, Sweep

SCHEMA_VERSION = 1


def document(report: Report) -> dict[str, Any]:
    """The report as dicts, lists, texts and numbers. Times in seconds, sizes in bytes, absent figures None."""
    machine = dataclasses.asdict(report.machine)
    versions = machine.pop("versions")
    return {
        "schema_version": SCHEMA_VERSION,
        "created": report.created,
        "machine": machine,
        "versions": versions,
        "model": {"name": report.model, "bytes": report.model_bytes},
        "workload": {
            "source": report.workload.source,
            "prompts": len(report.workload.prompts),
            "prompt_tokens": report.workload.n_prompt_tokens,
            "max_tokens": report.max_tokens,
            "temperature": 0,
        },
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
        "strategy": row.strategy,
        "chosen": row.chosen,
        "n_slots": row.n_slots,
        "instances": row.instances,
        "error": row.error,
        "wall_s": _rounded(row.wall_s) if row.measured else None,
        "requests_per_s": _rounded(row.requests_per_s) if row.measured else None,
        "tokens_per_s": _rounded(row.tokens_per_s) if row.measured else None,
        "speed_up": _rounded(row.speed_up),
        "ttft_s": _spread(row.ttft),
        "inter_token_s": _spread(row.inter_token),
        "latency_s": _spread(row.latency),
        "peak_memory_bytes": row.peak_memory_bytes,
        "rows_per_step": _rounded(row.rows_per_step),
        "passes_per_step": _rounded(row.passes_per_step),
        "equal_to_sequential": _rounded(row.equal),
        "rounds_tokens_per_s": [_rounded(speed) for speed in row.rounds],
        "options": None if measurement is None else dataclasses.asdict(measurement.plan.config.asked()),
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
        "queued_s": _rounded(timings.queued_s),
        "ttft_s": _rounded(timings.ttft_s),
        "total_s": _rounded(timings.total_s),
        "token_times_s": [_rounded(time) for time in timings.token_times_s],
    }


def _spread(spread: Spread) -> dict[str, float | None]:
    return {"p50": _rounded(spread.p50), "p95": _rounded(spread.p95)}


def _rounded(value: float | None) -> float | None:
    """To microseconds: the clock is not better, and files stay half as long."""
    return None if value is None else round(value, 6)
