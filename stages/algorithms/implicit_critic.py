"""Implicit critic: a score of each episode, made of the policy's log-probabilities of its whole group, fitted to the outcome as a
label (Li et al., arXiv 2509.02522, equations 4 to 7).

    r_i = beta sum_t (log pi(y_t) - log pi_ref(y_t))        over the policy's own tokens
    psi_i = r_i - mean of the other r of its group          (rloo; see `scores`)
    loss = mean_i w_i [-y_i log s(psi_i) - (1 - y_i) log(1 - s(psi_i))],  s the logistic function

Every psi_i has gradients to all episodes of its group: dloss/dr_i = sum_j w_j (s(psi_j) - y_j) dpsi_j/dr_i / B.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.groups import sums_by_group
from stages.algorithms.parts.filling import trained_rows
from stages.algorithms.settings import Rl

STD_EPS = 1e-6


def labels(batch: TrajectoryBatch, threshold: float | None) -> Tensor:
    """y [B] float32: 1 from a return of `threshold`, or the return itself for None; 0 for an episode that was cut.

    Raises ValueError for returns outside [0, 1] as labels, whose cross-entropy has no bound.
    """
    if threshold is not None:
        found = (batch.rewards >= threshold).float()
    else:
        found = batch.rewards.float()
        if bool(((found < 0) | (found > 1)).any()):
            raise ValueError(
                f"rl.settings.threshold is null, so returns are labels, and they run from {float(found.min()):g} to "
                f"{float(found.max()):g}; labels must lie in [0, 1]: set a threshold, or change rl.reward"
            )
    return torch.where(batch.truncated, torch.zeros_like(found), found)


def class_weights(label: Tensor, group: Tensor, kind: str) -> Tensor:
    """w [B]. group_balanced: G / (2 n), n the group's members of the same class (labels from 0.5 on, or below), or 1 if all are
    of one class. only_positive: 1 for labels of exactly 1, else 0; only_negative: for exactly 0."""
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
    """psi [b] of proxies r [b]. rloo: r less the mean of the group's other r. grpo: (r - mean) / (std with n - 1, + 1e-6).
    naive: r."""
    if kind == "naive":
        return proxy
    size = sums_by_group(torch.ones_like(proxy), group)
    centred = proxy - sums_by_group(proxy, group) / size
    if kind == "rloo":
        return centred * size / (size - 1).clamp(min=1)
    variance = sums_by_group(centred**2, group) / (size - 1).clamp(min=1)
    # Where all are equal the root has no derivative; there it counts as a constant.
    std = torch.where(variance > 0, variance, torch.ones_like(variance)).sqrt()
    return centred / (torch.where(variance > 0, std, torch.zeros_like(std)) + STD_EPS)


def proxies(logprobs: Tensor, batch: TrajectoryBatch, settings: Any) -> Tensor:
    """r [b] of the current log-probabilities [b, T]; tokens off the mask have no part in it. Raises ValueError without the
    reference's log-probabilities where the proxy compares with it."""
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
    crossed = binary_cross_entropy_with_logits(psi, batch.extra["label"].to(psi.dtype), reduction="none")
    losses = batch.extra["class_weight"] * crossed
    return losses if batch.smoothing is None else losses * batch.smoothing


def advantage(batch: TrajectoryBatch, rl: Rl) -> TrajectoryBatch:
    """The batch with labels and class weights, and as `advantages`, which the loss does not read, minus the gradient of the
    group's summed losses by r where all proxies are equal: for rloo without weights y_i less the mean of the other y. Only rows
    that are trained on have a part in their group's weights."""
    trained = trained_rows(batch, rl.filling)
    label = labels(batch, rl.settings.threshold)
    weight = torch.zeros_like(label)
    weight[trained] = class_weights(label[trained], batch.group[trained], rl.settings.class_weight)
    pull = torch.zeros_like(label)
    pull[trained] = scores((weight * (label - 0.5))[trained], batch.group[trained], "rloo")
    batch = batch.with_(advantages=pull[:, None] * batch.mask, extra={**batch.extra, "label": label, "class_weight": weight})
    return batch.telling(label_mean=float(label.mean()))


def loss(logprobs: Tensor, batch: TrajectoryBatch, rl: Rl) -> Tensor:
    """An episode's loss in equal parts on its policy tokens, [b, T]: seq_mean_token_sum makes it the mean over episodes."""
    parts = episode_losses(logprobs, batch, rl) / batch.mask.sum(1).clamp(min=1)
    return torch.where(batch.mask, parts[:, None], torch.zeros_like(logprobs))
