"""The documents' blocks `benchmarks` (table and figure), `gpu` (`benchmarks.large`), `gpu-run`
(`benchmarks.gpu_run`) and `speed` (five lines), docs/figures/benchmarks.svg and docs/figures/gpu-run.svg.

`python -m benchmarks.documents` writes them from reports/benchmarks; `--check` writes nothing and fails if one is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_run
from benchmarks.figure import WORKERS, draw
from benchmarks.large import OUT as LARGE
from benchmarks.large import ROLLOUTS
from stages.reporting.generated_blocks import filled, link, markdown_table, write_or_check
from stages.reporting.style import drawing, to_svg

COMMAND = "python -m benchmarks.documents"
FIGURE = Path("docs/figures/benchmarks.svg")
RUN_FIGURE = Path("docs/figures/gpu-run.svg")
RAW = Path("reports/benchmarks/raw.json")
SHOWN = {
    "rollout_multi_turn@1m": "multi-turn rollouts",
    "rl_iteration": "a whole RL iteration",
    "mcts": "tree search",
    "merge_ram": "a RAM merge of three 1 GB models",
}
"""Scenarios of the block `speed`, with their labels."""
TITLE = "Speed compared with TRL, transformers and mergekit, and scaling with slots, tokens and size"


def number(value: float) -> str:
    """Three significant digits, thousands separated."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def spread_of(ratio: Mapping[str, float]) -> str:
    """A speed-up: the median, and the lowest and highest of a pair."""
    return f"**{number(ratio['median'])}** ({number(ratio['low'])} to {number(ratio['high'])})"


def in_order(scenarios: Mapping[str, Any]) -> dict[str, Any]:
    """Scenarios in natural sort order."""

    def key(name: str) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return dict(sorted(scenarios.items(), key=lambda item: key(item[0])))


def table(scenarios: Mapping[str, Any]) -> str:
    lines = []
    for name, row in in_order(scenarios).items():
        speed_up = spread_of(row["ratio"])
        lines.append((f"`{name}`", number(row["ours"]), number(row["theirs"]), row["unit"], speed_up, row["against"]))
    return markdown_table(("scenario", "ours", "theirs", "unit", "speed-up (lowest to highest)", "against"), lines, "lrrlrl")


def counted(count: int, one: str, several: str = "") -> str:
    """2, thread -> 2 threads."""
    return f"{count} {one if count == 1 else several or f'{one}s'}"


def devices(raw: Mapping[str, Any]) -> str:
    """The processor of most scenarios; others with the names of theirs."""
    scenarios: dict[str, list[str]] = {}
    for name, row in in_order(raw["scenarios"]).items():
        scenarios.setdefault(row["device"], []).append(f"`{name}`")
    first, *others = sorted(scenarios, key=lambda device: -len(scenarios[device])) or [raw["machine"]["cpu"]]
    return first + "".join(f" (on {device}: {', '.join(scenarios[device])})" for device in others)


