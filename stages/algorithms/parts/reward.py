"""Reward shaping on a batch: from the environment's rewards to those from which advantages are computed.

In this order: the scored criterion (`kind`), the frequency of rewards (`density`), grades of success and failure, the tool term,
the length term. Terms that grade the entire episode are added to the last turn's reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.batch import Extra
from stages.algorithms.parts.part import AppliesAboveZero, AppliesTo, Part
from stages.algorithms.parts.shaping import PrsStage, dense, hierarchical, overlong_term, single, staged, with_tool_bonus
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive

if TYPE_CHECKING:
    from torch import Tensor

    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


SCORED = ("judge", "references", "verifier")
"""Kinds whose rewards depend on the episodes' text: stages/training/rl/scoring.py."""
PRS_STAGES = [
    PrsStage(name="parse", weight=0.1),
    PrsStage(name="tool", weight=0.1),
    PrsStage(name="outcome", weight=0.8, threshold=0.0),
]
"""Format first, then a tool call, then the outcome."""


class Reward(Part):
    """Reward shaping. Success, in reports and the curriculum, is always determined by the environment's own return."""

    kind: Literal["environment", "prs", "hierarchical", "judge", "references", "verifier", "own"] = "environment"
    """`hierarchical`: format_penalty for an episode with a rejected action or one that ran out of tokens; else the return, plus
    multi_tool_bonus if it is above 0 and two tools were used. `judge`: what the judge of section `judge` makes of the episode;
    `references`: how well its answer agrees with references, by section `references`; `verifier`: whether a verifier says that it
    does, by section `verifier`."""
    prs: Annotated[list[PrsStage], Field(min_length=1), AppliesTo("kind", "prs")] = PRS_STAGES
    """prs: the stages in order; their weights sum to the largest reward."""
    density: Literal["environment", "single", "dense"] = "environment"
    """`single`: 1 for success, on the last turn; `dense`: the environment's increments over a common divisor."""
    divisor: Annotated[Literal["max_total", "reference"], AppliesTo("density", "dense")] = "max_total"
    """dense: `max_total` for all; `reference`: the number of positive increments for a success, max_total for a failure."""
    max_total: Annotated[Positive, AppliesTo("density", "dense")] = 1.0
    """dense: the largest sum of the environment's increments."""
    correct: float | None = None
    """Return of a success, replacing the environment's."""
    wrong: float | None = None
    """Return of a failure, replacing the environment's."""
    format_penalty: Annotated[float, AppliesTo("kind", "hierarchical")] = -1.0
    """hierarchical: return of an episode with invalid format."""
    multi_tool_bonus: Annotated[NonNegative, AppliesTo("kind", "hierarchical")] = 0.1
    """hierarchical: added to a return above 0 if two different tools were called."""
    tool_bonus: NonNegative = 0.0
    """Added per tool call."""
    tool_bonus_on: Annotated[Literal["wrong", "both"], AppliesAboveZero("tool_bonus")] = "wrong"
    """wrong: only failures; both: also successes."""
    tool_bonus_cap: Annotated[float | None, AppliesAboveZero("tool_bonus")] = None
    """Largest reward of a failure with its bonus."""
    overlong_penalty: NonNegative = 0.0
    """Largest length penalty; the environment's tokens count, too. 0: none."""
    overlong_max: Annotated[Count | None, AppliesAboveZero("overlong_penalty")] = None
    """Tokens from which the full penalty applies. null: model.max_length."""
    overlong_of: Annotated[Literal["response", "context"] | None, AppliesAboveZero("overlong_penalty")] = None
    """What overlong_max counts: the tokens after the prompt, or with the prompt's. null: context if overlong_max is null, else
    response."""
    overlong_cache: Annotated[Count | None, AppliesAboveZero("overlong_penalty")] = None
    """The penalty grows linearly over this many tokens before overlong_max. null: a fifth of overlong_max."""
    kl_coef: NonNegative = 0.0
    """Subtracted per token: kl_coef times the estimate of the sampling policy's KL from the reference."""
    kl_estimator: Annotated[Literal["k1", "k1_positive", "k2", "k3"], AppliesAboveZero("kl_coef")] = "k1"
    """Estimator of the KL divergence per token; k1_positive is max(0, k1), which is biased upwards."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        reward = values["reward"]
        if not reward["overlong_penalty"]:
            return
        if reward["overlong_of"] is None:
            reward["overlong_of"] = "context" if reward["overlong_max"] is None else "response"
        if reward["overlong_max"] is None:
            reward["overlong_max"] = max_length
        if reward["overlong_cache"] is None and reward["overlong_max"]:
            reward["overlong_cache"] = max(1, reward["overlong_max"] // 5)

    def check(self, rl: Rl, method: Composition) -> None:
        self._check_kind(method)
        self._check_outcome()
        if self.overlong_max is not None and self.overlong_cache is not None and self.overlong_cache > self.overlong_max:
            raise ParamsError(
                f"rl.reward.overlong_cache ({self.overlong_cache}), the tokens before overlong_max over which the penalty grows, "
                f"must be at most overlong_max ({self.overlong_max})"
            )

    def _check_kind(self, method: Composition) -> None:
        if self.kind == "prs":
            if self.density != "environment":
                raise ParamsError(
                    f"rl.reward.kind: prs scores entire episodes, and rl.reward.density: {self.density} would replace its "
                    f"scores; set one of the two to environment"
                )
            names = [stage.name for stage in self.prs]
            if len(set(names)) != len(names):
                raise ParamsError(
                    f"rl.reward.prs names a stage twice: {names}; give each a different name (`term` selects what it scores)"
                )
            if sum(stage.weight for stage in self.prs) <= 0:
                raise ParamsError("rl.reward.prs: the weights of all stages are 0, so all rewards would be; set one above 0")
        if self.kind in SCORED and method.data != "episodes":
            raise ParamsError(
                f"rl.reward.kind: {self.kind} scores the episodes that rl plays, and algorithm {method.card.slug} plays none; "
                f"set it to environment, or choose another algorithm"
            )
        if self.kind in ("hierarchical", "own", *SCORED) and self.density != "environment":
            raise ParamsError(
                f"rl.reward.kind: {self.kind} scores entire episodes, and rl.reward.density: {self.density} would replace its "
                f"scores; set one of the two to environment"
            )

    def _check_outcome(self) -> None:
        """Check the grades of success and failure."""
        if (self.correct is None) != (self.wrong is None):
            raise ParamsError("rl.reward.correct and wrong replace the environment's return together: set both, or neither")
        if self.correct is None or self.wrong is None:
            return
        if self.correct <= self.wrong:
            raise ParamsError(f"rl.reward.correct ({self.correct:g}) must be above wrong ({self.wrong:g})")
        if self.kind in ("prs", "hierarchical", "own", *SCORED) or self.density != "environment":
            raise ParamsError(
                f"rl.reward.correct and wrong replace the rewards of kind: {self.kind} and density: {self.density}; set both to "
                f"null, or these two to environment"
            )
        cap = self.tool_bonus_cap if self.tool_bonus else None
        if cap is not None and not self.wrong <= cap < self.correct:
            raise ParamsError(
                f"rl.reward.tool_bonus_cap ({cap:g}), the largest reward of a failure with its bonus, must be at least wrong "
                f"({self.wrong:g}) and below correct ({self.correct:g})"
            )

    @property
    def environments_own(self) -> bool:
        """Whether rewards are the environment's own, apart from penalties and bonuses added to them."""
        return self.kind == self.density == "environment" and self.correct is None and self.wrong is None


