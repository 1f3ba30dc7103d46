"""Group resampling: which groups of a batch are trained on, and with what weight.

With a group baseline a dead group, whose episodes all have the same return, teaches nothing.
  none      every group has weight 1.
  exclude   dead groups have weight 0: in losses, denominators and statistics over the batch.
  resample  as exclude, and further tasks are played until there are `tasks_per_step` live groups (DAPO, arXiv 2503.14476).
  random    dead groups are replaced by live ones, drawn with replacement.
  value     as random, drawn by task value V = (r_max - mean) * std (VSPO, arXiv 2512.07478).
A group drawn c times in all is one copy in memory with weight c: the same loss and gradient as c copies in one minibatch.
`smooth` scales its advantages down, since c copies multiply the task's learning rate by c.

`rl.dead_groups: drop` changes no result: it only skips the forward pass of groups without a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.algorithms.parts.advantage import Smoothing, group_sums
from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.algorithms.parts.reward import largest_reward
from stages.algorithms.parts.shaping import PrsStage
from stages.runtime.validation import NonNegative, ParamsError, Positive
from stages.seeding import stream

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


def _uses_values(rl: Rl) -> bool:
    return rl.group_resampling.kind == "value" or rl.group_resampling.replace == "low_value"


VALUED = AppliesIf(_uses_values, "group_resampling.kind: value")
ENABLED = AppliesIf(lambda rl: rl.group_resampling.kind != "none", "a group_resampling.kind other than none")


class GroupResampling(Part):
    """What replaces groups whose rewards are all equal."""

    data = ("episodes",)

    kind: Literal["none", "exclude", "resample", "random", "value", "own"] = "none"
    """Whether groups of equal rewards are kept, excluded, replaced by playing further tasks, or replaced by copies of others."""
    rounds: Annotated[int, Field(ge=1, le=100), AppliesTo("kind", "resample")] = 3
    """resample: maximum number of rounds of further tasks."""
    replace: Annotated[Literal["zero_advantage", "low_value"], AppliesTo("kind", "random", "value")] = "zero_advantage"
    """random, value: which groups are replaced: those of equal rewards, or also those whose value V is at most min_value."""
    min_value: Annotated[NonNegative, AppliesTo("replace", "low_value")] = 0.05
    """low_value: largest V of a group that is replaced."""
    spread: Annotated[Literal["std", "variance"], VALUED] = "std"
    """value: sigma in V = (r_max - mean) * sigma."""
    value_of: Annotated[Literal["reward", "last_stage"], VALUED] = "reward"
    """value: what V is computed from; last_stage: the last stage of reward.prs."""
    r_max: Annotated[Positive, VALUED] = 1.0
    """value: the largest attainable reward."""
    temperature: Annotated[Positive, AppliesTo("kind", "value")] = 1.0
    """value: groups are drawn with probability proportional to V^(1/temperature)."""
    zero_tol: Annotated[NonNegative, ENABLED] = 1e-08
    """A group's rewards are equal if their sigma is at most this."""
    smooth: Annotated[Literal["none", "cap", "sqrt", "log"], AppliesTo("kind", "random", "value")] = "cap"
    """random, value: factor on the advantages of a group with weight c: 1, min(1, c_max/c), 1/sqrt(c), (1 + ln c)/c."""
    c_max: Annotated[Positive, AppliesTo("kind", "random", "value")] = 1.0
    """smooth: cap: weight up to which advantages are not scaled down."""
    overlong: Literal["keep", "mask"] = "keep"
    """mask: episodes that ran out of tokens are not trained on; their rewards still count in the baselines."""

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind not in ("none", "own") and rl.group_size < 2:
            raise ParamsError(
                f"rl.group_resampling.kind: {self.kind} looks for groups of equal rewards, and rl.group_size is 1; set it to >= 2"
            )
        if self.kind == "none" or not _uses_values(rl):
            return
        if self.value_of == "last_stage" and rl.reward.kind != "prs":
            raise ParamsError(
                "rl.group_resampling.value_of: last_stage is the last stage of progressive shaping; set rl.reward.kind to prs"
            )
        largest = largest_reward(rl.reward)
        # Otherwise V = (r_max - mean) * sigma would be negative for the tasks that are solved best.
        if largest is not None and largest > self.r_max + 1e-9:
            raise ParamsError(
                f"rl.group_resampling.r_max ({self.r_max:g}) must be the largest attainable reward, and rl.reward gives up to "
                f"{largest:g}; set r_max to that"
            )


