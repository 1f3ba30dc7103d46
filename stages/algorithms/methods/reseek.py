"""ReSeek: the agent judges each search result, and is rewarded for judging right."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from stages.algorithms.batch import TrajectoryBatch, TurnTerms
from stages.algorithms.card import Card, Composition
from stages.algorithms.methods import grpo
from stages.algorithms.settings import Rl
from stages.records.task import JUDGMENT_TERMS
from stages.runtime.validation import ParamsError, Positive, Section, refuse_idle

CARD = Card(
    slug="reseek",
    title="ReSeek",
    paper="Li et al., arXiv 2510.00568",
    equation="R = sum_t gamma^(t-1) r_t over searches and the answer; r_t of a search: match 0.3 if its judgment agrees with "
    "whether the result was useful, false_accept -0.6, false_reject -0.3; r_T = exact match; GRPO on R, PPO's clip 0.2, KL "
    "coefficient 0.001 (k3)",
    assumptions="an environment that asks for judgments and knows the right ones (per_domain.search.environment.judge: the facts "
    "of the question's chain, against a threshold of 0.7). Correct rejections of useless searches pay without an answer: cap "
    "0.6 per episode is ours, null as published. How step rewards enter GRPO is not published: one return per episode here, or "
    "with advantage.level turn G_k = sum_{t>=k} gamma^(t-k) r_t, normalised over the group per turn. A rejected result stays in "
    "the context (soft, the paper's third version) or is removed from what later turns see (hard, the first): "
    "environment.judge.context. settings.preset has the penalties of both versions",
    reduces_to="match, false_accept and false_reject 0: GRPO",
    tested_by="tests/algorithms/test_reseek.py, tests/environments/test_judged_search.py",
    switch="rl.algorithm: reseek",
)
*RIGHT, ACCEPTED, REJECTED = JUDGMENT_TERMS


FALSE_ACCEPT = {"v1_symmetric": -0.3, "v3_asymmetric": -0.6}
"""Reward of accepting a useless result, in the paper's versions."""


