"""When a claim is decided: looks at preset numbers of seeds, and the verdict at each.

All looks together err with a probability of at most ALPHA: it is split over them (Bonferroni), more of it to later looks, where
it buys the most power. A claim is judged up to its first decided look; later seeds do not reopen it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import scipy  # loads scipy.stats when it is first used

from stages.claims.inference import Estimate, Sample, compare
from stages.evaluation.statistics import StatisticsError
from stages.seeding import key64

ALPHA = 0.05
"""Error probability of a claim over all its looks."""
WEIGHTS = (1.0, 1.5, 2.5, 4.0)
"""Relative shares of ALPHA of the first, second ... look."""

Kind = Literal["superiority", "non_inferiority", "equivalence"]
Effect = Literal["better", "worse", "equivalent", "undecided"]
Verdict = Literal["reproduced", "not reproduced", "undecided"]


class Rule(Protocol):
    """What decides a claim, in its metric's unit."""

    @property
    def kind(self) -> Kind: ...

    @property
    def threshold(self) -> float:
        """Superiority: the smallest difference worth the claim, at least 0."""

    @property
    def margin(self) -> float:
        """Differences within +-margin are equivalent; above 0."""


@dataclass(frozen=True)
class Look:
    """A claim judged after `seeds` seeds (0: neither arm has any), at level `alpha`."""

    seeds: int
    alpha: float
    estimate: Estimate
    effect: Effect
    verdict: Verdict


def effect(estimate: Estimate, margin: float) -> Effect:
    """better: the interval is above 0. worse: below. Else equivalent: the margin interval is within +-margin. undecided otherwise
    and for a degenerate estimate: a test, not a claim, shows that values are equal by construction."""
    if estimate.degenerate:
        return "undecided"
    if estimate.low > 0.0:
        return "better"
    if estimate.high < 0.0:
        return "worse"
    return "equivalent" if -margin < estimate.margin_low and estimate.margin_high < margin else "undecided"


def verdict(kind: Kind, threshold: float, margin: float, estimate: Estimate) -> Verdict:
    """superiority: reproduced if better and the difference is at least `threshold`; not reproduced if better by less, worse or
    equivalent. non_inferiority: reproduced if the margin interval is above -margin, not if the interval is below it. equivalence:
    reproduced if the margin interval is within +-margin, not if the interval is outside."""
    if estimate.degenerate:
        return "undecided"
    if kind == "superiority":
        found = effect(estimate, margin)
        if found == "undecided":
            return "undecided"
        return "reproduced" if found == "better" and estimate.difference >= threshold else "not reproduced"
    above, within = estimate.margin_low > -margin, estimate.margin_high < margin
    if above and (within or kind == "non_inferiority"):
        return "reproduced"
    outside = estimate.high < -margin or (kind == "equivalence" and estimate.low > margin)
    return "not reproduced" if outside else "undecided"


def alphas(looks: Sequence[int]) -> list[float]:
    """The level of each look; they sum to ALPHA. Raises StatisticsError unless there are one to four looks at growing numbers of
    seeds, the first at least two."""
    if not 1 <= len(looks) <= len(WEIGHTS) or looks[0] < 2 or sorted(set(looks)) != list(looks):
        raise StatisticsError(f"looks must be one to {len(WEIGHTS)} growing numbers of seeds from 2 on, not {list(looks)}")
    weights = WEIGHTS[: len(looks)]
    return [ALPHA * weight / sum(weights) for weight in weights]


def judge(
    looks: Sequence[int], a: Sample, b: Sample, rule: Rule, at: Callable[[int], tuple[Sample, Sample]] | None = None
) -> list[Look]:
    """The looks that the seeds so far allow, up to the first with a verdict.

    a, b: the claim's arm and the one it is compared with; row s of both is of the same seed. If neither has seeds, more will not
    come: one look, with seeds = 0, spends all of ALPHA; none without rows per task, as nothing says how far values scatter.
    at: number of seeds -> both samples of the look at it; None: the first rows of a and b. A run without rows per task leaves a
    and b without clusters, but not the looks before it.
    """
    if a.seedless and b.seedless:
        plan = [(0, ALPHA)] if a.sizes is not None else []
    else:
        ready = min(sample.seeds for sample in (a, b) if not sample.seedless)
        plan = [(seeds, alpha) for seeds, alpha in zip(looks, alphas(looks), strict=True) if seeds <= ready]
    taken: list[Look] = []
    for seeds, alpha in plan:
        first, second = at(seeds) if at is not None else (a.first(seeds), b.first(seeds))
        found = compare(first, second, alpha)
        decided = verdict(rule.kind, rule.threshold, rule.margin, found)
        taken.append(Look(seeds, alpha, found, effect(found, rule.margin), decided))
        if decided != "undecided":
            break
    return taken


def sequential_p(ps: Sequence[float], levels: Sequence[float]) -> float:
    """p of "no difference" over the looks taken, from their p-values and levels: the smallest p * ALPHA / level, at most 1
    (Bonferroni, weighted as the looks are). Raises StatisticsError without a look, or unless each has its level."""
    if not ps or len(ps) != len(levels):
        raise StatisticsError(f"each look taken, at least one, has a p-value and a level: {len(ps)} and {len(levels)}")
    return min(1.0, *(p * ALPHA / level for p, level in zip(ps, levels, strict=True)))


def adjusted(ps: Sequence[float]) -> list[float]:
    """Benjamini-Hochberg's adjusted p-values of all claims on the board, in their order."""
    return [float(p) for p in scipy.stats.false_discovery_control(ps)] if len(ps) else []


def discoveries(ps: Sequence[float], q: float = 0.05) -> list[bool]:
    """Which differences Benjamini-Hochberg keeps: of those kept, at most a share q is expected to be none."""
    return [p <= q for p in adjusted(ps)]


@dataclass(frozen=True)
class Superiority:
    """The rule of a claim that its arm is better by whatever amount."""

    margin: float
    threshold: float = 0.0
    kind: Kind = "superiority"


@dataclass(frozen=True)
class Forecast:
    """What a comparison will cost and find: the mean number of seeds until it is decided, and the shares of effects then."""

    seeds: float
    better: float
    worse: float
    equivalent: float

    @property
    def undecided(self) -> float:
        return max(0.0, 1.0 - self.better - self.worse - self.equivalent)


def forecast(sd: float, margin: float, looks: Sequence[int], difference: float = 0.0, simulations: int = 400) -> Forecast:
    """Judge `simulations` superiority claims whose paired differences are normal with mean `difference` and standard deviation
    `sd`, all in the metric's unit. 400 simulations find the mean number of seeds with a standard error of about 0.3."""
    rng = np.random.default_rng(key64("forecast", sd, margin, *looks, difference, simulations))
    drawn = rng.normal(difference, sd, size=(simulations, looks[-1]))
    against, rule = Sample(np.zeros(1), seedless=True), Superiority(margin)
    last = [judge(looks, Sample(row), against, rule)[-1] for row in drawn]
    shares = {name: sum(look.effect == name for look in last) / simulations for name in ("better", "worse", "equivalent")}
    return Forecast(sum(look.seeds for look in last) / simulations, **shares)