def largest_reward(reward: Reward) -> float | None:
    """The largest return after shaping; None if it is the environment's own."""
    if reward.kind == "prs":
        return sum(stage.weight for stage in reward.prs)
    return 1.0 + reward.multi_tool_bonus if reward.kind == "hierarchical" else reward.correct


@dataclass(frozen=True)
class EpisodeRewards(Extra):
    """Returns that depend on an episode's text: a judge's, a verifier's, or those from references."""

    rewards: Tensor
    """[B] float32."""


def given_rewards(batch: TrajectoryBatch) -> Tensor:
    """Returns [B] of EpisodeRewards. Raises ValueError if the batch has none."""
    found = batch.get(EpisodeRewards)
    if found is None:
        raise ValueError(
            "rl.reward.kind is judge, references or verifier, and nobody has scored this batch; only rl's own episodes are scored"
        )
    return found.rewards


def known(batch: TrajectoryBatch, name: str, key: str) -> Tensor:
    """A field of the batch that the shaping `key` needs. Raises ValueError if the batch does not have it."""
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"rl.reward.{key} needs the episodes' {name}, and this batch has none")
    return value


def stage_score(batch: TrajectoryBatch, stage: PrsStage) -> Tensor:
    """Score of one stage of progressive shaping, [B] in [0, 1]. Raises ValueError, listing the known ones, for an unknown
    term."""
    import torch

    term = stage.term or stage.name
    if term == "parse":
        accepted, overlong = known(batch, "accepted", "prs"), known(batch, "overlong", "prs")
        real = torch.arange(accepted.shape[1])[None, :] < batch.turns[:, None]
        share = (accepted & real).sum(1) / batch.turns.clamp(min=1)
        return torch.where(overlong, torch.zeros_like(share), share)
    if term == "tool":
        calls = known(batch, "tool_calls", "prs")
        return torch.where(calls > 0, torch.ones_like(calls), torch.full_like(calls, stage.no_call_score))
    if term == "outcome":
        return batch.rewards.clamp(0.0, 1.0)
    if term in batch.terms:
        return batch.terms[term].clamp(0.0, 1.0)
    raise ValueError(
        f"rl.reward.prs: stage '{stage.name}' has the unknown term '{term}'; known: parse, tool, outcome"
        + "".join(f", {name}" for name in sorted(batch.terms))
    )


def with_returns(batch: TrajectoryBatch, rewards: Tensor) -> TrajectoryBatch:
    """The batch with these returns [B], each on its episode's last turn."""
    import torch

    width = batch.turn_rewards.shape[1]
    last = torch.arange(width)[None, :] == (batch.turns - 1)[:, None]
    return batch.with_(rewards=rewards, turn_rewards=torch.where(last, rewards[:, None], torch.zeros(())))


