"""SSP: one policy proposes search questions and solves them."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.methods import grpo
from stages.algorithms.settings import Rl
from stages.environments.self_play import MARKS_TERM
from stages.runtime.validation import ParamsError, Positive, Section

CARD = Card(
    slug="ssp",
    title="Search Self-Play",
    paper="Search Self-play, arXiv 2510.18821",
    equation="the policy gets an answer a and writes, with the search tool, a question q that passes rules and a reader, who "
    "must find a in what the proposer found among distractors; G episodes solve q, s = share that is right; solver: GRPO; "
    "proposer: R = 1 - s (0 if q failed), A = R; per role -sum min(rho A, clip(rho, 1 - 0.2, 1 + 0.285) A) / tokens + 0.01 k3; "
    "proposer first, then solver, same weights; or one step on both (tasks.settings.updates.combine)",
    assumptions="episodes end with an answer that the environment can check, which also stands for the paper's judge model. "
    "Slots of failed proposals get earlier problems from a pool. The gate rejects what the reader leaves without an answer (the "
    "authors' code accepts it). Proposers play at temperature 0.8 (roles.proposer.sampling). A proposal that failed and has no "
    "advantage has no KL term either, which it has in the authors' code. The solver's importance ratios are to the policy that "
    "played, also after the proposer's update. A penalty for failed proposals can end in a collapse: watch the column valid",
    reduces_to="tasks.settings.proposer.n 0: GRPO on curated questions with this clip range, KL term and group size, bit for bit",
    tested_by="tests/algorithms/test_ssp.py, tests/training/test_self_play.py, tests/environments/test_self_play.py",
    switch="rl.algorithm: ssp",
)


class Settings(Section):
    max_marks: Annotated[int, Field(ge=1)] = 10
    """How often an episode may write the word `answer`; with more, its reward is divided by mark_divisor. It still counts as
    solved for the proposer."""
    mark_divisor: Positive = 4.0


def reward(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """The batch with smaller rewards of episodes that write the word `answer` too often."""
    marks = batch.terms.get(MARKS_TERM)
    if marks is None:
        return batch
    factor = torch.where(marks > rl.settings.max_marks, 1.0 / rl.settings.mark_divisor, 1.0)
    turn_rewards = batch.turn_rewards * factor[:, None]
    return batch.with_(turn_rewards=turn_rewards, rewards=turn_rewards.sum(1))


def check(given: Rl, rl: Rl) -> None:
    """Raises ParamsError for another source of tasks, and for a number of tasks that proposals do not fill."""
    if rl.tasks.source != "self_play":
        raise ParamsError(f"rl.algorithm: ssp proposes its own tasks, and rl.tasks.source is {rl.tasks.source}; set it to null")
    number: Any = rl.tasks.settings.proposer.n
    if number and rl.tasks_per_step % number:
        raise ParamsError(
            f"rl.tasks_per_step is {rl.tasks_per_step}, and rl.tasks.settings.proposer.n is {number}: make it a multiple, so "
            f"that every proposal has a slot"
        )


COMPOSITION = Composition(
    card=CARD,
    parts={
        **grpo.COMPOSITION.parts,
        "group_size": 5,
        "tasks.source": "self_play",
        "reward.kind": "own",
        "loss.aggregation": "token_mean",
        "loss.clip_high": 0.285,
        "loss.kl_coef": 0.01,
        "loss.kl_estimator": "k3",
    },
    pieces={"reward": reward},
    settings=Settings,
    check=check,
)
