"""Advantages. The group estimator: an episode's return or reward-to-go minus a baseline (`mean`), divided by a scale (`std`).
Pure functions without gradients. With a critic: gae.py and turn_critic.py here.

`level` is the unit of credit. trajectory: the return, the same for all policy tokens. turn: the reward-to-go from the turn on.
token: that and the rewards per token (the KL penalty) from the token on.

The baseline of a turn is over the whole group: the mean reward-to-go at the same turn, or at its last turn for an episode that
had fewer. It must not depend on how many turns an episode itself took: a mean over the episodes still playing, summed along the
episode, would reward taking more turns (verl issue 7244).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.batch import Extra, masked_whiten, turn_means, turn_sums
from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.runtime.validation import ParamsError, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


DISCOUNTED = AppliesIf(
    lambda rl: rl.advantage.estimator in ("gae", "team", "utterance") or rl.advantage.level in ("turn", "token"),
    "advantage.estimator: gae, team or utterance, or level: turn or token",
)
LEVELS = {"group": "trajectory", "gae": "token", "team": "turn"}
"""Default advantage.level by estimator; the others have none."""


class Advantage(Part):
    """Estimator, baseline and scale of advantages."""

    switch = "estimator"

    estimator: Literal["group", "gae", "utterance", "team", "own"] = "group"
    """group: compares the episodes of a group or batch; gae: a critic of tokens or turns; utterance: min Q - min V of a turn
    under a critic that learns off-policy from replayed episodes, see `replay`; team: gae along the texts of a team's play, see
    `team`."""
    level: Annotated[Literal["trajectory", "turn", "token"] | None, AppliesTo("estimator", "group", "gae", "team")] = None
    """Unit of credit: group has all three, gae and team turns and tokens."""
    mean: Annotated[
        Literal["none", "group", "batch", "leave_one_out", "greedy", "length_weighted"], AppliesTo("estimator", "group")
    ] = "none"
    """What is subtracted from returns as the baseline."""
    std: Annotated[Literal["none", "group", "batch"], AppliesTo("estimator", "group")] = "none"
    """What advantages are divided by."""
    ddof: Annotated[int, Field(ge=0, le=1), AppliesTo("estimator", "group")] = 1
    """Delta degrees of freedom of the standard deviation: 1 divides by n - 1, 0 by n."""
    gamma: Annotated[Share, DISCOUNTED] = 1.0
    """Discount per turn or token, by `level`."""
    lam: Annotated[Share, AppliesTo("estimator", "gae", "team")] = 1.0
    """Lambda of generalised advantage estimation."""
    whiten: bool = False
    """Zero mean, unit standard deviation over the batch's policy tokens; estimator team at level turn: over its turns."""
    clip: Positive | None = None
    """Advantages are clipped to [-clip, clip], after everything else."""
    token_baseline: Annotated[bool, AppliesTo("estimator", "utterance")] = False
    """utterance: subtract from a turn's advantage what a second critic predicts of it before each token."""

    @property
    def unshardable(self) -> str | None:
        """Why FSDP can't train with this estimator, and the remedy; None if it can."""
        if self.estimator == "team":
            return (
                "rl.advantage.estimator: team has weights of each agent, which FSDP can't shard: use profiles/accelerate/ddp.yaml"
            )
        if self.estimator != "utterance":
            return None
        return (
            "rl.advantage.estimator: utterance keeps a target network, which FSDP can't shard: use profiles/accelerate/ddp.yaml"
        )

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        advantage = values["advantage"]
        if advantage["level"] is None:
            advantage["level"] = LEVELS.get(advantage["estimator"])

    def check(self, rl: Rl, method: Composition) -> None:
        mean, std, level = self.mean, self.std, self.level
        if self.estimator in ("gae", "team"):
            self._check_gae()
        if self.estimator == "group" and rl.group_size < 2:
            if mean in ("group", "leave_one_out", "length_weighted") or std == "group":
                raise ParamsError(
                    f"rl.group_size is 1 and rl.advantage (mean {mean}, std {std}) compares episodes of a group; group_size must "
                    f"be at least 2, or mean and std none or batch"
                )
            if "batch" in (mean, std) and rl.tasks_per_step < 2:
                raise ParamsError(
                    f"rl.advantage (mean {mean}, std {std}) compares the episodes of a step, and there is only one; raise "
                    f"rl.tasks_per_step or group_size"
                )
        if self.estimator == "group" and level == "token" and self.gamma != 1.0:
            raise ParamsError(
                "rl.advantage.gamma below 1 would discount per token at level token (0.99 over 400 tokens is 0.018), and the "
                "group estimator discounts per turn: set rl.advantage.level to turn, or gamma to 1"
            )
        if mean in ("greedy", "length_weighted") and level in ("turn", "token"):
            raise ParamsError(f"rl.advantage.mean: {mean} is a baseline for whole episodes; set rl.advantage.level to trajectory")
        if self.whiten and std in ("group", "batch"):
            raise ParamsError(
                f"rl.advantage.whiten would normalise again what std: {std} has already normalised; set std to none, or whiten "
                f"to false"
            )

    def _check_gae(self) -> None:
        if self.mean != "none" or self.std != "none":
            raise ParamsError(
                f"rl.advantage.mean {self.mean} and std {self.std} apply to estimator: group; with {self.estimator} the critic "
                f"is the baseline: set both to none, or estimator to group"
            )
        if self.level == "trajectory":
            raise ParamsError(
                f"rl.advantage.level: trajectory applies to estimator: group; {self.estimator} credits turns or tokens: set it "
                f"to turn or token"
            )


