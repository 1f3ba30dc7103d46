"""Scaling: rollouts per second by slots, a training step by tokens, a merge by model size.

`exponent` in a row is the local scaling exponent d log y / d log x since the previous row; 1 is linear growth.
"""

from __future__ import annotations

import csv
import math
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from benchmarks import merge, rollout_multi_turn, train_step
from benchmarks.measure import Options, Side, alone, rounded

Row = dict[str, float]
SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TASKS = (1, 2, 4, 8, 16, 32)
LAYERS = (1, 2, 4, 8)
PROMPT = 192


def with_exponents(rows: Sequence[Row], x: str, y: str) -> list[Row]:
    """Rows with the local exponent d log y / d log x."""
    result = [{**rows[0]}]
    for before, row in pairwise(rows):
        exponent = math.log(row[y] / before[y]) / math.log(row[x] / before[x])
        result.append({**row, "exponent": round(exponent, 3)})
    return result


def rollouts(options: Options) -> list[Row]:
    """Episodes per second of the 1 M model for 1 to 256 slots, with at least two episodes per slot."""
    rows = []
    for slots in SLOTS[:2] if options.quick else SLOTS:
        group = options.size(8, 2)
        work = replace(rollout_multi_turn.work(options), tasks=max(1, 2 * slots // group), group=group)
        side = rollout_multi_turn.ours(options, "tiny" if options.quick else "1m", work, slots=slots)
        rates = [sample.rate * work.tasks * work.group / work.action_tokens for sample in alone(side, options)]
        rows.append(
            {
                "slots": slots,
                "rollouts_per_s": rounded(statistics.median(rates)),
                "low": rounded(min(rates)),
                "high": rounded(max(rates)),
            }
        )
    return with_exponents(rows, "slots", "rollouts_per_s")


def steps(options: Options) -> list[Row]:
    """Seconds of a training step of the 1 M model, 1 to 32 groups of 8; `tokens` includes prompts."""
    rows = []
    for tasks in TASKS[:2] if options.quick else TASKS:
        prompt, answer, group = options.size(PROMPT, 16), options.size(train_step.ANSWER, 8), options.size(8, 2)
        mine = train_step.Ours(options, "tiny" if options.quick else "1m", prompt, answer, tasks, group)
        seconds = [sample.wall for sample in alone(Side("bellwether", mine.run), options)]
        rows.append(
            {
                "tokens": tasks * group * (prompt + answer),
                "seconds": rounded(statistics.median(seconds)),
                "low": rounded(min(seconds)),
                "high": rounded(max(seconds)),
            }
        )
    return with_exponents(rows, "tokens", "seconds")


def merges(options: Options) -> list[Row]:
    """Seconds and peak anonymous memory of a RAM merge of three specialists; `bytes` is one model's size."""
    rows = []
    few = replace(options, repeats=min(options.repeats, 3))
    for layers in LAYERS[:2] if options.quick else LAYERS:
        shape = replace(merge.SMALL if options.quick else merge.ABOUT_1_GB, layers=layers)
        folder = options.scratch / "merge-scaling"
        try:
            folders = merge.make_models(options, shape, folder)
            row: Row = {"bytes": merge.weight_bytes(folders[0])}
            for who in ("ours", "theirs"):
                runs = [merge.run_once(few, who, "ram", folders) for _ in range(few.warm_ups + few.times)][few.warm_ups :]
                row[f"{who}_seconds"] = rounded(statistics.median(run["wall_s"] for run in runs))
                row[f"{who}_anonymous_bytes"] = max(run["peak_anonymous_bytes"] for run in runs)
            rows.append(row)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    return with_exponents(rows, "bytes", "ours_seconds")


def write(path: Path, rows: Sequence[Row]) -> None:
    """The table as CSV."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
