"""What each specialist contributes to the merged model's success over seeds of the lifecycle, from reports/spread.parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stages.claims.inference import Estimate, Sample
from stages.control.exact.contributions import in_order
from stages.control.exact.shapley import CoalitionError, shapley
from stages.evaluation.statistics import StatisticsError
from stages.reporting.generated_blocks import markdown_table
from stages.reporting.results import signed
from stages.reporting.spread import ALPHA, NOT_MEASURED, against_nothing

Rows = Sequence[Mapping[str, Any]]
TOGETHER = "all together"
"""The row of a domain's gain."""


def merge_coalitions(evaluated: Sequence[str], domains: Sequence[str], base: str = "sft") -> list[str]:
    """The models of all coalitions of the domains' specialists, in the order of stages/control/exact/shapley.py: `base`, what
    specialists of one domain are, and the merge of all. Raises CoalitionError if one is not among the models evaluated."""
    models = {frozenset(): base, frozenset(domains): "merged"} | {frozenset([domain]): f"rl@{domain}" for domain in domains}
    if lacking := [name for name in models.values() if name not in evaluated]:
        raise CoalitionError(f"{lacking[0]} was not evaluated; add it to evaluate.models")
    return in_order(models, domains, "merges of some of the specialists are not evaluated")


def over_seeds(rows: Rows) -> Iterator[tuple[str, str, np.ndarray, Estimate]]:
    """(panel's domain, specialist or TOGETHER, contribution of each seed [S], mean with its interval over seeds and clusters of
    tasks). Raises CoalitionError without all coalitions, StatisticsError unless every seed has every task."""
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    models = merge_coalitions(list({row["model"]: None for row in rows}), domains)
    for domain in domains:
        own = [row for row in rows if row["domain"] == domain]
        tasks = {row["task_id"]: row["cluster"] for row in own}
        seeds, names = sorted({row["seed"] for row in own}), sorted(tasks)
        shares = {(row["model"], row["seed"], row["task_id"]): row["successes"] / row["attempts"] for row in own}
        try:
            values = np.array([[[shares[model, seed, task] for task in names] for seed in seeds] for model in models])
        except KeyError as error:
            raise StatisticsError(f"reports/spread.parquet has no {error}: run `python -m flows.spread` again") from error
        clusters = [tasks[name] for name in names]
        for name, found in [*zip(domains, shapley(values), strict=True), (TOGETHER, values[-1] - values[0])]:
            yield domain, name, found.mean(1), against_nothing(Sample.of_tasks(found, clusters))


def block(rows: Rows) -> str:
    """Markdown: a row per panel and specialist, in points; NOT_MEASURED without rows."""
    if not rows:
        return NOT_MEASURED
    lines, seeds = [], 0
    for domain, name, per_seed, found in over_seeds(rows):
        interval = "–" if found.degenerate else f"{signed(100 * found.low)} to {signed(100 * found.high)}"
        spread = f"{signed(100 * per_seed.min())} to {signed(100 * per_seed.max())}"
        player = name if name == TOGETHER else f"`rl@{name}`"
        lines.append([domain, player, signed(100 * found.difference), interval, spread])
        seeds = len(per_seed)
    header = ("panel", "specialist", "contribution (points)", f"{100 * (1 - ALPHA):g} % interval", "lowest to highest seed")
    about = (
        f"Shapley values of the specialists in `merged` over `sft`, of {seeds} lifecycles on the same fresh panels; intervals "
        "are over seeds and clusters of tasks."
    )
    return f"{markdown_table(header, lines, 'llrrr')}\n\n{about}"
