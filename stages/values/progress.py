"""The progress estimator of SPA (Wang et al., arXiv 2505.20732): splits an episode's return into contributions of its turns.

A copy of the policy's backbone with a scalar head of `stages.values.heads`, read at the last token of each turn and trained on
final returns only. With logits l_i of turn i and L_i = l_1 + ... + l_i,

    R^ = decode(L_N) is fitted to R,    c_i = decode(L_i) - decode(L_{i-1}),    c_1 = decode(L_1),

so the contributions sum to R^, and c_i is independent of later turns. With one output (head mse) decode is the identity and
c_i = l_i is the paper's estimator: every turn of an episode gets the same gradient, 2 (R^ - R). The authors' code uses a head on
the vocabulary's logits, which is a linear map of the same hidden states.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.engine.attention import use_attention
from stages.records.episode import Episode
from stages.seeding import seed_torch
from stages.values import fitting
from stages.values.fitting import FitReport
from stages.values.settings import Progress
from stages.values.step_value import StepValueModel


@dataclass(frozen=True)
class Rollout:
    """One episode: T tokens, the index of the last token of each turn, and its return."""

    task_id: str
    token_ids: list[int]
    ends: list[int]
    reward: float

    rows = 1

    @property
    def width(self) -> int:
        return len(self.token_ids)

    @classmethod
    def of(cls, episode: Episode) -> Rollout:
        return cls(episode.task_id, episode.token_ids, [turn.end - 1 for turn in episode.turns], episode.reward)


class ProgressEstimator(StepValueModel):
    """A step-value model whose logits add up over turns; saved and loaded like one."""

    def cumulative_logits(self, token_ids: Tensor, ends: Tensor) -> Tensor:
        """L_1 ... L_U, [B, U, outputs], of token_ids [B, T] with turns that end at `ends` [B, U] int64; constant past an
        episode's last turn, where `ends` is -1."""
        real = (ends >= 0).unsqueeze(-1)
        return (self.logits(token_ids, ends) * real).cumsum(1)

    @torch.no_grad()
    def contributions(self, token_ids: Tensor, ends: Tensor) -> Tensor:
        """c_i, [B, U] float32, 0 past an episode's last turn."""
        values = self.head.decode(self.cumulative_logits(token_ids, ends))
        before = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)
        return torch.where(ends >= 0, values - before, torch.zeros_like(values))


def _tensors(run: Sequence[Rollout], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids [B, T], ends [B, U], returns [B]."""
    token_ids = torch.zeros(len(run), max(one.width for one in run), dtype=torch.int64)
    ends = torch.full((len(run), max(len(one.ends) for one in run)), -1, dtype=torch.int64)
    for row, one in enumerate(run):
        token_ids[row, : one.width] = torch.tensor(one.token_ids)
        ends[row, : len(one.ends)] = torch.tensor(one.ends)
    return token_ids.to(device), ends.to(device), torch.tensor([one.reward for one in run], device=device)


def fit_progress(
    backbone: Any,
    rollouts: Sequence[Rollout],
    params: Progress,
    seed: int,
    micro_tokens: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> tuple[ProgressEstimator, FitReport]:
    """An estimator on a copy of `backbone` (no output layer), trained on the returns of `rollouts` of at least one turn each."""
    seed_torch(seed, "progress")
    own = copy.deepcopy(backbone).float()
    use_attention(own, "sdpa")
    model = ProgressEstimator(own, params.head)
    device = next(backbone.parameters()).device
    model.to(device)
    returns = torch.tensor([one.reward for one in rollouts], device=device)
    model.start_at(returns, torch.ones_like(returns))
    with torch.no_grad():
        # The initial prediction for an episode of mean length is the mean return.
        model.output.bias.div_(sum(len(one.ends) for one in rollouts) / max(1, len(rollouts)))
    model.train()

    def loss(run: Sequence[Rollout]) -> Tensor:
        token_ids, ends, returns = _tensors(run, device)
        return model.head.loss(model.cumulative_logits(token_ids, ends)[:, -1], returns).sum()

    key = (seed, "progress_epoch")
    report = fitting.fit(model, rollouts, loss, lambda one: 1.0, params, micro_tokens, *key, on_step=on_step)
    report.clamped = float(model.head.outside(returns).float().mean())
    model.eval()
    return model, report


def evaluate(model: ProgressEstimator, rollouts: Sequence[Rollout], mean: float, micro_tokens: int) -> dict[str, float]:
    """Errors of the summed contributions on held-out returns. `mean`: the training returns' mean, whose error is `baseline_mse`;
    `explained_variance`: 1 - mse / baseline_mse."""
    device = next(model.parameters()).device
    errors, constant, spread, turns = 0.0, 0.0, 0.0, 0
    for run in fitting.token_batches(sorted(rollouts, key=lambda one: one.width), micro_tokens):
        token_ids, ends, returns = _tensors(run, device)
        contributions = model.contributions(token_ids, ends)
        errors += float((contributions.sum(1) - returns).square().sum())
        constant += float((returns - mean).square().sum())
        spread += float(contributions.abs().sum())
        turns += int((ends >= 0).sum())
    count = max(1, len(rollouts))
    return {
        "mse": errors / count,
        "baseline_mse": constant / count,
        "explained_variance": 1.0 - errors / constant if constant > 0 else 0.0,
        "mean_abs_contribution": spread / max(1, turns),
    }