def dead_rows(rewards: Tensor, group: Tensor) -> Tensor:
    """Rows [B] bool whose group's rewards are all equal (a group of one is never dead)."""
    sums, sizes = group_sums(rewards, group)
    spread, _ = group_sums((rewards.double() - sums / sizes).abs(), group)
    return (spread <= 1e-9 * rewards.double().abs().max().clamp(min=1e-300) * sizes) & (sizes > 1)


def dead_groups(batch: TrajectoryBatch) -> int:
    """How many groups are dead."""
    return int(batch.group[dead_rows(batch.rewards, batch.group)].unique().numel())


def forward_rows(batch: TrajectoryBatch, without: Tensor | None = None) -> Tensor:
    """Indices [b] int64 of the rows to run through the model: those with policy tokens and a weight above 0, except the rows
    `without` [B] bool."""
    import torch

    keep = batch.mask.any(1) & (batch.weights > 0)
    if without is not None:
        keep &= ~without
    return torch.nonzero(keep).flatten()


def trained_rows(batch: TrajectoryBatch, params: GroupResampling) -> Tensor:
    """Rows [B] bool that will be trained on: policy tokens, a weight above 0, and not masked by `mask_overlong`. Raises
    ValueError as that does."""
    return mask_overlong(batch, params).mask.any(1) & (batch.weights > 0)


def zero_advantage_rows(batch: TrajectoryBatch) -> Tensor:
    """Rows [B] bool of groups whose advantages are all 0: a loss proportional to advantages has no gradient there."""
    assert batch.advantages is not None
    nonzero, _ = group_sums((batch.advantages != 0).any(1).double(), batch.group)
    return nonzero == 0


def task_values(rewards: Tensor, group: Tensor, spread: str, r_max: float) -> tuple[Tensor, Tensor]:
    """Task value V = (r_max - mean) * sigma and sigma of each group, in order of group number, both [N] float64; sigma is the
    population standard deviation, or the variance (spread: variance) as the paper's text calls it once. 0 for a group of one."""
    import torch

    count = int(group.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, group, rewards.double())
    sizes = torch.zeros(count, dtype=torch.float64).index_add_(0, group, torch.ones(len(group), dtype=torch.float64))
    means = sums / sizes
    squares = torch.zeros(count, dtype=torch.float64).index_add_(0, group, (rewards.double() - means[group]) ** 2)
    sigma = squares / sizes if spread == "variance" else (squares / sizes).sqrt()
    return (r_max - means) * sigma, sigma


def smoothing(count: int, kind: str, c_max: float) -> float:
    """Factor on the advantages of a group of weight c = `count`. none: 1. cap: min(1, c_max / c). sqrt: 1 / sqrt(c).
    log: (1 + ln c) / c."""
    if kind == "none" or count == 0:
        return 1.0
    if kind == "cap":
        return min(1.0, c_max / count)
    return 1.0 / math.sqrt(count) if kind == "sqrt" else (1.0 + math.log(count)) / count


def draw_counts(weights: Sequence[float], draws: int, *key: object) -> list[int]:
    """How often each group is drawn in `draws` draws with replacement, with probability proportional to `weights`."""
    counts = [0] * len(weights)
    for group in stream("filling", *key).choices(range(len(weights)), weights, k=draws):
        counts[group] += 1
    return counts


