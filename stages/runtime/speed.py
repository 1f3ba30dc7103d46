"""`python -m stages.runtime.speed`: how fast the stages ran here, and where their time went.

Reads `.bellwether/costs` (stages/runtime/costs.py). MLflow has the same figures as `speed/...`, the report those of kept runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from stages.runtime.command import command
from stages.runtime.costs import FOLDER, read_cost

STAGES = ("curate", "transfer", "sft", "rollout", "annotate", "rl", "merge", "evaluate", "report")
PARTS = ("start", "environment", "engine", "training", "waiting", "files", "other")
"""What a stage's processes do, as spans name it (stages/runtime/spans.py). environment: resets and steps, or waiting for those of
another thread; waiting: for the stage's other processes; files: checkpoints."""
RATES = ("tokens sampled/s", "tokens fed/s", "steps/s", "ms per step", "steps remembered", "time saved", "memory")
HEADER = ("stage", "time", "CPU use", *RATES, *PARTS)


class Measurements(Protocol):
    """A Cost, or what a kept run holds of it."""

    @property
    def seconds(self) -> float: ...
    @property
    def cpu_seconds(self) -> float: ...
    @property
    def cores(self) -> int: ...
    @property
    def peak_tree_bytes(self) -> int: ...
    @property
    def spans(self) -> Mapping[str, float]: ...
    @property
    def beside(self) -> Mapping[str, float]: ...
    @property
    def counts(self) -> Mapping[str, int]: ...


def part_seconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by PARTS; "training.forward" belongs to "training", an unknown span to "other"."""
    found = dict.fromkeys(PARTS, 0.0)
    for name, value in seconds.items():
        part = name.split(".")[0]
        found[part if part in found else "other"] += value
    return found


def speed(cost: Measurements) -> dict[str, float]:
    """Figures by name: `cpu_use` (of all cores, 0 to 1); `share/<part>` and `share/<span>`, of the time of all processes;
    `<count>_per_s`, `environment_ms` per step, `environment_remembered` of the steps (0 to 1), `environment_saved_s`, had these
    taken as long as the others, `memory_bytes`. Without what was not measured."""
    found: dict[str, float] = {}
    if cost.seconds and cost.cores:
        found["cpu_use"] = cost.cpu_seconds / cost.seconds / cost.cores
    if total := sum(cost.spans.values()):
        shares = {**part_seconds(cost.spans), **{name: value for name, value in cost.spans.items() if "." in name}}
        found |= {f"share/{name}": value / total for name, value in shares.items()}
    if cost.seconds:
        found |= {f"{name}_per_s": number / cost.seconds for name, number in cost.counts.items()}
    if steps := cost.counts.get("environment_steps"):
        # Where another thread steps, the main thread's span is the wait for it.
        spent, hits = cost.beside.get("environment") or cost.spans.get("environment", 0.0), cost.counts.get("environment_hits", 0)
        found["environment_ms"] = 1000 * spent / steps
        if 0 < hits < steps:
            found |= {"environment_remembered": hits / steps, "environment_saved_s": spent * hits / (steps - hits)}
    if cost.peak_tree_bytes:
        found["memory_bytes"] = float(cost.peak_tree_bytes)
    return found


def duration(seconds: float) -> str:
    """ "41 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def row(title: str, cost: Measurements) -> list[str]:
    """The texts of HEADER's columns for one stage."""
    found = speed(cost)

    def cell(name: str, form: str = "{:,.0f}", factor: float = 1.0) -> str:
        return form.format(factor * found[name]) if name in found else "–"

    rates = [cell(f"{name}_per_s") for name in ("sampled_tokens", "fed_tokens", "environment_steps")]
    size = memory(found["memory_bytes"]) if "memory_bytes" in found else "–"
    shares = [cell(f"share/{part}", "{:.0f} %", 100) for part in PARTS]
    use = cell("cpu_use", "{:.0f} %", 100)
    steps = [
        cell("environment_ms", "{:.2g}"),
        cell("environment_remembered", "{:.0f} %", 100),
        cell("environment_saved_s", "{:,.0f} s"),
    ]
    return [title, duration(cost.seconds), use, *rates, *steps, size, *shares]


def in_order(titles: Iterable[str]) -> list[str]:
    """Titles of stages (`rl@search`) in the lifecycle's order, those of one stage as given."""
    return sorted(titles, key=lambda title: STAGES.index(title.split("@")[0]))


def table(root: Path) -> str:
    """The costs of the stages' last runs in checkout `root` as lines of text; "" if there are none."""
    found = {}
    for path in sorted((root / FOLDER).glob("*.json")):
        if path.stem.split("@")[0] in STAGES and (cost := read_cost(root, path.stem)) and cost.done:
            found[path.stem] = cost
    if not found:
        return ""
    rows = [list(HEADER), *(row(title, found[title]) for title in in_order(found))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in rows)


@command
def main() -> int:
    argparse.ArgumentParser(prog="python -m stages.runtime.speed", description="Speed of the stages' last runs.").parse_args()
    if not (text := table(Path.cwd())):
        print(f"speed: no stage has run in this checkout ({FOLDER} holds no costs); run 'make lifecycle' first", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
