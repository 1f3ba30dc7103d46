"""What a run's stages recorded of themselves on a GPU.

`python -m benchmarks.gpu_run FOLDER` keeps it from FOLDER, the checkout in which they ran, as reports/benchmarks/gpu_run.json;
`python -m benchmarks.documents` writes the block `gpu-run` and docs/figures/gpu-run.svg from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scipy import stats

from stages.records.episode import read_json
from stages.reporting.figures.curves import rl_panel
from stages.reporting.generated_blocks import markdown_table
from stages.reporting.inputs import optional_json, read_history
from stages.reporting.results import p_value, signed
from stages.runtime.command import command
from stages.runtime.costs import FOLDER, Cost, read_cost
from stages.runtime.speed import in_order, part_seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEPT = Path("reports/benchmarks/gpu_run.json")
CURVE = ("step", "success", "kl", "turns", "policy_tokens", "episodes")
"""Columns of rl's history that are kept."""
PARTS_SHOWN = ("start", "engine", "training")
APART = ("mean_logprob_difference", "max_logprob_difference")
LEAST_STEPS = 6
"""Of an interval: two steps at either end."""
COMPARED = ("domain", "a", "b", "difference", "low", "high", "p", "n")
"""What is kept of evaluate's comparison of a specialist with sft, its start, on the panel of its own domain."""


def stage(cost: Cost) -> dict[str, Any]:
    """Seconds by what they went to, tokens and the GPU's peak memory in bytes, of one stage."""
    kept = {name: getattr(cost, name) for name in ("seconds", "counts", "peak_gpu_bytes")}
    return {**kept, "parts": part_seconds(cost.spans)}


def collected(folder: Path) -> dict[str, Any]:
    """What is kept of a run. Raises FileNotFoundError if no stage that ran on a GPU is recorded in `folder`."""
    read = {path.stem: read_cost(folder, path.stem) for path in (folder / FOLDER).glob("*.json")}
    costs = {name: cost for name, cost in read.items() if cost and cost.done and cost.peak_gpu_bytes}
    if not costs:
        raise FileNotFoundError(f"{folder / FOLDER} records no stage that ran on a GPU; run one there first")
    rl = {}
    for domain in sorted(name.partition("@")[2] for name in costs if name.startswith("rl@")):
        history = read_history(folder / f"reports/rl/{domain}_history.csv")
        summary = optional_json(folder / f"reports/rl/{domain}.json")
        if history and summary:
            apart = {name: summary[name] for name in APART if name in summary}
            rl[domain] = {"algorithm": summary["algorithm"], **apart, "history": {name: history[name] for name in CURVE}}
    panels = []
    if "evaluate" in costs:
        evaluation = read_json(folder / "reports/evaluation.json")
        mean = {(model, domain): of["success"]["mean"] for model, by in evaluation["models"].items() for domain, of in by.items()}
        for of in evaluation["comparisons"]:
            if of["a"] == f"rl@{of['domain']}" and of["b"] == "sft":
                sides = {f"success_{side}": mean[of[side], of["domain"]] for side in "ab"}
                panels.append({**{name: of[name] for name in COMPARED}, **sides})
    device = sorted({cost.machine for cost in costs.values()})
    stages = {name: stage(cost) for name, cost in costs.items()}
    return {"device": ", ".join(device), "stages": stages, "rl": rl, "panels": panels}


def gain(success: Sequence[float]) -> tuple[float, float, float, float, float]:
    """(mean of the first third of the steps, of the last third, their difference, low, high). The 95 % interval is Welch's, with
    steps as units, since each plays other tasks."""
    third = len(success) // 3
    first, last = success[:third], success[-third:]
    interval = stats.ttest_ind(last, first, equal_var=False).confidence_interval(0.95)
    before, after = statistics.fmean(first), statistics.fmean(last)
    return before, after, after - before, float(interval.low), float(interval.high)


def block(kept: Mapping[str, Any]) -> str:
    """A table of the stages, and a line per domain of rl."""
    lines = []
    for name in in_order(kept["stages"]):
        of = kept["stages"][name]
        parts = of["parts"]
        rate = f"{of['counts']['sampled_tokens'] / parts['engine']:,.0f}" if parts["engine"] else ""
        seconds = (f"{value:.0f}" if value else "" for value in (of["seconds"], *(parts[key] for key in PARTS_SHOWN)))
        lines.append((f"`{name}`", *seconds, rate, f"{of['peak_gpu_bytes'] / 2**30:.1f} GiB"))
    heads = ("stage", "seconds", "start", "playing", "training", "sampled tokens/s", "peak GPU memory")
    blocks = [markdown_table(heads, lines, "lrrrrrr"), f"{kept['device']}."]
    for domain, of in kept["rl"].items():
        success = of["history"]["success"]
        if len(success) < LEAST_STEPS:
            continue
        before, after, difference, low, high = gain(success)
        episodes = f"{of['history']['episodes'][0]:.0f}"
        line = (
            f"- `rl@{domain}`, {of['algorithm']}, {len(success)} steps of {episodes} episodes: success on training tasks "
            f"{100 * before:.1f} % in the first {len(success) // 3} steps, {100 * after:.1f} % in the last; "
            f"{signed(100 * difference)} points (95 % CI {signed(100 * low)} to {signed(100 * high)}, steps as units)."
        )
        if of.keys() >= set(APART):
            line += (
                f" Log-probs of the engine and of training differ by {of['mean_logprob_difference']:.4f} on average, "
                f"{of['max_logprob_difference']:.2f} at most."
            )
        blocks.append(line)
    if kept["panels"]:
        titles = ("frozen panel", "tasks", "sft", "rl", "difference (95 % CI)", "p")
        blocks.append(markdown_table(titles, panel_lines(kept), "lrrrrr"))
    return "\n\n".join(blocks)


def panel_lines(kept: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Per panel: sft's success and that of the specialist trained from it, in percent, and their paired difference in points."""
    lines = []
    for of in kept["panels"]:
        points = [signed(100 * of[name]) for name in ("difference", "low", "high")]
        sides = (f"{100 * of[f'success_{side}']:.1f} %" for side in "ba")
        lines.append(
            (of["domain"], str(of["n"]), *sides, f"{points[0]} ({points[1]} to {points[2]})", p_value(of["p"], bare=True))
        )
    return lines


def figure(kept: Mapping[str, Any]) -> Figure:
    """Success per step of rl, a line per domain."""
    histories = {domain: of["history"] for domain, of in kept["rl"].items()}
    drawn = rl_panel(histories, list(histories), "success", "Success on training tasks")
    drawn.axes[0].legend(loc="lower right")
    return drawn


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_run", description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkout in which stages ran on a GPU")
    try:
        kept = collected(parser.parse_args().folder)
    except FileNotFoundError as error:
        print(f"gpu_run: {error}", file=sys.stderr)
        return 1
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"gpu_run: wrote {KEPT}; now run python -m benchmarks.documents")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
