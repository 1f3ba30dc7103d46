"""How often patterns occur: shares with intervals over clusters of tasks, and the paired test between models of the evaluation.

All patterns are tested, so some differences are significant by chance; `kept` counts those that the procedure of Benjamini and
Hochberg (JRSS B 57, 1995) keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import scipy

from stages.evaluation.statistics import Comparison, StatisticsError, compare, mean_interval
from stages.reporting.inputs import Inputs
from stages.reporting.viewer.groups import Kind
from stages.reporting.viewer.index import Indexed


@dataclass(frozen=True)
class Prevalence:
    """Share of a group's episodes in which a pattern occurs. `low`, `high`: None with fewer than two clusters of tasks."""

    pattern: str
    domain: str
    source: str
    kind: Kind
    count: int
    episodes: int
    low: float | None
    high: float | None

    @property
    def share(self) -> float:
        return self.count / self.episodes


def clusters_of(group: Indexed) -> dict[str, str]:
    return {task: group.clusters.get(task, task) for task in group.tasks}


def prevalences(groups: Sequence[Indexed], inputs: Inputs) -> list[Prevalence]:
    """Every pattern in every group where it is looked for, in order."""
    evaluate, found = inputs.params.evaluate, []
    settings: dict[str, Any] = {"confidence": evaluate.confidence, "resamples": evaluate.resamples, "seed": inputs.params.seed}
    for group in groups:
        for pattern in group.hits:
            values, low, high = group.occurs(pattern), None, None
            try:
                interval = mean_interval(values, group.tasks, proportion=True, clusters=clusters_of(group), **settings)
                low, high = interval.low, interval.high
            except StatisticsError:  # fewer than two clusters
                pass
            names = (pattern, group.domain, group.source, group.kind)
            found.append(Prevalence(*names, int(sum(values)), len(values), low, high))
    return found


@dataclass(frozen=True)
class Difference:
    """Share of `a` minus share of `b` on the same attempts. `comparison.verdict`: "better" means more often."""

    pattern: str
    domain: str
    a: str
    b: str
    comparison: Comparison

    @property
    def words(self) -> str:
        return {"better": "▲ more often", "worse": "▼ less often"}.get(self.comparison.verdict, "undecided")


def differences(groups: Sequence[Indexed], inputs: Inputs, against: Mapping[tuple[str, str], Sequence[str]]) -> list[Difference]:
    """The tests of each model on the panel with its baselines. against: (model, domain) -> baselines."""
    panel = {(group.source, group.domain): group for group in groups if group.kind == "panel"}
    return [found for pair, baselines in against.items() for other in baselines for found in _tests(panel, pair, other, inputs)]


def _tests(panel: Mapping[tuple[str, str], Indexed], pair: tuple[str, str], other: str, inputs: Inputs) -> Iterator[Difference]:
    model, domain = pair
    a, b, evaluate = panel.get(pair), panel.get((other, domain)), inputs.params.evaluate
    if a is None or b is None:
        return
    settings: dict[str, Any] = {"confidence": evaluate.confidence, "resamples": evaluate.resamples, "seed": inputs.params.seed}
    for pattern in a.hits:
        one, two = a.occurs(pattern), b.occurs(pattern)
        if not any(one) and not any(two):
            continue
        try:
            test = compare(one, a.tasks, two, b.tasks, clusters=clusters_of(a), **settings)
        except StatisticsError:  # other tasks, or fewer than two clusters
            continue
        yield Difference(pattern, domain, model, other, test)


def kept(found: Sequence[Difference], confidence: float) -> int:
    """Number of differences that Benjamini and Hochberg's procedure keeps at this level."""
    adjusted = scipy.stats.false_discovery_control([one.comparison.p for one in found]) if found else []
    return int(sum(p <= 1.0 - confidence for p in adjusted))
