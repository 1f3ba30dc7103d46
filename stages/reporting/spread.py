"""`python -m stages.reporting.spread [SEED=FILE ...]`: how much the results of the lifecycle vary with its seed.

FILE is data/evaluation/rows.parquet of a lifecycle with that seed (flows/spread.py runs them); all play the same panels. Their
outcomes per task are stored in reports/spread.parquet, which is in git. Without arguments that file is read. Either way
reports/spread.json is written, and its table printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from stages.claims.inference import Estimate, Sample, compare
from stages.claims.sequential import effect
from stages.curation.panel import PanelMismatchError, require_same_hash
from stages.evaluation.statistics import StatisticsError
from stages.records.episode import read_rows, write_table
from stages.reporting.generated_blocks import markdown_table
from stages.reporting.results import model_order, signed, verdict_mark
from stages.runtime.command import command
from stages.runtime.files import atomic_text

ROWS, FILE = Path("reports") / "spread.parquet", Path("reports") / "spread.json"
SCHEMA = pa.schema(
    [
        ("seed", pa.int32()),
        ("model", pa.dictionary(pa.int16(), pa.string())),
        ("domain", pa.dictionary(pa.int16(), pa.string())),
        ("panel", pa.dictionary(pa.int16(), pa.string())),
        ("policy_hash", pa.dictionary(pa.int16(), pa.string())),
        ("cluster", pa.dictionary(pa.int16(), pa.string())),
        ("task_id", pa.dictionary(pa.int16(), pa.string())),
        ("attempts", pa.int16()),
        ("successes", pa.int16()),
    ]
)
"""One row per (seed, model, task)."""
ALPHA = 0.05
MARGIN = 0.05
"""Differences in success whose interval is within this are equivalent."""
DIGITS = 6
NOT_MEASURED = (
    "How much these results vary with the seed has not been measured: `python -m flows.spread` runs the lifecycle with five "
    "seeds, evaluates all of them on fresh panels, and says first what that costs."
)
COLUMNS = ("sft", "specialist", "merged", "specialist − sft", "merged − sft", "merged − linear")
"""Of the short table."""
Rows = Sequence[Mapping[str, Any]]


def gathered(files: Mapping[int, Path]) -> list[dict[str, Any]]:
    """Rows of SCHEMA, seed by seed in the order of the evaluation rows. Raises PanelMismatchError if their panels differ."""
    found: dict[tuple[int, str, str, str], dict[str, Any]] = {}
    columns = [name for name in SCHEMA.names if name not in ("seed", "attempts", "successes")]
    for seed, path in sorted(files.items()):
        for row in read_rows(path, [*columns, "success"]):
            own = {"seed": seed, **{name: row[name] for name in columns}, "attempts": 0, "successes": 0}
            kept = found.setdefault((seed, row["model"], row["domain"], row["task_id"]), own)
            kept["attempts"] += 1
            kept["successes"] += row["success"]
    rows = list(found.values())
    for domain in {row["domain"]: None for row in rows}:
        require_same_hash({f"seed {row['seed']}": row["panel"] for row in rows if row["domain"] == domain}, domain)
    return rows


def per_task(rows: Rows) -> tuple[np.ndarray, Sample]:
    """One model on one panel: (success of each seed [S], its sample of seeds by clusters of tasks). Raises StatisticsError unless
    every seed has every task."""
    seeds, tasks = sorted({row["seed"] for row in rows}), {row["task_id"]: row["cluster"] for row in rows}
    if [(row["seed"], row["task_id"]) for row in rows] != [(seed, task) for seed in seeds for task in sorted(tasks)]:
        raise StatisticsError(f"{ROWS}: the seeds of {rows[0]['model']} on {rows[0]['domain']} lack tasks that others have")
    shares = np.array([row["successes"] / row["attempts"] for row in rows]).reshape(len(seeds), len(tasks))
    return shares.mean(axis=1), Sample.of_tasks(shares, [tasks[task] for task in sorted(tasks)])


def against_nothing(sample: Sample) -> Estimate:
    """The mean of a sample with its interval."""
    assert sample.sizes is not None
    return compare(sample, Sample(np.zeros((1, len(sample.sizes))), sample.sizes, seedless=True), ALPHA)


def _entry(found: Estimate, per_seed: np.ndarray) -> dict[str, Any]:
    """low and high are null where all values are equal, so that nothing says how far they scatter."""
    numbers = {"mean": found.difference, "lowest": per_seed.min(), "highest": per_seed.max()}
    ends = {"low": None, "high": None} if found.degenerate else {"low": found.low, "high": found.high}
    return {
        **{name: None if value is None else round(float(value), DIGITS) for name, value in {**numbers, **ends}.items()},
        "per_seed": [round(float(value), DIGITS) for value in per_seed],
    }


def comparisons(domains: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """(model, the one it is compared with, domain)."""
    for domain in domains:
        own = f"rl@{domain}"
        for a, b in ((own, "sft"), ("merged", "sft"), ("merged", own), ("merged", "merged_linear")):
            yield a, b, domain


def summary(rows: Rows) -> dict[str, Any]:
    """Content of reports/spread.json: per domain and model (and difference of two) the mean over seeds, the lowest and highest
    seed, and the interval over seeds and clusters of tasks. Without rows its `seeds` are empty."""
    if not rows:
        return {"seeds": [], "panels": {}, "models": {}, "differences": []}
    by_key: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_key.setdefault((row["model"], row["domain"]), []).append(row)
    found = {key: per_task(of) for key, of in by_key.items()}
    domains = list(dict.fromkeys(domain for _, domain in found))
    models: dict[str, dict[str, Any]] = {}
    for model in model_order(sorted({model for model, _ in found}), domains):
        models[model] = {
            domain: _entry(against_nothing(found[model, domain][1]), found[model, domain][0])
            for domain in domains
            if (model, domain) in found
        }
    differences = []
    for a, b, domain in comparisons(domains):
        if (a, domain) in found and (b, domain) in found:
            (first, sample), (second, other) = found[a, domain], found[b, domain]
            estimate = compare(sample, other, ALPHA)
            entry = _entry(estimate, first - second)
            differences.append({"a": a, "b": b, "domain": domain, **entry, "effect": effect(estimate, MARGIN)})
    panels = {}
    for domain in domains:
        tasks = {row["task_id"]: row for (_, name), of in by_key.items() if name == domain for row in of}
        clusters = {row["cluster"] for row in tasks.values()}
        panels[domain] = {"hash": next(iter(tasks.values()))["panel"], "tasks": len(tasks), "clusters": len(clusters)}
    return {
        "seeds": sorted({row["seed"] for row in rows}),
        "attempts": rows[0]["attempts"],
        "confidence": 1 - ALPHA,
        "panels": panels,
        "models": models,
        "differences": differences,
    }


def _share(percent: float) -> str:
    return f"{round(percent, 1) + 0.0:.1f}"  # -0.0 + 0.0 is 0.0


def _cells(entry: Mapping[str, Any], difference: bool) -> tuple[str, str, str]:
    """Mean, lowest to highest seed, interval: in per cent, or of a difference in points with their sign."""
    show = signed if difference else _share
    shown = {key: show(100 * value) for key, value in entry.items() if isinstance(value, float)}
    interval = "–" if entry["low"] is None else f"{shown['low']} to {shown['high']}"
    unit = "" if difference else " %"
    return f"{shown['mean']}{unit}", f"{shown['lowest']} to {shown['highest']}", interval


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of all numbers: each domain's models, then its differences with their effect."""
    rows = []
    for domain in found["panels"]:
        for model, of in found["models"].items():
            if domain in of:
                rows.append([domain, model, *_cells(of[domain], False), ""])
        for entry in found["differences"]:
            if entry["domain"] == domain:
                rows.append([domain, f"{entry['a']} − {entry['b']}", *_cells(entry, True), verdict_mark(entry["effect"])])
    level = f"{100 * found['confidence']:g} % interval"
    return ["domain", "success", f"mean of {len(found['seeds'])} seeds", "lowest to highest seed", level, "effect"], rows