def live_groups(batch: TrajectoryBatch, params: GroupResampling, stages: Sequence[PrsStage] = ()) -> Tensor:
    """Groups [N] bool that are not replaced, in order of group number. stages: as in `resample`."""
    live = task_values(batch.rewards, batch.group, params.spread, params.r_max)[1] > params.zero_tol
    if params.kind in ("random", "value") and params.replace == "low_value":
        live &= _values(batch, params, stages) > params.min_value
    return live


def resample(
    batch: TrajectoryBatch, params: GroupResampling, wanted: int, stages: Sequence[PrsStage], *key: object
) -> TrajectoryBatch:
    """The batch with `weight` (and `smoothing`) by group.

    wanted: groups of a full batch; stages: of reward.prs, for value_of last_stage; key: of the random draws. Metric `skipped`:
    1 if no live group is left, so that the step trains on nothing.
    """
    import torch

    if params.kind == "none":
        return batch
    live = live_groups(batch, params, stages)
    counts = live.long()
    if params.kind == "resample":
        counts[torch.nonzero(live).flatten()[wanted:]] = 0
    metrics = {"live_groups": float(live.sum()), "skipped": float(not bool(live.any()))}
    factors = torch.ones(len(live))
    if params.kind in ("random", "value") and bool(live.any()):
        kept = torch.nonzero(live).flatten().tolist()
        weights = [1.0] * len(kept)
        if params.kind == "value":
            values = _values(batch, params, stages)
            weights = [max(float(values[group]), 0.0) ** (1.0 / params.temperature) for group in kept]
            metrics["task_value"] = float(values.mean())
            weights = weights if sum(weights) > 0 else [1.0] * len(kept)
        drawn = draw_counts(weights, len(live) - len(kept), *key)
        for group, times in zip(kept, drawn, strict=True):
            counts[group] = 1 + times
            factors[group] = smoothing(1 + times, params.smooth, params.c_max)
        metrics["most_copies"] = float(counts.max())
    batch = batch.with_(weight=counts[batch.group].float()).with_extra(Smoothing(factors[batch.group]))
    return batch.with_metrics(**metrics)


def _values(batch: TrajectoryBatch, params: GroupResampling, stages: Sequence[PrsStage]) -> Tensor:
    """Task values of the groups [N], from the reward or from the last stage's contribution to it."""
    import torch

    rewards = batch.rewards
    if params.value_of == "last_stage" and stages:
        last = stages[-1]
        before = sum((stage.weight * batch.terms[f"prs/{stage.name}"] for stage in stages[:-1]), torch.zeros(()))
        reached = torch.stack(
            [batch.terms[f"prs/{stage.name}"] >= stage.threshold for stage in stages[:-1]] or [rewards == rewards]
        )
        rewards = torch.where(reached.all(0), batch.rewards - before, torch.zeros(()))
        return task_values(rewards, batch.group, params.spread, last.weight)[0]
    return task_values(rewards, batch.group, params.spread, params.r_max)[0]


def missing_groups(batch: TrajectoryBatch, params: GroupResampling, wanted: int) -> int:
    """How many live groups a batch still lacks under kind resample; 0 under any other."""
    if params.kind != "resample":
        return 0
    return max(0, wanted - int(live_groups(batch, params).sum()))


def mask_overlong(batch: TrajectoryBatch, params: GroupResampling) -> TrajectoryBatch:
    """The batch with overlong episodes masked, where `overlong` is mask; their rewards still count in the baselines.

    Raises ValueError if the batch does not mark overlong episodes.
    """
    if params.overlong != "mask":
        return batch
    if batch.overlong is None:
        raise ValueError("rl.group_resampling.overlong: mask needs the batch's `overlong`, and it has none")
    masked = batch.mask & ~batch.overlong[:, None]
    return batch.with_(mask=masked).with_metrics(masked_episodes=float(batch.overlong.sum()))
