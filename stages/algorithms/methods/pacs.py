"""PACS: an implicit critic. A score of each episode, computed from the policy's log-probabilities of its group, is fitted to its
outcome as a label (equations 4 to 7 of the paper).

    r_i = beta sum_t (log pi(y_t) - log pi_ref(y_t))        over the policy's own tokens
    psi_i = r_i - mean of the group's other r               (rloo; see `scores`)
    loss = mean_i w_i [-y_i log s(psi_i) - (1 - y_i) log(1 - s(psi_i))],  s the logistic function

Every psi_i has gradients to all episodes of its group: dloss/dr_i = sum_j w_j (s(psi_j) - y_j) dpsi_j/dr_i / B.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from stages.algorithms.batch import Extra, TrajectoryBatch
from stages.algorithms.card import Card, Composition
from stages.algorithms.parts.advantage import Smoothing
from stages.algorithms.parts.group_resampling import trained_rows
from stages.algorithms.parts.whole_groups import sums_by_group
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError, Positive, Section, Share

CARD = Card(
    slug="pacs",
    title="PACS",
    paper="Li et al., arXiv 2509.02522",
    equation="r_i = beta sum_t (log pi - log pi_old); psi_i = r_i - mean of the group's other r; loss = mean of w_i times the "
    "cross-entropy of sigmoid(psi_i) with the label 1[R_i >= threshold], w_i = G / (2 n of the label); no advantage, no clip",
    assumptions="whole groups of at least 2 episodes in a micro-batch, which is enforced; sums over tokens, so that longer "
    "episodes need a smaller beta; truncated episodes have label 0; the reference code clips no gradients (rl.max_grad_norm)",
    reduces_to="first update, settings.class_weight none, beta 1: RLOO with loss.aggregation seq_mean_token_sum, exactly",
    tested_by="tests/algorithms/test_pacs.py, tests/training/test_whole_groups.py",
    switch="rl.algorithm: pacs",
)
STD_EPS = 1e-6


class Settings(Section):
    beta: Positive = 1.0
    """Factor on the reward proxy."""
    score: Literal["rloo", "grpo", "naive"] = "rloo"
    """psi: the proxy minus the mean of the others' (rloo), standardised in the group (grpo; its first gradients are about 1e6
    times larger, since all proxies are then equal), or unchanged (naive)."""
    reward_proxy: Literal["log_ratio", "mean_logp"] = "log_ratio"
    """Sum over policy tokens of the log ratio to the reference; or their mean log-probability, without a reference."""
    reference: Literal["step_old", "start"] = "step_old"
    """log_ratio: relative to the policy that played the step's episodes, as in the authors' code, or to the initial policy, as in
    the paper's text but without its resets."""
    class_weight: Literal["none", "group_balanced", "only_positive", "only_negative"] = "group_balanced"
    """group_balanced: both labels have equal weight in a group; only_...: episodes of the other label have weight 0."""
    threshold: Share | None = 0.5
    """Return from which the label is 1; null: the return itself, which must be in [0, 1], is a soft label."""


@dataclass(frozen=True)
class Labels(Extra):
    label: Tensor
    """y [B] float32."""
    weight: Tensor
    """w [B] float32."""


def labels(batch: TrajectoryBatch, threshold: float | None) -> Tensor:
    """y [B] float32: 1 for a return of at least `threshold`, or the return itself for None; 0 for truncated episodes.

    Raises ValueError for soft labels outside [0, 1], whose cross-entropy is unbounded.
    """
    if threshold is not None:
        found = (batch.rewards >= threshold).float()
    else:
        found = batch.rewards.float()
        if bool(((found < 0) | (found > 1)).any()):
            raise ValueError(
                f"rl.settings.threshold is null, so returns are labels, and they range from {float(found.min()):g} to "
                f"{float(found.max()):g}; labels must be in [0, 1]: set a threshold, or change rl.reward"
            )
    return torch.where(batch.truncated, torch.zeros_like(found), found)


def class_weights(label: Tensor, group: Tensor, kind: str) -> Tensor:
    """w [B]. group_balanced: G / (2 n), n the group's members of the same class (labels of at least 0.5, or below), or 1 if all
    are of one class. only_positive: 1 for labels of exactly 1, else 0; only_negative: for exactly 0."""
    if kind == "only_positive":
        return (label == 1).float()
    if kind == "only_negative":
        return (label == 0).float()
    ones = torch.ones_like(label)
    if kind == "none":
        return ones
    positive = (label >= 0.5).float()
    size, of_class = sums_by_group(ones, group), sums_by_group(positive, group)
    same = torch.where(positive == 1, of_class, size - of_class)
    return torch.where(same == size, ones, size / (2 * same))