def about(found: Mapping[str, Any]) -> str:
    """What the numbers are of, and what they are conditional on."""
    panels = "; ".join(f"{name}: n = {panel['tasks']}, panel `{panel['hash']}`" for name, panel in found["panels"].items())
    return (
        f"All of the lifecycle with `seed` {', '.join(map(str, found['seeds']))}, on the same training tasks and the same fresh "
        f"panels ({panels}), which no setting was chosen on. Intervals are over seeds and clusters of tasks; equivalent: within "
        f"{100 * MARGIN:g} points."
    )


def full(found: Mapping[str, Any]) -> str:
    """Markdown: all numbers, and `about`; NOT_MEASURED without seeds."""
    return f"{markdown_table(*table(found), 'llrrrl')}\n\n{about(found)}" if found["seeds"] else NOT_MEASURED


def short(found: Mapping[str, Any]) -> str:
    """Markdown: a line per domain with the success of sft, specialist and merge (lowest to highest seed), and their differences
    with intervals; NOT_MEASURED without seeds."""
    if not found["seeds"]:
        return NOT_MEASURED
    rows = []
    for domain in found["panels"]:
        names = {"sft": "sft", f"rl@{domain}": "specialist", "merged": "merged", "merged_linear": "linear"}
        row = {"": domain, **dict.fromkeys(COLUMNS, "–")}
        for model, name in names.items():
            if name in row and domain in found["models"].get(model, ()):
                mean, seeds, _ = _cells(found["models"][model][domain], False)
                row[name] = f"{mean} ({seeds})"
        for entry in found["differences"]:
            name = f"{names[entry['a']]} − {names[entry['b']]}" if entry["domain"] == domain else ""
            if name in COLUMNS:
                mean, _, interval = _cells(entry, True)
                row[name] = f"{mean} ({interval})"
        rows.append(row.values())
    level = f"{100 * found['confidence']:g} %"
    return (
        f"{markdown_table(['', *COLUMNS], rows, 'l' + 'r' * len(COLUMNS))}\n\n"
        f"Mean of {len(found['seeds'])} seeds on fresh panels (lowest to highest seed); differences in points ({level} interval "
        "over seeds and tasks). `python -m flows.spread` repeats it."
    )


def load_rows(root: Path) -> list[dict[str, Any]]:
    """reports/spread.parquet; [] without it."""
    return read_rows(root / ROWS) if (root / ROWS).exists() else []


def files(root: Path) -> dict[Path, str]:
    """FILE and its content, of reports/spread.parquet."""
    return {FILE: json.dumps(summary(load_rows(root)), indent=1) + "\n"}


def _seed_and_file(text: str) -> tuple[int, Path]:
    seed, _, path = text.partition("=")
    if not seed.isdecimal() or not path:
        raise argparse.ArgumentTypeError(f"'{text}' is not SEED=FILE")
    return int(seed), Path(path)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.reporting.spread", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "files", nargs="*", type=_seed_and_file, metavar="SEED=FILE", help="evaluation rows of the lifecycle with SEED"
    )
    given: dict[int, Path] = dict(parser.parse_args().files)
    root = Path.cwd()
    try:
        if given:
            write_table(root / ROWS, SCHEMA, gathered(given))
        found = summary(load_rows(root))
    except (FileNotFoundError, PanelMismatchError, StatisticsError, ValueError) as error:
        print(f"spread: {error}", file=sys.stderr)
        return 1
    for path, text in files(root).items():
        atomic_text(root / path, text)
    print(full(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