STD_EPS = 1e-6
_FLAT = 1e-9
"""A standard deviation below this share of the largest |reward| is rounding error: the rewards are equal."""


@dataclass(frozen=True)
class Smoothing(Extra):
    """Set by group resampling where it draws groups more than once."""

    factor: Tensor
    """[B] float32: factor on the row's advantages."""


@dataclass(frozen=True)
class GreedyReturns(Extra):
    returns: Tensor
    """[B] float32: shaped return of the greedy episode of the row's task."""


@dataclass(frozen=True)
class Plays(Extra):
    """Which rows are conversations of the same play, where an environment held several (stages/agent/conversations.py)."""

    play: Tensor
    """[B] int64: number of the row's play."""
    leads: Tensor
    """[B] bool: whether the row is its play's first conversation."""


def leading(batch: TrajectoryBatch) -> tuple[TrajectoryBatch, Tensor | None]:
    """The rows [P] that are compared with each other, each play once, and for each row [B] the place of its play's among them;
    None: all rows are."""
    import torch

    plays = batch.get(Plays)
    if plays is None:
        return batch, None
    first = torch.nonzero(plays.leads).flatten()
    places = torch.zeros(int(plays.play.max()) + 1, dtype=torch.int64)
    places[plays.play[first]] = torch.arange(len(first))
    return batch.rows(first), places[plays.play]


def group_sums(values: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of `values` [B] (float64) and count over each row's group, both [B]."""
    import torch

    count = int(group.max()) + 1 if group.numel() else 0
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, group, values.double())
    sizes = torch.zeros(count, dtype=torch.float64).index_add_(0, group, torch.ones_like(values, dtype=torch.float64))
    return sums[group], sizes[group]


def _refuse_single(sizes: Tensor, axis: str) -> None:
    if bool((sizes < 2).any()):
        raise ValueError(f"rl.advantage.{axis} compares the episodes of a group, and a group has only one; use group_size >= 2")


