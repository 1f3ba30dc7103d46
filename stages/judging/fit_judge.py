"""Fits a judge model to preferences: a copy of a policy that answers by its options' log-probabilities (stages/judging/local.py).

reward      -log sigmoid(r_w - r_l),  r the log-odds of yes on an answer alone (Bradley-Terry)
comparison  -(log sigmoid(y s_12) + log sigmoid(y s_21)) / 2,  y = 1 if the first is better, else -1; both orders
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from stages.agent.policy import Policy
from stages.judging.contract import Question, Rubric, swapped
from stages.judging.local import LocalJudge
from stages.judging.measures import brier_score, calibration, cohen_kappa, flip_rate, krippendorff_alpha
from stages.judging.preferences import Preference
from stages.judging.settings import JudgeModel, LocalParams
from stages.values import fitting

Kind = Literal["reward", "comparison"]
OnStep = Callable[[int, int, float], None] | None


@dataclass(frozen=True)
class PairedPrompts:
    """Two prompts: the better and the worse answer alone (reward), or the pair in both orders, with `sign` 1 if the first is
    better (comparison)."""

    task_id: str
    one: list[int]
    other: list[int]
    sign: float

    rows = 2

    @property
    def width(self) -> int:
        return max(len(self.one), len(self.other))


def alone(question: Question) -> tuple[Question, Question]:
    """The pointwise questions on the two candidates of a pairwise one."""
    first, second = question.candidates
    return replace(question, kind="pointwise", candidates=(first,)), replace(question, kind="pointwise", candidates=(second,))


def encoded(judge: LocalJudge, kind: Kind, preference: Preference) -> PairedPrompts:
    """The prompts that the judge will be asked with (`LocalJudge.prompts`)."""
    question = preference.question
    shown = alone(question) if kind == "reward" else (question, swapped(question))
    first, second = (judge.prompts(one)[0] for one in shown)
    sign = 1.0 if preference.prefers_first else -1.0
    return PairedPrompts(preference.task_id, first, second, sign)


def losses(kind: Kind, one: Tensor, other: Tensor, sign: Tensor) -> Tensor:
    """The loss per preference [B] of the options' log-odds [B] after both prompts; `sign` [B] is 1 if the first is better."""
    from torch.nn.functional import softplus

    if kind == "reward":
        return softplus(-sign * (one - other))
    return (softplus(-sign * one) + softplus(sign * other)) / 2


def fit_judge(
    policy: Policy,
    preferences: Sequence[Preference],
    params: JudgeModel,
    max_length: int,
    seed: int,
    micro_tokens: int,
    watch: Callable[[float], AbstractContextManager[OnStep]] = lambda tokens: nullcontext(None),
) -> tuple[LocalJudge, fitting.FitReport]:
    """A judge on a trained copy of the policy's model. `watch` gets the number of tokens to come, and gives `on_step` of
    stages.values.fitting.fit. Raises ValueError without preferences, or for options that are not two
    single tokens."""
    assert params.kind != "none"
    kind: Kind = params.kind
    model = copy.deepcopy(policy.model).float()
    judge = LocalJudge(replace(policy, model=model), LocalParams(options=params.options), max_length, logits=kind == "reward")
    examples = [encoded(judge, kind, one) for one in preferences]

    def loss(run: Sequence[PairedPrompts]) -> Tensor:
        differences = judge.log_odds([*(one.one for one in run), *(one.other for one in run)])
        sign = torch.tensor([one.sign for one in run], device=differences.device)
        return losses(kind, differences[: len(run)], differences[len(run) :], sign).sum()

    model.train()
    with watch(params.epochs * sum(one.rows * one.width for one in examples)) as on_step:
        report = fitting.fit(model, examples, loss, lambda one: 1.0, params, micro_tokens, seed, "judge_model", on_step=on_step)
    model.eval()
    return judge, report


def verdicts(judge: LocalJudge, kind: Kind, questions: Sequence[Question]) -> list[tuple[float, float]]:
    """(s_12, s_21) of pairwise questions; of a reward model both are r_1 - r_2. NaN where it is broken."""
    if kind == "comparison":
        return judge.margins(questions)
    shown = [one for question in questions for one in alone(question)]
    rewards = [judgment.scores[0] if judgment.ok else math.nan for judgment in judge.judge(shown)]
    return [(rewards[at] - rewards[at + 1],) * 2 for at in range(0, len(rewards), 2)]


def measured(judge: LocalJudge, kind: Kind, preferences: Sequence[Preference], alpha: bool = False) -> dict[str, float]:
    """Agreement with the labels before noise: accuracy, Cohen's kappa, Brier score and calibration error of the probability that
    the first is better, the share of pairs whose verdict depends on the order, and Krippendorff's alpha on request."""
    if not preferences:
        return {"pairs": 0.0}
    margins = verdicts(judge, kind, [one.question for one in preferences])
    truth = [one.clean for one in preferences]
    said = [sum(pair) > 0 for pair in margins]
    shares = [float(torch.sigmoid(torch.tensor(sum(pair) / 2))) for pair in margins]
    outcomes = [float(label) for label in truth]
    found = {
        "pairs": float(len(truth)),
        "accuracy": sum(one == other for one, other in zip(said, truth, strict=True)) / len(truth),
        "kappa": cohen_kappa(said, truth),
        "brier": brier_score(shares, outcomes),
        "calibration_error": calibration(shares, outcomes)[0],
        "flip_rate": flip_rate([(one, -one) for one, _ in margins], [(other, -other) for _, other in margins]),
    }
    if alpha:
        found["alpha"] = krippendorff_alpha([[float(one) for one in said], outcomes])
    return found


def by_principle(
    judge: LocalJudge, kind: Kind, questions: Sequence[Question], signs: Sequence[dict[str, float]], items: Sequence[Any]
) -> dict[str, dict[str, float]]:
    """How well a model reads each principle alone: `accuracy`, and `negated`, its agreement with the same labels when it reads
    the negated principle (0 is perfect). `signs`: per question, principle -> g_d; pairs with 0 are left out."""
    found = {}
    for item in items:
        held = [(question, one[item.name] > 0) for question, one in zip(questions, signs, strict=True) if one.get(item.name)]
        row = {"pairs": float(len(held))}
        for name, text in (("accuracy", item.text), ("negated", item.negative)):
            asked = [replace(question, rubric=Rubric(principles=(text,))) for question, _ in held]
            said = [sum(pair) > 0 for pair in verdicts(judge, kind, asked)]
            row[name] = sum(one == label for one, (_, label) in zip(said, held, strict=True)) / max(1, len(held))
        found[item.name] = row
    return found