class Settings(Section):
    preset: Literal["v1_symmetric", "v3_asymmetric"] = "v3_asymmetric"
    """The paper's version, which false_accept follows unless it is set: -0.3 (first) or -0.6 (third)."""
    match: float = 0.3
    """Reward of a right judgment."""
    false_accept: float = -0.6
    """Reward of accepting a useless result."""
    false_reject: float = -0.3
    """Reward of rejecting a useful result."""
    cap: Positive | None = 0.6
    """Largest sum of an episode's judgment rewards; null: none."""
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Discount per search of returns."""

    @model_validator(mode="before")
    @classmethod
    def _by_version(cls, values: Any) -> Any:
        preset = values.get("preset") if isinstance(values, dict) else None
        if not isinstance(preset, str) or preset not in FALSE_ACCEPT or "false_accept" in values:
            return values
        return {**values, "false_accept": FALSE_ACCEPT[preset]}

    @model_validator(mode="after")
    def _used(self) -> Settings:
        refuse_idle(self, "", dict.fromkeys(("cap", "gamma"), (self.pays, "a reward of judgments other than 0")))
        return self

    @property
    def pays(self) -> bool:
        """Whether judgments have rewards."""
        return bool(self.match or self.false_accept or self.false_reject)


def has_judgments(batch: TrajectoryBatch) -> bool:
    """Whether any episode has a term of JUDGMENT_TERMS; one that the environment ended has all, one that was cut those so far."""
    return any(name in batch.terms for name in JUDGMENT_TERMS)


def judgment_rewards(batch: TrajectoryBatch, settings: Settings) -> Tensor:
    """Reward of each turn's judgment before the discount, [B, U]; what exceeds the cap is not paid. Raises ValueError for a batch
    of an environment that asks for no judgments."""
    found = batch.get(TurnTerms)
    if found is None or not (has_judgments(batch) or bool(batch.truncated.all())):
        raise ValueError(
            "rl.algorithm: reseek rewards judgments, and the environment asks for none; set per_domain.search.environment.judge "
            "(profiles/methods/reseek.yaml), or rl.settings.match, false_accept and false_reject to 0"
        )
    nothing = torch.zeros_like(batch.turn_rewards)
    term = {name: found.of(name) if name in found.names else nothing for name in JUDGMENT_TERMS}
    given = settings.match * (term[RIGHT[0]] + term[RIGHT[1]])
    given = given + settings.false_accept * term[ACCEPTED] + settings.false_reject * term[REJECTED]
    if settings.cap is None:
        return given
    paid, total = [], torch.zeros(batch.size)
    for column in given.unbind(1):
        after = (total + column).clamp(max=settings.cap)
        paid.append(after - total)
        total = after
    return torch.stack(paid, 1)


def returns_from(batch: TrajectoryBatch, turn_rewards: Tensor, gamma: float) -> Tensor:
    """G of each turn u, [B, U]: G_u = r_u + gamma^j G_{u+1}, where j is 1 for a judgment, which ends a search, and else 0."""
    found = batch.get(TurnTerms)
    assert found is not None
    judgments = torch.zeros_like(turn_rewards) + sum(found.of(name) for name in JUDGMENT_TERMS if name in found.names)
    returns, after = [], torch.zeros(batch.size)
    for reward, judged_here in zip(reversed(turn_rewards.unbind(1)), reversed(judgments.unbind(1)), strict=True):
        after = reward + gamma**judged_here * after
        returns.append(after)
    return torch.stack(returns[::-1], 1)


def judged(batch: TrajectoryBatch) -> dict[str, float]:
    """Judgments per episode, and their balanced accuracy: the mean of the shares of useful results that were accepted and of
    useless ones that were rejected, missing if either was never judged."""
    counts = (float(batch.terms[name].sum()) if name in batch.terms else 0.0 for name in JUDGMENT_TERMS)
    accept, reject, wrong_accept, wrong_reject = counts
    useful, useless = accept + wrong_reject, reject + wrong_accept
    accuracy = {"judge_balanced_accuracy": (accept / useful + reject / useless) / 2} if useful and useless else {}
    return {"judgments": (useful + useless) / batch.size, **accuracy}


def reward(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """The batch with judgment rewards on their turns. With a discount, `turn_rewards` are what makes their sum from a turn on the
    discounted return from there. Raises ValueError, see `judgment_rewards`."""
    settings: Settings = rl.settings
    if not settings.pays:
        return batch.with_metrics(**judged(batch)) if has_judgments(batch) else batch
    paid = judgment_rewards(batch, settings)
    turn_rewards = batch.turn_rewards + paid
    if settings.gamma < 1.0:
        returns = returns_from(batch, turn_rewards, settings.gamma)
        turn_rewards = returns - torch.cat([returns[:, 1:], torch.zeros_like(returns[:, :1])], 1)
    metrics = {**judged(batch), "judge_reward": float(paid.sum(1).mean())}
    return batch.with_(turn_rewards=turn_rewards, rewards=turn_rewards.sum(1)).with_metrics(**metrics)


def check(given: Rl, rl: Rl) -> None:
    """Raises ParamsError for two discounts."""
    if rl.settings.gamma < 1.0 and rl.advantage.gamma < 1.0:
        raise ParamsError(
            f"rl.settings.gamma {rl.settings.gamma:g} discounts returns per search, and rl.advantage.gamma "
            f"{rl.advantage.gamma:g} would again, per turn; set one of them to 1"
        )


def fits(domain: Any, rl: Rl) -> None:
    """Raise ParamsError for a domain without judgments, unless they have no rewards."""
    asks = getattr(domain.settings, "judge", None) is not None and not getattr(domain.settings, "closed_book", False)
    if rl.settings.pays and not asks:
        raise ParamsError(
            f"rl.algorithm: reseek rewards judgments of search results, and domain {domain.name} asks for none; set "
            f"per_domain.search.environment.judge (profiles/methods/reseek.yaml) and closed_book to false, or rl.settings.match, "
            f"false_accept and false_reject to 0"
        )


COMPOSITION = Composition(
    card=CARD,
    parts={
        **grpo.COMPOSITION.parts,
        "reward.kind": "own",
        "loss.kl_coef": 0.001,
        "loss.kl_estimator": "k3",
    },
    pieces={"reward": reward},
    settings=Settings,
    check=check,
    fits=fits,
)
