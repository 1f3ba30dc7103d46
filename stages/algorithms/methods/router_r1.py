"""Router-R1: the policy routes sub-questions to a pool of priced tools, and is rewarded for right and cheap answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.methods import ppo
from stages.algorithms.parts.reward import with_returns
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError, Section

CARD = Card(
    slug="router_r1",
    title="Router-R1",
    paper="Zhang et al., arXiv 2506.09033",
    equation="R = -1 for a bad format; else for a right answer (1 - alpha) m + alpha z, m exact match (or F1), and 0 for a wrong "
    "one; z = 1 - clip((x - q05) / (q95 - q05), 0, 1), x = sqrt(sum over calls of tokens times price), quantiles over the last "
    "1000 episodes; PPO with GAE, KL penalty 0.001 in the reward",
    assumptions="priced tools (per_domain.search.environment.route). alpha is rl.cost.weight; the cost term is paid for right "
    "answers only, as in the authors' code (the formula in the paper pays cheap wrong ones: cost.only_correct false). A call in "
    "the last turn is not executed and breaks the format. Tools are found by exact names, theirs by parts of names. The window "
    "is in checkpoints; cost.bounds step or fixed makes rewards independent of the order of episodes, which is ours",
    reduces_to="cost.weight 0, one free tool: PPO on search with a format penalty; malformed 0: a bad format "
    "earns what a wrong answer does",
    tested_by="tests/algorithms/test_router_r1.py, tests/environments/test_routed_search.py",
    switch="rl.algorithm: router_r1",
)
FORM = "well_formed"


class Settings(Section):
    metric: Literal["exact_match", "f1"] = "exact_match"
    """m, the reward of an answer before its cost."""
    malformed: Annotated[float, Field(le=0.0)] = -1.0
    """Return of an episode with a bad format, whatever its answer."""


def fits(domain: Any, rl: Rl) -> None:
    """Raise ParamsError for a domain without priced tools."""
    if getattr(domain.settings, "route", None) is None or getattr(domain.settings, "closed_book", False):
        raise ParamsError(
            f"rl.algorithm: router_r1 routes to priced tools, and domain {domain.name} has none; set "
            f"per_domain.search.environment.route (profiles/methods/router_r1.yaml), and closed_book to false"
        )


def check(given: Rl, rl: Rl) -> None:
    if rl.settings.malformed == 0.0 and rl.cost.kind != "none" and rl.cost.weight and not rl.cost.only_correct:
        raise ParamsError(
            "rl.settings.malformed is 0, and rl.cost.only_correct: false pays returns of 0 for low costs, those of a bad format "
            "among them: set malformed below 0, or only_correct to true"
        )


def reward(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """The batch with the metric as return, and `malformed` where the format is bad. Raises ValueError for an environment that
    does not tell the format."""
    settings: Settings = rl.settings
    if FORM not in batch.terms:
        raise ValueError(
            "rl.algorithm: router_r1 needs the format of episodes, and the environment does not tell it; set "
            "per_domain.search.environment.route (profiles/methods/router_r1.yaml)"
        )
    formed = batch.terms[FORM] > 0
    earned = batch.terms.get(settings.metric, torch.zeros_like(batch.rewards))
    returns = torch.where(formed, earned, torch.full_like(earned, settings.malformed))
    return with_returns(batch, returns).with_metrics(well_formed=float(formed.float().mean()))


COMPOSITION = Composition(
    card=CARD,
    parts={**ppo.COMPOSITION.parts, "reward.kind": "own", "reward.kl_coef": 0.001, "cost.kind": "normalised"},
    pieces={"reward": reward},
    settings=Settings,
    check=check,
    fits=fits,
)
