"""Batch filling: which groups of a batch count, and how often.

With a group baseline a dead group, whose episodes all have the same return, teaches nothing.
  none      every group counts once.
  exclude   dead groups count nowhere: not in losses, denominators or statistics over the batch.
  resample  as exclude, and further tasks are played until there are `tasks_per_step` live groups (DAPO, arXiv 2503.14476).
  random    the places of dead groups are given to live ones, drawn with replacement.
  value     as random, drawn by task value V = (r_max - mean) * std (VSPO, arXiv 2512.07478).
A group that counts c times is one copy in memory with weight c: the same loss and gradient as c copies in one minibatch. Its
advantages are damped by `smooth`, since c copies multiply the task's learning rate by c.

`rl.dead_groups: drop` is no filling: it spares the forward pass of groups that add nothing to the gradient, and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from stages.algorithms.parts.advantage import group_sums
from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.algorithms.parts.reward import largest_reward
from stages.algorithms.rewards.settings import PrsStage
from stages.runtime.validation import NonNegative, ParamsError, Positive
from stages.seeding import stream

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


VALUED = AppliesIf(lambda rl: rl.filling.kind == "value" or rl.filling.replace == "low_value", "filling.kind: value")


class Filling(Part):
    """Batch filling: what takes the place of groups whose rewards are all equal."""

    data = ("episodes",)

    kind: Literal["none", "exclude", "resample", "random", "value", "own"] = "none"
    rounds: Annotated[int, Field(ge=1, le=100), AppliesTo("kind", "resample")] = 3
    """resample: times that further tasks are played at the most."""
    replace: Annotated[Literal["zero_advantage", "low_value"], AppliesTo("kind", "random", "value")] = "zero_advantage"
    """random, value: what makes room: groups of equal rewards; or of a value V of at most min_value."""
    min_value: Annotated[NonNegative, AppliesTo("replace", "low_value")] = 0.05
    spread: Annotated[Literal["std", "variance"], VALUED] = "std"
    """value: sigma in V = (r_max - mean) * sigma."""
    value_of: Annotated[Literal["reward", "last_stage"], VALUED] = "reward"
    """value: what V is computed from; last_stage: the last stage of reward.prs."""
    r_max: Annotated[Positive, VALUED] = 1.0
    """value: the largest attainable reward."""
    temperature: Annotated[Positive, AppliesTo("kind", "value")] = 1.0
    """value: groups are drawn with probability proportional to V^(1/temperature)."""
    zero_tol: Annotated[NonNegative, AppliesIf(lambda rl: rl.filling.kind != "none", "a filling.kind other than none")] = 1e-08
    """sigma up to which a group's rewards count as equal."""
    smooth: Annotated[Literal["none", "cap", "sqrt", "log"], AppliesTo("kind", "random", "value")] = "cap"
    """random, value: what the advantages of a group that counts c times are multiplied by: 1, min(1, c_max/c), 1/sqrt(c),
    (1 + ln c)/c."""
    c_max: Annotated[Positive, AppliesTo("kind", "random", "value")] = 1.0
    overlong: Literal["keep", "mask"] = "keep"
    """mask: episodes that ran out of tokens are not trained on; their rewards still count in the baselines."""

    def check(self, rl: Rl, method: Composition) -> None:
        if self.kind not in ("none", "own") and rl.group_size < 2:
            raise ParamsError(
                f"rl.filling.kind: {self.kind} looks for groups of equal rewards, and rl.group_size is 1; set it to >= 2"
            )
        if self.kind != "value":
            return
        if self.value_of == "last_stage" and rl.reward.kind != "prs":
            raise ParamsError(
                "rl.filling.value_of: last_stage is the last stage of progressive shaping; set rl.reward.kind to prs"
            )
        largest = largest_reward(rl.reward)
        # A task value (r_max - mean) * sigma would be below 0 for the tasks that are solved best.
        if largest is not None and largest > self.r_max + 1e-9:
            raise ParamsError(
                f"rl.filling.r_max ({self.r_max:g}) must be the largest attainable reward, and rl.reward gives up to "
                f"{largest:g}; set it to that"
            )


def dead_rows(rewards: Tensor, group: Tensor) -> Tensor:
    """Rows [B] bool whose group's rewards are all equal (a group of one is never dead)."""
    sums, sizes = group_sums(rewards, group)
    spread, _ = group_sums((rewards.double() - sums / sizes).abs(), group)
    return (spread <= 1e-9 * rewards.double().abs().max().clamp(min=1e-300) * sizes) & (sizes > 1)