def baseline(rewards: Tensor, group: Tensor, kind: str, weight: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
    """The baseline of each episode, [B] float64, from rewards [B] and group indices [B].

    none: 0. group: mean of the episode's group. batch: mean of all, weighted by `weight` [B]. leave_one_out: mean of the group's
    other episodes (RLOO). length_weighted: the group's mean weighted by policy tokens `lengths` [B] (OPO).
    Raises ValueError for a group of one episode with a kind that compares within groups.
    """
    import torch

    rewards = rewards.double()
    if kind == "none":
        return torch.zeros_like(rewards)
    if kind == "batch":
        counts = torch.ones_like(rewards) if weight is None else weight.double()
        return ((rewards * counts).sum() / counts.sum().clamp(min=1)).expand_as(rewards)
    sums, sizes = group_sums(rewards, group)
    _refuse_single(sizes, f"mean: {kind}")
    if kind == "length_weighted":
        if lengths is None:
            raise ValueError("rl.advantage.mean: length_weighted needs the episodes' policy tokens")
        return group_sums(rewards * lengths, group)[0] / group_sums(lengths.double(), group)[0].clamp(min=1)
    return sums / sizes if kind == "group" else (sums - rewards) / (sizes - 1)


def scale(rewards: Tensor, group: Tensor, kind: str, ddof: int = 1, weight: Tensor | None = None) -> Tensor:
    """What centred rewards are divided by, [B] float64: 1 (none), or the standard deviation of the raw rewards, with divisor
    n - ddof, over the group or the whole batch (rows weighted by `weight` [B]), plus 1e-6; infinite where all are equal: A = 0.

    Raises ValueError for a group (or batch) of one episode.
    """
    import torch

    rewards = rewards.double()
    if kind == "none":
        return torch.ones_like(rewards)
    counts = torch.ones_like(rewards)
    if kind == "batch":
        group = torch.zeros_like(group)
        counts = counts if weight is None else weight.double()
    sizes, members = group_sums(counts, group)
    _refuse_single(members, f"std: {kind}")
    sums, _ = group_sums(rewards * counts, group)
    squares, _ = group_sums(counts * (rewards - sums / sizes.clamp(min=1)) ** 2, group)
    std = (squares / (sizes - ddof).clamp(min=1)).sqrt()
    flat = std <= _FLAT * rewards.abs().max().clamp(min=1e-300)
    return torch.where(flat, torch.full_like(std, torch.inf), std + STD_EPS)


def episode_advantages(rewards: Tensor, group: Tensor, mean: str, std: str) -> Tensor:
    """(R - baseline) / scale for each episode, [B] float32."""
    return ((rewards.double() - baseline(rewards, group, mean)) / scale(rewards, group, std)).float()


def rewards_to_go(turn_rewards: Tensor, gamma: float = 1.0) -> Tensor:
    """sum_{v >= u} gamma^(v - u) r_v: [B, U] float64 from turn rewards [B, U]."""
    togo = turn_rewards.double().clone()
    for turn in range(togo.shape[1] - 2, -1, -1):
        togo[:, turn] += gamma * togo[:, turn + 1]
    return togo


def turn_baselines(togo: Tensor, turns: Tensor, group: Tensor, kind: str, weight: Tensor | None = None) -> Tensor:
    """The baseline of each turn, [B, U] float64, from rewards-to-go [B, U]: over all episodes that `kind` compares, each with its
    reward-to-go at that turn, or at its last turn if it had fewer."""
    import torch

    columns = torch.arange(togo.shape[1])[None, :]
    held = togo.gather(1, torch.minimum(columns, (turns - 1).clamp(min=0)[:, None]))
    return torch.stack([baseline(held[:, turn], group, kind, weight) for turn in range(togo.shape[1])], 1)


def episode_returns(batch: TrajectoryBatch) -> Tensor:
    """Sum of an episode's turn and token rewards, [B] float64."""
    returns = batch.rewards.double()
    return returns if batch.token_rewards is None else returns + (batch.token_rewards * batch.mask).sum(1).double()


def _token_togo(batch: TrajectoryBatch) -> Tensor:
    """Sum of the token rewards from each policy token on, [B, T] float64, 0 off the mask."""
    import torch

    if batch.token_rewards is None:
        return torch.zeros(batch.mask.shape, dtype=torch.float64)
    return (batch.token_rewards * batch.mask).double().flip(1).cumsum(1).flip(1) * batch.mask


def _turn_togo(batch: TrajectoryBatch, params: Advantage) -> Tensor:
    """Rewards-to-go of the turns [B, U], at level turn with the rewards of their tokens."""
    turn_rewards = batch.turn_rewards
    if params.level == "turn" and batch.token_rewards is not None:
        turn_rewards = turn_rewards + turn_sums(batch.token_rewards * batch.mask, batch.turn, turn_rewards.shape[1])
    return rewards_to_go(turn_rewards, params.gamma)


def group_advantage(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """`advantages` [B, T] on policy tokens, 0 elsewhere, at the level that `params` names. Where plays have several
    conversations, each play counts once in baselines and scales."""
    mean, std, ddof = params.mean, params.std, params.ddof
    (led, place), returns = leading(batch), episode_returns(batch)

    def of_rows(values: Tensor) -> Tensor:
        return values if place is None else values[place]

    divisor = of_rows(scale(episode_returns(led), led.group, std, ddof, led.weight))
    if params.level in (None, "trajectory"):
        if mean == "greedy":
            greedy = batch.get(GreedyReturns)
            if greedy is None:
                raise ValueError("rl.advantage.mean: greedy needs the returns of greedy episodes, and this batch has none")
            baselines = greedy.returns.double()
        else:
            baselines = of_rows(baseline(episode_returns(led), led.group, mean, led.weight, led.mask.sum(1)))
        episode = ((returns - baselines) / divisor).float()
        return batch.with_(advantages=episode[:, None] * batch.mask)
    togo, togo_led = _turn_togo(batch, params), _turn_togo(led, params)
    centred = togo - of_rows(turn_baselines(togo_led, led.turns, led.group, mean, led.weight))
    centred = centred.gather(1, batch.turn.clamp(min=0))
    if params.level == "token":
        centred = centred + _token_togo(batch)
    return batch.with_(advantages=(centred / divisor[:, None]).float() * batch.mask)


def finish(batch: TrajectoryBatch, params: Advantage) -> TrajectoryBatch:
    """The batch with its advantages whitened (`whiten`), multiplied by its `smoothing`, and clipped (`clip`), in this order."""
    advantages = batch.advantages
    assert advantages is not None
    if params.whiten and params.estimator == "team" and params.level == "turn":
        advantages = masked_whiten(advantages, batch.mask, turn_means(batch))
    elif params.whiten:
        advantages = masked_whiten(advantages, batch.mask, batch.weight)
    if (smoothing := batch.get(Smoothing)) is not None:
        advantages = advantages * smoothing.factor[:, None]
    if params.clip is not None:
        advantages = advantages.clamp(-params.clip, params.clip)
    return batch.with_(advantages=advantages)
