"""Reward-weighted regression: maximum likelihood on played episodes, weighted by the exponential of their returns."""

from __future__ import annotations

from typing import Literal

import torch

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.parts.advantage import episode_returns, group_sums
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError, Positive, Section

CARD = Card(
    slug="rwr",
    title="Reward-weighted regression",
    paper="Peters and Schaal, Reinforcement learning by reward-weighted regression, ICML 2007",
    equation="loss = -w_i log pi(y_t), w_i = exp(R_i / beta) / Z, Z the mean of exp(R / beta) over the batch (settings.over: "
    "group: over the episode's group)",
    assumptions="all episodes become more likely, good ones more so: there is no baseline, and progress is slow if most episodes "
    "fail. Z as a mean, which makes weights 1 on average, is ours",
    reduces_to="settings.beta to infinity: supervised fine-tuning on all episodes; to 0: on the best ones (bon_sft)",
    tested_by="tests/algorithms/test_survey.py",
    switch="rl.algorithm: rwr",
)


class Settings(Section):
    beta: Positive = 0.5
    """Temperature, in units of the return."""
    over: Literal["batch", "group"] = "batch"
    """The episodes over which Z is the mean."""


def advantage(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """`advantages` [B, T]: w_i on policy tokens."""
    returns = episode_returns(batch)
    group = batch.group if rl.settings.over == "group" else torch.zeros_like(batch.group)
    # Shifted by the largest return among those that share Z: w is unchanged and cannot overflow.
    largest = torch.full((int(group.max()) + 1,), -torch.inf, dtype=returns.dtype).scatter_reduce(0, group, returns, "amax")
    weights = ((returns - largest[group]) / rl.settings.beta).exp()
    sums, sizes = group_sums(weights, group)
    return batch.with_(advantages=(weights * sizes / sums).float()[:, None] * batch.mask)


def check(given: Rl, rl: Rl) -> None:
    """Raise ParamsError if every weight would be 1."""
    if rl.settings.over == "group" and rl.group_size < 2:
        raise ParamsError("rl.settings.over: group compares the episodes of a group, and rl.group_size is 1; set it to >= 2")


COMPOSITION = Composition(
    card=CARD, parts={"loss.kind": "policy_gradient"}, pieces={"advantage": advantage}, settings=Settings, check=check
)
