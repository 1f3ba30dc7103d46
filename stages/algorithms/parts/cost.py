"""What an episode's priced calls cost, as a part of its reward (Router-R1, arXiv 2506.09033)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from stages.algorithms.batch import Costs
from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.algorithms.parts.reward import with_returns
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl

FLAT = 1e-8
"""Bounds closer than this do not tell costs apart: all scores are 1/2."""
ON = AppliesTo("kind", "normalised")
WINDOWED = AppliesIf(lambda rl: rl.cost.kind != "none" and rl.cost.bounds != "fixed", "cost.bounds: running or step")


class Cost(Part):
    """Returns R above 0 become (1 - weight) R + weight z, z in [0, 1] the cost score, 1 for the cheapest. Advantages then weigh
    success against what priced tools cost. Returns of 0 and below stay."""

    data = ("episodes",)

    kind: Literal["none", "normalised"] = "none"
    """`normalised`: with costs of earlier episodes, or between fixed bounds."""
    weight: Annotated[Share, ON] = 0.0
    """Router-R1's alpha. 0: costs are only reported; 1: right answers are ranked by cost alone."""
    only_correct: Annotated[bool, ON] = True
    """False: returns of 0 get weight z, too, as the paper's formula reads, which then pays for cheap wrong answers."""
    transform: Annotated[Literal["sqrt", "none"], ON] = "sqrt"
    """Of costs before they are compared."""
    bounds: Annotated[Literal["running", "step", "fixed"], ON] = "running"
    """Costs at which z is 1 and 0. running: quantiles of a window of the newest episodes, each episode scored as it joins, in the
    order of the batch, as in Router-R1. step: of the window after all of a step's episodes joined, so that equal episodes of a
    step have equal scores. fixed: `cheap` and `dear`."""
    window: Annotated[Count, WINDOWED] = 1000
    """Episodes in the window, which checkpoints keep."""
    low: Annotated[Share, WINDOWED] = 0.05
    """Quantile of the window at which z is 1."""
    high: Annotated[Share, WINDOWED] = 0.95
    """Quantile at which z is 0."""
    cheap: Annotated[NonNegative, AppliesTo("bounds", "fixed")] = 0.0
    """fixed: cost up to which z is 1."""
    dear: Annotated[Positive, AppliesTo("bounds", "fixed")] = 1000.0
    """fixed: cost from which z is 0."""

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind == "none":
            return
        if self.low >= self.high:
            raise ParamsError(f"rl.cost.low ({self.low:g}) must be below rl.cost.high ({self.high:g}), quantiles of one window")
        if self.cheap >= self.dear:
            raise ParamsError(f"rl.cost.cheap ({self.cheap:g}) must be below rl.cost.dear ({self.dear:g})")
        if rl.external.per_group or rl.advantage.estimator == "utterance":
            raise ParamsError(
                "rl.cost.kind: normalised scores the episodes that rl plays, and rl.external.per_group or "
                "rl.advantage.estimator: utterance adds others: set cost.kind to none, or these to 0 and another estimator"
            )


def transformed(costs: Tensor, cost: Cost) -> list[float]:
    """Costs [B] as they are compared."""
    values: list[float] = (costs.double().sqrt() if cost.transform == "sqrt" else costs.double()).tolist()
    return values


def score(value: float, low: float, high: float) -> float:
    """z = 1 - clip((x - low) / (high - low), 0, 1); 1/2 if the bounds are equal."""
    return 0.5 if high - low < FLAT else 1.0 - min(1.0, max(0.0, (value - low) / (high - low)))


def _bounds(window: Sequence[float], cost: Cost) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(np.asarray(window), [cost.low, cost.high])
    return float(low), float(high)


def cost_scores(costs: Tensor, cost: Cost, window: Sequence[float]) -> Tensor:
    """z [B] of costs [B] after the episodes in `window`, which stays as it is."""
    import torch

    values, known = transformed(costs, cost), list(window)
    if cost.bounds == "fixed":
        low, high = transformed(torch.tensor([cost.cheap, cost.dear]), cost)
        return torch.tensor([score(value, low, high) for value in values])
    if cost.bounds == "step":
        bounds = _bounds([*known, *values][-cost.window :], cost)
        return torch.tensor([score(value, *bounds) for value in values])
    found = []
    for value in values:
        known = [*known, value][-cost.window :]
        found.append(score(value, *_bounds(known, cost)))
    return torch.tensor(found)


def _spent(batch: TrajectoryBatch) -> Tensor:
    found = batch.get(Costs)
    if found is None:
        raise ValueError(
            "rl.cost.kind: normalised needs priced tools, and the environment has none; set "
            "per_domain.search.environment.route (profiles/methods/router_r1.yaml), or cost.kind to none"
        )
    return found.spent


def with_cost(batch: TrajectoryBatch, cost: Cost, window: Sequence[float]) -> TrajectoryBatch:
    """The shaped batch with costs in its returns, each on its episode's last turn. Raises ValueError without priced tools."""
    import torch

    if cost.kind == "none":
        return batch
    z = cost_scores(_spent(batch), cost, window)
    batch = batch.with_metrics(cost_score=float(z.mean()), shaped_reward=float(batch.rewards.mean()))
    if not cost.weight:
        return batch
    graded = batch.rewards > 0 if cost.only_correct else batch.rewards >= 0
    rewards = torch.where(graded, (1.0 - cost.weight) * batch.rewards + cost.weight * z, batch.rewards)
    return with_returns(batch, rewards).with_metrics(shaped_reward=float(rewards.mean()))


def joined(window: Sequence[float], batch: TrajectoryBatch, cost: Cost) -> list[float]:
    """The window after a step's episodes."""
    return [*window, *transformed(_spent(batch), cost)][-cost.window :]
