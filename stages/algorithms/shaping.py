"""Reward shaping on a batch: from the environment's rewards to those that advantages are made of.

In this order: what is rewarded (`kind`), how often (`density`), what right and wrong are worth, the tool term, the length term.
Where a part grades the whole episode, its reward falls on the last turn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stages.algorithms.contract import TrajectoryBatch
from stages.algorithms.kl import kl_estimate
from stages.parameters.rl import Reward
from stages.rewards.density import dense, single
from stages.rewards.hierarchical import hierarchical
from stages.rewards.progressive import staged
from stages.rewards.settings import PrsStage
from stages.rewards.terms import overlong_term, with_tool_bonus


def known(batch: TrajectoryBatch, name: str, key: str) -> Tensor:
    """A field of the batch that the shaping `key` needs. Raises ValueError if the batch does not carry it."""
    value = getattr(batch, name)
    if value is None:
        raise ValueError(f"rl.reward.{key} needs the episodes' {name}, and this batch carries none")
    return value


def stage_score(batch: TrajectoryBatch, stage: PrsStage) -> Tensor:
    """Score of one stage of progressive shaping, [B] in [0, 1]. Raises ValueError for an unknown term, naming those there are."""
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
        f"rl.reward.prs: stage '{stage.name}' asks for the term '{term}'; known: parse, tool, outcome"
        + "".join(f", {name}" for name in sorted(batch.terms))
    )


def with_returns(batch: TrajectoryBatch, rewards: Tensor) -> TrajectoryBatch:
    """The batch with these returns [B], each on its episode's last turn."""
    width = batch.turn_rewards.shape[1]
    last = torch.arange(width)[None, :] == (batch.turns - 1)[:, None]
    return batch.with_(rewards=rewards, turn_rewards=torch.where(last, rewards[:, None], torch.zeros(())))


def with_terminal(batch: TrajectoryBatch, term: Tensor) -> TrajectoryBatch:
    """The batch with `term` [B] added to the last turn's reward, and so to the return."""
    width = batch.turn_rewards.shape[1]
    last = torch.arange(width)[None, :] == (batch.turns - 1)[:, None]
    return batch.with_(rewards=batch.rewards + term, turn_rewards=batch.turn_rewards + last * term[:, None])


def progressive(batch: TrajectoryBatch, stages: list[PrsStage]) -> TrajectoryBatch:
    """R by `rewards.progressive.staged`; the stages' scores become terms `prs/<name>` and metrics."""
    scores = torch.stack([stage_score(batch, stage) for stage in stages], 1)
    rewards = staged(scores, [stage.weight for stage in stages], [stage.threshold for stage in stages])
    named = {f"prs/{stage.name}": scores[:, place] for place, stage in enumerate(stages)}
    batch = with_returns(batch, rewards).with_(terms={**batch.terms, **named})
    return batch.telling(**{name: float(values.mean()) for name, values in named.items()})


def well_formed(batch: TrajectoryBatch) -> Tensor:
    """Episodes [B] bool whose actions were all understood and that did not run out of tokens."""
    accepted, overlong = known(batch, "accepted", "kind"), known(batch, "overlong", "kind")
    real = torch.arange(accepted.shape[1])[None, :] < batch.turns[:, None]
    return (accepted | ~real).all(1) & ~overlong


def shape_rewards(batch: TrajectoryBatch, params: Reward) -> TrajectoryBatch:
    """The batch with shaped `rewards` and `turn_rewards`; the same batch if nothing is to be shaped."""
    given = batch
    if params.kind == "prs":
        batch = progressive(batch, params.prs or [])
    if params.kind == "hierarchical":
        if params.format_penalty is None or params.multi_tool_bonus is None:
            raise ValueError("rl.reward.format_penalty and multi_tool_bonus must be numbers; resolve the parameters first")
        formed, tools = well_formed(batch), known(batch, "tools", "kind")
        scores = batch.rewards.clamp(0.0, 1.0)
        batch = with_returns(batch, hierarchical(scores, formed, tools, params.format_penalty, params.multi_tool_bonus))
        batch = batch.telling(well_formed=float(formed.float().mean()))
    if params.density in ("single", "dense"):
        success = known(batch, "success", "density")
        if params.density == "single":
            turn_rewards = single(success, batch.turns, batch.turn_rewards.shape[1])
        else:
            turn_rewards = dense(batch.turn_rewards, success, params.divisor or "max_total", params.max_total or 1.0)
        batch = batch.with_(turn_rewards=turn_rewards, rewards=turn_rewards.sum(1))
    if params.correct is not None and params.wrong is not None:
        success = known(batch, "success", "correct")
        rewards = torch.where(success, torch.tensor(params.correct), torch.tensor(params.wrong))
        batch = with_returns(batch, rewards)
    if params.tool_bonus:
        calls, success = known(batch, "tool_calls", "tool_bonus"), known(batch, "success", "tool_bonus")
        paid = with_tool_bonus(
            batch.rewards, success, calls, params.tool_bonus, params.tool_bonus_on or "wrong", params.tool_bonus_cap
        )
        batch = with_terminal(batch, paid - batch.rewards)
    if params.overlong_penalty:
        if params.overlong_max is None or params.overlong_cache is None:
            raise ValueError("rl.reward.overlong_max and overlong_cache must be numbers; resolve the parameters first")
        term = overlong_term(response_lengths(batch), params.overlong_max, params.overlong_cache, params.overlong_penalty)
        batch = with_terminal(batch, term)
    return batch if batch is given else batch.telling(shaped_reward=float(batch.rewards.mean()))


def response_lengths(batch: TrajectoryBatch) -> Tensor:
    """Tokens after the prompt, [B] int64: the policy's and the environment's; 0 for an episode without policy tokens."""
    return torch.where(batch.mask.any(1), batch.lengths - batch.mask.int().argmax(1), torch.zeros_like(batch.lengths))


def kl_penalty(batch: TrajectoryBatch, params: Reward) -> TrajectoryBatch:
    """The batch with `token_rewards` -kl_coef * KL estimate of the sampling policy from the reference, per token of its own.

    Raises ValueError without reference log-probabilities.
    """
    if not params.kl_coef:
        return batch
    if batch.logprobs_ref is None:
        raise ValueError("rl.reward.kl_coef is above 0 and the batch has no reference log-probabilities")
    penalty = params.kl_coef * kl_estimate(batch.logprobs_old, batch.logprobs_ref, params.kl_estimator or "k1")
    taken = torch.where(batch.own, penalty, torch.zeros_like(penalty))
    before = torch.zeros_like(taken) if batch.token_rewards is None else batch.token_rewards
    return batch.with_(token_rewards=before - taken)
