"""Prints a plan's report as tables on a terminal, through rich."""

from __future__ import annotations

from functools import partial

from rich.console import Console
from rich.table import Table

from llamabatch.chat.conversation import without_template
from llamabatch.chat.named_templates import ON_A_LINE
from llamabatch.chat.tool_formats import GENERIC
from llamabatch.config import ResolvedConfig
from llamabatch.planning.memory import MIB, PROCESS_BYTES, mib
from llamabatch.scheduler.policies import has_one_slot
from llamabatch.tools.plan.report import Report
from llamabatch.utils.checks import counted
from llamabatch.utils.console import new_table, print_table, sentence


def show(report: Report, console: Console) -> None:
    """Prints the memory of the plan, the slots that fit, the strategy, and the changes that help."""
    line = partial(sentence, console)
    machine, config = report.machine, report.requested.config
    free = f"{mib(machine.available_bytes)} free here"
    if report.given_bytes is not None:
        free = f"{mib(report.given_bytes)} given with --memory, {mib(machine.available_bytes)} of it beside the process"
    line(f"{report.model}: {mib(report.file_bytes)}; {free}, {counted(machine.cores, 'core')}")
    if report.prompts is not None:
        p = report.prompts
        line(
            f"{p.source}: {counted(p.count, 'prompt')} of {counted(p.median, 'token')} at the median, {p.p95:,} at "
            f"p95, {p.longest:,} at most, counted with the model's vocabulary; with {p.output:,} more each: "
            f"n_ctx {p.n_ctx:,}"
        )
    print_table(console, _sum(report))
    if report.refusal is not None:
        line(f"It does not fit: {report.refusal}", "bold red")
    else:
        line(
            f"It fits: {slots(config)} of {config.n_ctx:,} tokens"
            f"{f' that share {config.kv_cells:,} cells' if config.kv == 'unified' else ''}"
            f"{f', {config.instances} engines' if config.instances != 1 else ''}.",
            "bold green",
        )
    print_table(console, _lengths(report))
    line(f"Strategy: {report.strategy}: {report.because}.")
    if report.requested.reasoning is not None:
        line(f"Thinking: told apart from the text of chats, as the family {report.requested.reasoning} marks it.")
    if config.pooling != "mean" or "pooling" in report.requested.reasons:
        line(f"Pooling of texts: {config.pooling}: {report.requested.reasons.get('pooling', 'as asked')}.")
    if "batch_invariant" in report.requested.reasons:
        reason = report.requested.reasons["batch_invariant"]
        line(f"{reason[:1].upper()}{reason[1:]}.")
    if report.requested.tools != GENERIC.name:
        line(f"Tools: calls are read and forced in the notation of the family {report.requested.tools}.")
    if report.requested.lacks_template:
        line(f"Chats: {without_template(ON_A_LINE)}.")
    line(f"Instances: {config.instances} in the plan; {_children(report)}.")
    if report.changes:
        line("What would make it fit:" if not report.fits else "For more slots:")
        for change in report.changes:
            line(f"  {change.what}")
    elif not report.fits:
        line("No single change makes it fit: combine several, or use a smaller model.", "red")


def slots(config: ResolvedConfig) -> str:
    """Returns the number of slots of the strategy as a text, such as "8 slots"."""
    n_slots = 1 if has_one_slot(config.strategy) else config.n_slots
    return counted(n_slots, "slot")


def _children(report: Report) -> str:
    if report.instances == 0:
        return "no engine would fit as a child process in half of what is free"
    return f"up to {report.instances} would fit as child processes in half of what is free, one for each core at most"


def _sum(report: Report) -> Table:
    need, config = report.memory, report.requested.config
    gpus = (f"GPU {gpu.number}\nMiB" for gpu in need.gpus)
    table = new_table("of one engine" if config.instances != 1 else "memory", "MiB", *gpus)
    parts = {
        "weights": (need.weights, [gpu.weights for gpu in need.gpus]),
        f"KV cache ({need.layout})": (need.kv_cache, [gpu.kv_cache for gpu in need.gpus]),
        "buffers of a pass, logits": (need.compute, [gpu.compute for gpu in need.gpus]),
        "repacked copies of weights": (need.copies, []),
        "vocabulary, adapters, threads": (need.vocabulary, []),
        "draft model": (need.draft, []),
        "projector (mmproj)": (need.projector, []),
        "prefixes beyond the slots": (need.cache_ram, []),
    }
    for name, (here, there) in parts.items():
        if here or any(there):
            table.add_row(name, _mib(here), *(map(_mib, there) if there else [""] * len(need.gpus)))
    table.add_section()
    table.add_row("sum", _mib(need.total), *(_mib(gpu.total) for gpu in need.gpus), style="bold")
    if config.instances != 1:
        table.add_row(f"{config.instances} engines", _mib(report.total_bytes), *[""] * len(need.gpus), style="bold")
    if not report.requested.in_children:
        peak = report.requested.peak_bytes + PROCESS_BYTES
        table.add_row("with the process: the peak", _mib(peak), *[""] * len(need.gpus))
    return table


def _lengths(report: Report) -> Table:
    table = new_table("n_ctx", "slots\nin half of it", "slots\nin all of it", "memory\nMiB", "a slot\nMiB", left=0)
    for row in report.rows:
        requested = row.n_ctx == report.requested.config.n_ctx
        table.add_row(
            f"{row.n_ctx:,}{' ◀' if requested else ''}",
            str(row.slots),
            str(row.most_slots),
            _mib(row.memory.total),
            f"{row.slot_bytes / MIB:,.1f}",
            style="bold green" if requested and row.slots else "red" if row.most_slots == 0 else None,
        )
    return table


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f}"
