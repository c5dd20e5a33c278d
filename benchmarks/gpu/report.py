"""Turns the figures of `make gpu-check` into a paragraph for README and a picture."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.places import ROOT
from llamabatch.utils.version import __version__

LEAST_RATIO = 1.3
"""The least ratio of our tokens/s to llama-server's in a burst."""
MOST_HOST = 0.1
"""The largest share of a step that may pass outside of llama_decode."""
_COLORS = ("#D55E00", "#0072B2", "#CCCCCC")  # of Okabe and Ito's palette
_MANIFEST = ROOT.parent / "pack.json"


def circumstances(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the machine as the build part describes it, the release, the commit and the time."""
    commit = ""
    if _MANIFEST.is_file():
        commit = str(json.loads(_MANIFEST.read_text(encoding="utf-8"))["commit"])
    machine = (parts.get("build", {}).get("found") or {}).get("machine")
    return {
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "llamabatch": __version__,
        "commit": commit,
        "machine": machine or {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }


def found(document: Mapping[str, Any], part: str) -> dict[str, Any]:
    entry: dict[str, Any] = document["parts"].get(part, {}).get("found") or {}
    return entry


def paragraph(document: Mapping[str, Any]) -> str:
    """Returns the figures in sentences; leaves out a part without figures."""
    names = ", ".join(found(document, "build").get("devices", [])) or document["machine"]["cpu"]
    what = "a small shape" if document["quick"] else "an 8B shape in Q4_K_M"
    sentences = [f"On {names} ({document['backend']}), with {what}:"]
    for entry in found(document, "burst").get("sizes", []):
        speeds = {name: row["tokens_per_s"][-1] for name, row in entry["peers"].items() if row.get("tokens_per_s")}
        if speeds:
            told = ", ".join(f"{name} {speed:,.0f}" for name, speed in speeds.items())
            ratio = f", {entry['ratio']:.2f} times llama-server" if "ratio" in entry else ""
            sentences.append(f"a burst of {entry['n_slots']} requests makes {told} tokens/s{ratio}.")
    for entry in found(document, "host").get("sizes", []):
        if entry.get("steps"):
            sentences.append(
                f"With {entry['n_slots']} rows a step takes {entry['step_ms']:.1f} ms, {entry['host_ms']:.2f} ms of it "
                f"({100 * entry['share']:.0f} %) on the host."
            )
    if "largest_gap" in found(document, "memory"):
        memory = found(document, "memory")
        sentences.append(
            f"Predicted memory was within {100 * memory['largest_gap']:.0f} % of what llama.cpp reports, in "
            f"{len(memory['settings'])} settings."
        )
    tests = found(document, "tests")
    if tests:
        sentences.append(f"{tests['passed']} of {tests['tests'] - tests['skipped']} tests of the model passed.")
    for name, entry in found(document, "workloads").get("workloads", {}).items():
        if "ratio" in entry:
            sentences.append(f"{name.capitalize()}: {entry['ratio']:.2f} times llama-server.")
    sizes = found(document, "slots").get("sizes", {})
    if sizes:
        best = max(sizes, key=lambda size: float(sizes[size]))
        sentences.append(f"Of 1 to {max(map(int, sizes))} slots, {best} make the most, {sizes[best]:,.0f} tokens/s.")
    return " ".join(sentences)


def targets(document: Mapping[str, Any]) -> dict[str, bool]:
    """The targets of the check by name, and whether each is met."""
    met = {
        f"burst of {entry['n_slots']} at least {LEAST_RATIO} times llama-server": entry["ratio"] >= LEAST_RATIO
        for entry in found(document, "burst").get("sizes", [])
        if "ratio" in entry
    }
    met |= {
        f"host share below {100 * MOST_HOST:.0f} % with {entry['n_slots']} rows": entry["share"] < MOST_HOST
        for entry in found(document, "host").get("sizes", [])
        if entry.get("steps")
    }
    return met


def draw(document: Mapping[str, Any], path: Path) -> str:
    """Writes the picture if matplotlib is installed and there are figures; returns a line about it."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no picture: matplotlib is not here; `python -m benchmarks.gpu.report FILE.json` draws it elsewhere"
    panels = [panel for panel in (_burst, _slots, _host) if panel(document, None)]
    if not panels:
        return "no picture yet"
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from llamabatch.utils.plotting import STYLE, tidy

    with rc_context(STYLE):
        fig = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
        devices = ", ".join(found(document, "build").get("devices", [])) or document["machine"]["cpu"]
        fig.suptitle(f"{devices} ({document['backend']}), {document['created'][:10]}", x=0.01, ha="left", fontsize=11)
        for at, panel in enumerate(panels):
            axes = fig.add_subplot(1, len(panels), at + 1)
            panel(document, axes)
            tidy(axes)
        fig.savefig(path, dpi=140, facecolor="white")
    return f"picture: {path}"


def _burst(document: Mapping[str, Any], axes: Any) -> bool:
    """Draws bars of the peers by number of slots, unless `axes` is None. Returns False if there are no figures."""
    sizes = [entry for entry in found(document, "burst").get("sizes", []) if entry["peers"]]
    names = list(dict.fromkeys(name for entry in sizes for name in entry["peers"]))
    if axes is not None:
        for number, name in enumerate(names):
            speeds = [(entry["peers"].get(name, {}).get("tokens_per_s") or [0.0])[-1] for entry in sizes]
            places = [at + 0.25 * number for at in range(len(sizes))]
            axes.bar(places, speeds, width=0.23, label=name, color=_COLORS[number % len(_COLORS)])
        axes.set_xticks([at + 0.25 for at in range(len(sizes))], [f"{entry['n_slots']} slots" for entry in sizes])
        axes.set_ylabel("generated tokens/s")
        axes.set_title("burst")
        axes.legend(frameon=False, fontsize=8)
    return bool(sizes)


def _slots(document: Mapping[str, Any], axes: Any) -> bool:
    sizes = {int(size): speed for size, speed in found(document, "slots").get("sizes", {}).items()}
    if axes is not None:
        at = sorted(sizes)
        axes.plot(at, [sizes[size] for size in at], "o-", color=_COLORS[0])
        axes.set_xlabel("slots")
        axes.set_ylabel("generated tokens/s")
        axes.set_title("by slots")
    return bool(sizes)


def _host(document: Mapping[str, Any], axes: Any) -> bool:
    sizes = [entry for entry in found(document, "host").get("sizes", []) if entry.get("steps")]
    if axes is not None:
        at, host = range(len(sizes)), [entry["host_ms"] for entry in sizes]
        device = [entry["step_ms"] - entry["host_ms"] for entry in sizes]
        axes.bar(at, device, width=0.5, label="device", color=_COLORS[1])
        axes.bar(at, host, width=0.5, bottom=device, label="host", color=_COLORS[0])
        axes.set_xticks(list(at), [f"{entry['n_slots']} rows" for entry in sizes])
        axes.set_ylabel("ms a step")
        axes.set_title("a decode step")
        axes.legend(frameon=False, fontsize=8)
    return bool(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.report", description=__doc__)
    parser.add_argument("file", type=Path, help="of `make gpu-check`")
    path = parser.parse_args().file
    document = json.loads(path.read_text(encoding="utf-8"))
    print(paragraph(document))
    for name, is_met in targets(document).items():
        print(f"{name}: {'met' if is_met else 'MISSED'}")
    print(draw(document, path.with_suffix(".png")))


if __name__ == "__main__":
    main()