def conditions(raw: Mapping[str, Any]) -> str:
    """Machine, versions and procedure of the measurement."""
    machine = raw["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(machine["versions"].items()))
    ours = f"{counted(machine['workers'], 'process', 'processes')} of {counted(machine['threads'], 'thread')}"
    return (
        f"{devices(raw)}, {machine['cores']} cores (ours: {ours}), "
        f"{machine['precision']}; alternating order, {raw['warm_ups']} warm-up, medians of up to {raw['repeats']} repeats. "
        f"{versions}. All scenarios together took {sum(raw['scenario_seconds'].values()) / 60:.0f} minutes."
    )


def merge_notes(scenarios: Mapping[str, Any]) -> str:
    """Peak memory of the merges, and their time relative to the limit; "" if they were not measured."""
    parts = []
    for name, row in in_order(scenarios).items():
        memory = row["notes"].get("peak_memory_bytes")
        anonymous = row["notes"].get("peak_anonymous_bytes")
        if memory and anonymous:
            ours, theirs = (f"{memory[who] / 1e9:.2f} GB ({anonymous[who] / 1e9:.2f} GB anonymous)" for who in ("ours", "theirs"))
            parts.append(f"`{name}` {ours} against {theirs}")
            if times := row["notes"].get("times_limit"):
                parts[-1] += f", in {times:.2f} times the time of only reading the inputs and writing the output"
    return f"Peak memory: {'; '.join(parts)}." if parts else ""


def profiles(rows: Sequence[Mapping[str, Any]]) -> str:
    """Time breakdown of ours, a row per scenario; "" if it was not measured."""
    if not rows:
        return ""
    parts = [name for name in rows[0] if name != "scenario"]
    lines = ((f"`{row['scenario']}`", *(f"{100 * row[part]:.0f} %" for part in parts)) for row in rows)
    return markdown_table(("share of our time", *parts), lines, "l" + "r" * len(parts))


def by_workers(rows: Sequence[Mapping[str, float]]) -> str:
    """Speed-ups by number of workers; "" if they were not measured."""
    if not rows:
        return ""
    lines = []
    for row in rows:
        spread = f"{number(row['measured'])} ({number(row['low'])} to {number(row['high'])})" if "measured" in row else ""
        lines.append((f"{row['workers']:g}", spread, *(number(row[name]) for name in ("together", *WORKERS))))
    header = ("workers", "measured, all four stages", "model, all four stages", *(f"model, {stage}" for stage in WORKERS))
    return markdown_table(header, lines, "r" * len(header))


def block(raw: Mapping[str, Any], document: Path) -> str:
    where = profiles(raw["tables"].get("profiles", {}).get("rows", []))
    picture = f"![{TITLE}]({link(FIGURE, document)})"
    workers = by_workers(raw["tables"].get("workers", {}).get("rows", []))
    parts = [picture, table(raw["scenarios"]), conditions(raw), merge_notes(raw["scenarios"]), where, workers]
    return "\n\n".join(part for part in parts if part)


def speed(raw: Mapping[str, Any], large: Mapping[str, Any]) -> str:
    """A line for each scenario in SHOWN, and one for a GPU."""
    lines = []
    for name, what in SHOWN.items():
        row = raw["scenarios"][name]
        ratio = row["ratio"]
        lines.append(
            f"- {what}: {number(row['ours'])} {row['unit']}, **{number(ratio['median'])} times** as fast as {row['against']} "
            f"({number(ratio['low'])} to {number(ratio['high'])})"
        )
    return "\n".join([*lines, *speed_on_gpu(large)])


def speed_on_gpu(large: Mapping[str, Any]) -> list[str]:
    """A line of rollouts and training steps of `benchmarks.large`; none before both were measured."""
    measured = {name: row for name, row in large["scenarios"].items() if "failed" not in row}
    steps = sorted(row["ratio"]["median"] for name, row in measured.items() if name.startswith("train_step"))
    if not steps or (rollouts := measured.get(ROLLOUTS)) is None:
        return []
    return [
        f"- on an {large['machine']['device']}, {large['model']['parameters'] / 1e6:.0f} million weights in bfloat16: rollouts "
        f"{number(rollouts['ours'])} {rollouts['unit']}, **{number(rollouts['ratio']['median'])} times**, and training steps "
        f"**{number(steps[0])} to {number(steps[-1])} times** as fast as TRL's"
    ]


def on_gpu(large: Mapping[str, Any]) -> str:
    """The scenarios of `benchmarks.large` that did not fail, with peak memory and the device."""
    lines = []
    for name, row in in_order(large["scenarios"]).items():
        if "failed" in row:
            continue
        spread = spread_of(row["ratio"])
        sides = ("ours", "theirs")
        times = (f"{number(row[who])} {row['unit']}" for who in sides)
        memory = (f"{row['peak_bytes'][who] / 2**30:.1f} GiB" for who in sides)
        lines.append((f"`{name}`", *times, spread, *memory))
    header = ("scenario", "ours", "TRL", "speed-up (lowest to highest)", "our peak memory", "TRL's")
    machine = large["machine"]
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers", "trl"))
    return (
        f"{markdown_table(header, lines, 'lrrrrr')}\n\n{machine['device']}, {machine['precision']}, medians of "
        f"{large['repeats']} repeats; {versions}, CUDA {machine['cuda']}."
    )


def figure(raw: Mapping[str, Any]) -> str:
    tables = {name: value["rows"] for name, value in raw["tables"].items()}
    with drawing():
        return to_svg(draw(in_order(raw["scenarios"]), tables), "benchmarks", TITLE, standalone=True).text


def run_figure(run: Mapping[str, Any]) -> str:
    with drawing():
        title = f"Success per step of reinforcement learning, {run['device']}"
        return to_svg(gpu_run.figure(run), "gpu-run", title, standalone=True).text


def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the documents' benchmarks.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    check = parser.parse_args().check
    root = Path.cwd()
    if not (root / RAW).exists():
        print(f"documents: {RAW} does not exist; run 'make bench' first", file=sys.stderr)
        return 1
    raw = json.loads((root / RAW).read_text(encoding="utf-8"))
    large = json.loads((root / LARGE).read_text(encoding="utf-8"))
    run = json.loads((root / gpu_run.KEPT).read_text(encoding="utf-8"))
    blocks = {
        "benchmarks": lambda document: block(raw, document),
        "gpu": lambda document: on_gpu(large),
        "gpu-run": lambda document: gpu_run.block(run),
        "speed": lambda document: speed(raw, large),
    }
    try:
        files = filled(root, blocks)
    except ValueError as error:
        print(f"documents: {error}", file=sys.stderr)
        return 1
    return write_or_check(root, {**files, FIGURE: figure(raw), RUN_FIGURE: run_figure(run)}, check, COMMAND)


if __name__ == "__main__":
    raise SystemExit(main())