def dead_groups(batch: TrajectoryBatch) -> int:
    """How many groups are dead."""
    return int(batch.group[dead_rows(batch.rewards, batch.group)].unique().numel())


def forward_rows(batch: TrajectoryBatch, kind: str, adds_nothing: Tensor | None = None) -> Tensor:
    """Indices [b] int64 of the rows that go through the model: those with policy tokens that count at all, less, for kind drop,
    the rows `adds_nothing` [B] bool, which have no gradient."""
    import torch

    keep = batch.mask.any(1) & (batch.weights > 0)
    if kind == "drop" and adds_nothing is not None:
        keep &= ~adds_nothing
    return torch.nonzero(keep).flatten()


def trained_rows(batch: TrajectoryBatch, params: Filling) -> Tensor:
    """Rows [B] bool that are trained on in the end: those with policy tokens that count at all, less those that `mask_overlong`
    is going to mask. Raises ValueError as that does."""
    return mask_overlong(batch, params).mask.any(1) & (batch.weights > 0)


def silent_rows(batch: TrajectoryBatch) -> Tensor:
    """Rows [B] bool of groups whose advantages are all 0: a loss that is proportional to advantages has no gradient there."""
    assert batch.advantages is not None
    loud, _ = group_sums((batch.advantages != 0).any(1).double(), batch.group)
    return loud == 0


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
    """Factor on the advantages of a group that counts `count` times. none: 1. cap: min(1, c_max / c). sqrt: 1 / sqrt(c).
    log: (1 + ln c) / c."""
    if kind == "none" or count == 0:
        return 1.0
    if kind == "cap":
        return min(1.0, c_max / count)
    return 1.0 / math.sqrt(count) if kind == "sqrt" else (1.0 + math.log(count)) / count


def draw_counts(weights: Sequence[float], free: int, *key: object) -> list[int]:
    """How often each of some groups is drawn in `free` draws with replacement, with probability proportional to weights."""
    counts = [0] * len(weights)
    for place in stream("filling", *key).choices(range(len(weights)), weights, k=free):
        counts[place] += 1
    return counts


def live_groups(batch: TrajectoryBatch, params: Filling) -> Tensor:
    """Groups [N] bool that stay, by `replace`, in order of group number."""
    values, sigma = task_values(batch.rewards, batch.group, params.spread, params.r_max)
    live = sigma > params.zero_tol
    if params.kind in ("random", "value") and params.replace == "low_value":
        live &= values > params.min_value
    return live


def fill(batch: TrajectoryBatch, params: Filling, wanted: int, stages: Sequence[PrsStage], *key: object) -> TrajectoryBatch:
    """The batch with `weight` (and `smoothing`) by groups; `wanted`: groups of a whole batch; `stages`: of reward.prs, for
    value_of last_stage; `key`: names the random draws. Metric `skipped`: 1 if no group is left, so that nothing is learnt."""
    import torch

    if params.kind == "none":
        return batch
    live = live_groups(batch, params)
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
    return batch.with_(weight=counts[batch.group].float(), smoothing=factors[batch.group]).telling(**metrics)


def _values(batch: TrajectoryBatch, params: Filling, stages: Sequence[PrsStage]) -> Tensor:
    """Task values of the groups [N], from the reward or from what the last stage alone contributes to it."""
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


def missing_groups(batch: TrajectoryBatch, params: Filling, wanted: int) -> int:
    """How many live groups a batch still lacks, for the filling that plays further tasks; 0 for every other."""
    if params.kind != "resample":
        return 0
    return max(0, wanted - int(live_groups(batch, params).sum()))


def mask_overlong(batch: TrajectoryBatch, params: Filling) -> TrajectoryBatch:
    """The batch whose episodes that ran out of tokens have no policy tokens any more, where `overlong` is mask.

    Their rewards still count in the baselines. Raises ValueError if the batch does not tell which these are.
    """
    if params.overlong != "mask":
        return batch
    if batch.overlong is None:
        raise ValueError("rl.filling.overlong: mask needs the batch's `overlong`, and it carries none")
    return batch.with_(mask=batch.mask & ~batch.overlong[:, None]).telling(masked_episodes=float(batch.overlong.sum()))