def with_terminal(batch: TrajectoryBatch, term: Tensor) -> TrajectoryBatch:
    """The batch with `term` [B] added to the last turn's reward, and so to the return."""
    import torch

    width = batch.turn_rewards.shape[1]
    last = torch.arange(width)[None, :] == (batch.turns - 1)[:, None]
    return batch.with_(rewards=batch.rewards + term, turn_rewards=batch.turn_rewards + last * term[:, None])


def progressive(batch: TrajectoryBatch, stages: list[PrsStage]) -> TrajectoryBatch:
    """The batch with returns by `staged`; the stages' scores become terms `prs/<name>` and metrics."""
    import torch

    scores = torch.stack([stage_score(batch, stage) for stage in stages], 1)
    rewards = staged(scores, [stage.weight for stage in stages], [stage.threshold for stage in stages])
    named = {f"prs/{stage.name}": scores[:, place] for place, stage in enumerate(stages)}
    batch = with_returns(batch, rewards).with_(terms={**batch.terms, **named})
    return batch.with_metrics(**{name: float(values.mean()) for name, values in named.items()})


def well_formed(batch: TrajectoryBatch) -> Tensor:
    """Episodes [B] bool whose actions were all accepted and that did not run out of tokens."""
    import torch

    accepted, overlong = known(batch, "accepted", "kind"), known(batch, "overlong", "kind")
    real = torch.arange(accepted.shape[1])[None, :] < batch.turns[:, None]
    return (accepted | ~real).all(1) & ~overlong


def shape_rewards(batch: TrajectoryBatch, params: Reward) -> TrajectoryBatch:
    """The batch with shaped `rewards` and `turn_rewards`; the batch itself without shaping."""
    import torch

    given = batch
    if params.kind == "prs":
        batch = progressive(batch, params.prs)
    if params.kind == "hierarchical":
        formed, tools = well_formed(batch), known(batch, "tools", "kind")
        scores = batch.rewards.clamp(0.0, 1.0)
        batch = with_returns(batch, hierarchical(scores, formed, tools, params.format_penalty, params.multi_tool_bonus))
        batch = batch.with_metrics(well_formed=float(formed.float().mean()))
    if params.kind in SCORED:
        batch = with_returns(batch, given_rewards(batch))
    if params.density in ("single", "dense"):
        success = known(batch, "success", "density")
        if params.density == "single":
            turn_rewards = single(success, batch.turns, batch.turn_rewards.shape[1])
        else:
            turn_rewards = dense(batch.turn_rewards, success, params.divisor, params.max_total)
        batch = batch.with_(turn_rewards=turn_rewards, rewards=turn_rewards.sum(1))
    if params.correct is not None and params.wrong is not None:
        success = known(batch, "success", "correct")
        rewards = torch.where(success, torch.tensor(params.correct), torch.tensor(params.wrong))
        batch = with_returns(batch, rewards)
    if params.tool_bonus:
        calls, success = known(batch, "tool_calls", "tool_bonus"), known(batch, "success", "tool_bonus")
        paid = with_tool_bonus(batch.rewards, success, calls, params.tool_bonus, params.tool_bonus_on, params.tool_bonus_cap)
        batch = with_terminal(batch, paid - batch.rewards)
    if params.overlong_penalty:
        if params.overlong_max is None or params.overlong_cache is None:
            raise ValueError("rl.reward.overlong_max and overlong_cache must be numbers; resolve the parameters first")
        lengths = batch.lengths if params.overlong_of == "context" else response_lengths(batch)
        term = overlong_term(lengths, params.overlong_max, params.overlong_cache, params.overlong_penalty)
        batch = with_terminal(batch, term)
    return batch if batch is given else batch.with_metrics(shaped_reward=float(batch.rewards.mean()))


def response_lengths(batch: TrajectoryBatch) -> Tensor:
    """Tokens after the prompt, [B] int64: the policy's and the environment's; 0 for an episode without policy tokens."""
    import torch

    return torch.where(batch.mask.any(1), batch.lengths - batch.mask.int().argmax(1), torch.zeros_like(batch.lengths))


def kl_penalty(batch: TrajectoryBatch, params: Reward) -> TrajectoryBatch:
    """The batch with `token_rewards` -kl_coef * KL estimate of the sampling policy from the reference, per policy token.

    Raises ValueError without reference log-probabilities.
    """
    import torch

    from stages.algorithms.parts.loss import kl_estimate

    if not params.kl_coef:
        return batch
    if batch.logprobs_ref is None:
        raise ValueError("rl.reward.kl_coef is above 0 and the batch has no reference log-probabilities")
    penalty = params.kl_coef * kl_estimate(batch.logprobs_old, batch.logprobs_ref, params.kl_estimator)
    taken = torch.where(batch.policy_mask, penalty, torch.zeros_like(penalty))
    before = torch.zeros_like(taken) if batch.token_rewards is None else batch.token_rewards
    return batch.with_(token_rewards=before - taken)
