"""A teacher's log-probabilities of the policy's own tokens, and the advantages that follow from them. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stages.algorithms.batch import Extra, TrajectoryBatch
from stages.algorithms.parts.loss import advantages_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Teacher(Extra):
    """What a teacher thinks of the tokens of a batch, for methods that need it (`Composition.teacher`)."""

    PER_TOKEN = ("logprobs", "known")

    logprobs: Tensor
    """[B, T] float32: log pi_T(y_t), 0 where it is not known."""
    known: Tensor
    """[B, T] bool: the policy's tokens that the teacher has read."""


def with_teacher(batch: TrajectoryBatch, outcome: float, clip: float) -> TrajectoryBatch:
    """The batch with A_t = outcome * A_t + (1 - outcome) * (log pi_T(y_t) - log pi_old(y_t)), the difference within +-clip.

    In expectation over the policy's own tokens, the gradient of the second term is that of the reverse divergence
    KL(pi || pi_T) of each token. Tokens that the teacher has not read keep the first term alone. Raises ValueError without
    Teacher.
    """
    teacher = batch.get(Teacher)
    if teacher is None:
        raise ValueError("the batch has no log-probabilities of a teacher; see Composition.teacher")
    known = teacher.known & batch.policy_mask
    gap = (teacher.logprobs - batch.logprobs_old).clamp(-clip, clip) * known
    metrics = {"teacher_gap": float(gap.sum() / known.sum().clamp(min=1))}
    if batch.success is not None:
        for name, rows in (("success", batch.success), ("failure", ~batch.success)):
            tokens = known & rows[:, None]
            if bool(tokens.any()):
                metrics[f"teacher_gap_{name}"] = float((gap * rows[:, None]).sum() / tokens.sum())
        if {"teacher_gap_success", "teacher_gap_failure"} <= metrics.keys():
            metrics["teacher_contrast"] = metrics["teacher_gap_success"] - metrics["teacher_gap_failure"]
    metrics["teacher_unknown"] = float((batch.policy_mask & ~known).sum() / batch.policy_mask.sum().clamp(min=1))
    return batch.with_(advantages=outcome * advantages_of(batch) + (1 - outcome) * gap).with_metrics(**metrics)