def scores(proxy: Tensor, group: Tensor, kind: str) -> Tensor:
    """psi [b] of proxies r [b]. rloo: r minus the mean of the group's other r. grpo: (r - mean) / (std with n - 1, + 1e-6).
    naive: r."""
    if kind == "naive":
        return proxy
    size = sums_by_group(torch.ones_like(proxy), group)
    centred = proxy - sums_by_group(proxy, group) / size
    if kind == "rloo":
        return centred * size / (size - 1).clamp(min=1)
    variance = sums_by_group(centred**2, group) / (size - 1).clamp(min=1)
    # The square root has no derivative at 0; if all proxies are equal, the std is a constant.
    std = torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt()
    return centred / (torch.where(variance > 0, std, torch.zeros_like(std)) + STD_EPS)


def proxies(logprobs: Tensor, batch: TrajectoryBatch, settings: Settings) -> Tensor:
    """r [b] of the current log-probabilities [b, T], over the mask. Raises ValueError if the proxy is relative to the initial
    policy and the batch lacks its log-probabilities."""
    chosen = torch.where(batch.mask, logprobs, torch.zeros_like(logprobs))
    if settings.reward_proxy == "mean_logp":
        return settings.beta * chosen.sum(1) / batch.mask.sum(1).clamp(min=1)
    before = batch.logprobs_old
    if settings.reference == "start":
        if batch.logprobs_ref is None:
            raise ValueError("rl.settings.reference: start needs the start policy's log-probabilities, and the batch has none")
        before = batch.logprobs_ref
    return settings.beta * (chosen - torch.where(batch.mask, before, torch.zeros_like(before))).sum(1)


def episode_losses(logprobs: Tensor, batch: TrajectoryBatch, rl: Rl) -> Tensor:
    """w_i times the cross-entropy of each episode, [b]."""
    psi = scores(proxies(logprobs, batch, rl.settings), batch.group, rl.settings.score)
    found = batch.get(Labels)
    assert found is not None
    losses = found.weight * binary_cross_entropy_with_logits(psi, found.label.to(psi.dtype), reduction="none")
    smoothing = batch.get(Smoothing)
    return losses if smoothing is None else losses * smoothing.factor


def advantage(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """The batch with labels and class weights.

    The loss does not use `advantages`. For reports they are minus the gradient of the group's summed losses with respect to r
    when all proxies are equal: for rloo without weights, y_i minus the mean of the other y. Only rows that are trained on enter
    their group's weights.
    """
    trained = trained_rows(batch, rl.group_resampling)
    label = labels(batch, rl.settings.threshold)
    weight = torch.zeros_like(label)
    weight[trained] = class_weights(label[trained], batch.group[trained], rl.settings.class_weight)
    pull = torch.zeros_like(label)
    pull[trained] = scores((weight * (label - 0.5))[trained], batch.group[trained], "rloo")
    batch = batch.with_(advantages=pull[:, None] * batch.mask).with_extra(Labels(label, weight))
    return batch.with_metrics(label_mean=float(label.mean()))


def loss(logprobs: Tensor, batch: TrajectoryBatch, rl: Rl) -> Tensor:
    """Each episode's loss, divided equally among its policy tokens, [b, T]; with seq_mean_token_sum, the mean over episodes."""
    parts = episode_losses(logprobs, batch, rl) / batch.mask.sum(1).clamp(min=1)
    return torch.where(batch.mask, parts[:, None], torch.zeros_like(logprobs))


def needs_start(rl: Rl) -> bool:
    """Whether the proxy is relative to the initial policy."""
    return rl.settings.reward_proxy == "log_ratio" and rl.settings.reference == "start"


def check(given: Rl, resolved: Rl) -> None:
    """Raise ParamsError for settings of advantages and losses, which labels and scores replace."""
    settings: Settings = resolved.settings
    if resolved.loss.kind != "own" or resolved.advantage.estimator != "own":
        raise ParamsError(
            f"rl.algorithm pacs replaces both advantage and loss, and rl.loss.kind {resolved.loss.kind} with "
            f"rl.advantage.estimator {resolved.advantage.estimator} would undo that: set both to null, or choose another "
            f"algorithm"
        )
    if resolved.group_size < 2:
        raise ParamsError("rl.algorithm pacs compares the episodes of a group; rl.group_size must be at least 2")
    ignored = {
        "advantage.whiten": resolved.advantage.whiten,
        "advantage.clip": resolved.advantage.clip is not None,
        "reward.kl_coef": resolved.reward.kl_coef > 0,
        "credit.kind": resolved.credit.kind != "outcome",
    }
    for key, was_set in ignored.items():
        if was_set:
            raise ParamsError(f"rl.{key} has no effect: algorithm pacs learns from labels, not from advantages; set it to null")
    if resolved.external.per_group:
        raise ParamsError(
            "rl.external.per_group is above 0, and algorithm pacs compares episodes that the policy itself played; set it to 0"
        )
    if settings.reward_proxy == "mean_logp" and "reference" in settings.model_fields_set:
        raise ParamsError("rl.settings.reference has no effect with reward_proxy: mean_logp, which has none; remove it")


COMPOSITION = Composition(
    card=CARD,
    parts={"advantage.estimator": "own", "loss.kind": "own", "loss.aggregation": "seq_mean_token_sum"},
    pieces={"advantage": advantage, "loss": loss},
    settings=Settings,
    whole_groups=True,
    reference=needs_start,
    check=check,
)
