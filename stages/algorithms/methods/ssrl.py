"""SSRL: the policy searches itself, in place of a tool, and is rewarded for right answers and a graded format."""

from __future__ import annotations

from typing import Any

import torch

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.methods import grpo
from stages.algorithms.parts.reward import with_returns
from stages.algorithms.settings import Rl
from stages.runtime.validation import NonNegative, ParamsError, Section

CARD = Card(
    slug="ssrl",
    title="SSRL",
    paper="Fan et al., arXiv 2508.10874",
    equation="R = 0.9 e + 0.1 f, e exact match, f = min(1, n_t / 2) min(n_t, n_s + 1) / max(n_t, n_s + 1) for n_t thoughts (at "
    "most 8) and n_s searches in the right order, else 0; GRPO on R, PPO's clip 0.2, KL coefficient 0.001 (k3); results that the "
    "policy wrote are not trained on (loss.evidence)",
    assumptions="search with per_domain.search.environment.tool_mode: self, real or entropy_gated, the same policy in each. Each "
    "thought, query, result and answer is a turn here, one text in the paper, so that who wrote a token is a record; a result "
    "that the policy wrote is shown again where a tool's stands. environment.target_thinks and max_thinks are 2 and 8 as in the "
    "authors' code. The gate compares a query's drawn tokens with those of the query before; environment.first_always_real false "
    "leaves an episode's first search to the policy. The window of 5 in the authors' settings is not there: what it averages was "
    "not found. The paper's case table of rewards was not found: the weights are those of its code",
    reduces_to="answer 1, format 0: GRPO on exact match",
    tested_by="tests/algorithms/test_ssrl.py, tests/environments/test_self_search.py",
    switch="rl.algorithm: ssrl",
)
ANSWER, FORM = "exact_match", "format_graded"


class Settings(Section):
    answer: NonNegative = 0.9
    """Weight of exact match."""
    format: NonNegative = 0.1
    """Weight of the graded format score."""


def fits(domain: Any, rl: Rl) -> None:
    """Raise ParamsError for a domain without tool modes."""
    if getattr(domain.settings, "tool_mode", None) is None or getattr(domain.settings, "closed_book", False):
        raise ParamsError(
            f"rl.algorithm: ssrl needs an environment with tool modes, and domain {domain.name} has none set; set "
            f"per_domain.search.environment.tool_mode to self, real or entropy_gated (profiles/methods/ssrl.yaml), and "
            f"closed_book to false"
        )


def reward(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """The batch with R as return. An episode that was cut has neither term: 0. Raises ValueError for an environment that does not
    grade the format."""
    settings: Settings = rl.settings
    if FORM not in batch.terms:
        raise ValueError(
            "rl.algorithm: ssrl needs the graded format of episodes, and the environment does not tell it; set "
            "per_domain.search.environment.tool_mode (profiles/methods/ssrl.yaml)"
        )
    right = batch.terms.get(ANSWER, torch.zeros_like(batch.rewards))
    returns = settings.answer * right + settings.format * batch.terms[FORM]
    names = ("self_written", "false_evidence", "real_search", FORM)
    told = {name: float(batch.terms[name].mean()) for name in names if name in batch.terms}
    return with_returns(batch, returns).with_metrics(shaped_reward=float(returns.mean()), **told)


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
    fits=fits,
)
