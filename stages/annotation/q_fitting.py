"""Fits Q-models (stages/values/q_model.py) to pairs and labels of search trees, and judges them on held-out trees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from stages.annotation.decisions import Decision, Rows
from stages.engine.attention import use_attention
from stages.seeding import seed_torch
from stages.values import fitting
from stages.values.conservative import conservative
from stages.values.fitting import FitReport
from stages.values.q_model import ActionScorer, PreferenceQ, RegressionQ
from stages.values.settings import QModel
from stages.values.step_value import StepValueModel


def preference_loss(win: Tensor, lose: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (h_w - h_l)), [P], of log-ratios of winners and losers [P] each."""
    return -logsigmoid(beta * (win - lose))


def logprobs(model: PreferenceQ, of: Any, pairs: Sequence[Decision]) -> Tensor:
    """Log-probabilities [P, 2] of winners and losers under `of`, the model's policy or its reference."""
    rows = Rows.of(pairs)
    return model.logprobs(of, rows.token_ids, rows.mask).reshape(-1, 2)


def fit_preferences(
    policy: Any,
    pairs: Sequence[Decision],
    params: QModel,
    seed: int,
    micro_tokens: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> tuple[PreferenceQ, FitReport]:
    """A copy of `policy` (a causal LM) that has learnt the pairs, each weighing what its sides weigh together."""
    seed_torch(seed, "q_model")
    reference = copy.deepcopy(policy).float().eval().requires_grad_(False)
    use_attention(reference, "sdpa")
    model = PreferenceQ(copy.deepcopy(reference).requires_grad_(True), reference, params)
    # The reference never changes: what it says of a pair is computed once.
    known: dict[int, Tensor] = {}
    with torch.no_grad():
        for run in fitting.within(sorted(pairs, key=lambda pair: pair.width), micro_tokens):
            for pair, both in zip(run, logprobs(model, reference, run), strict=True):
                known[id(pair)] = both

    def loss(run: Sequence[Decision]) -> Tensor:
        h = logprobs(model, model.policy, run) - torch.stack([known[id(pair)] for pair in run])
        weight = torch.tensor([pair.total for pair in run], device=h.device)
        return (preference_loss(h[:, 0], h[:, 1], params.beta) * weight).sum()

    key = (seed, "q_epoch")
    report = fitting.fit(model, pairs, loss, lambda pair: pair.total, params, micro_tokens, *key, on_step=on_step)
    return model.eval(), report


def fit_regression(
    backbone: Any,
    decisions: Sequence[Decision],
    params: QModel,
    seed: int,
    micro_tokens: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> tuple[RegressionQ, FitReport]:
    """A copy of `backbone` (no output layer) with a head that has learnt q of each action, weighted by `weight`, with
    `params.conservative` times the conservative regulariser of each decision beside it. The data's action probabilities are the
    shares of `weight`."""
    seed_torch(seed, "q_model")
    own = copy.deepcopy(backbone).float()
    use_attention(own, "sdpa")
    values = StepValueModel(own, params.head)
    values.to(next(backbone.parameters()).device)
    model = RegressionQ(values, params)
    device = next(values.parameters()).device
    targets = torch.tensor([q for decision in decisions for q in decision.q], device=device)
    weights = torch.tensor([weight for decision in decisions for weight in decision.weight], device=device)
    values.start_at(targets, weights)
    values.train()

    def loss(run: Sequence[Decision]) -> Tensor:
        rows = Rows.of(run)
        logits = values.logits(rows.token_ids.to(device), rows.last[:, None].to(device))[:, 0]
        target = torch.tensor([q for decision in run for q in decision.q], device=device)
        weight = torch.tensor([weight for decision in run for weight in decision.weight], device=device)
        total = (values.head.loss(logits, target) * weight).sum()
        if params.conservative:
            q = torch.split(values.head.decode(logits), [decision.rows for decision in run])
            data = (torch.tensor(decision.weight, device=device) / decision.total for decision in run)
            held = [decision.total * conservative(one, share) for decision, one, share in zip(run, q, data, strict=True)]
            total = total + params.conservative * torch.stack(held).sum()
        return total

    key = (seed, "q_epoch")
    report = fitting.fit(values, decisions, loss, lambda one: one.total, params, micro_tokens, *key, on_step=on_step)
    report.clamped = float(values.head.outside(targets).float().mean())
    return model.eval(), report


def evaluate(model: ActionScorer, decisions: Sequence[Decision], margin: float) -> dict[str, float]:
    """How well scores order actions: over all pairs of actions of one decision whose q differ by at least `margin` (and at all),
    `accuracy` (ties count half) and `correlation` of the scores' differences with those of q; `pairs` of them."""
    right, count = 0.0, 0
    scores_by, q_by = [], []
    for decision in decisions:
        if decision.rows < 2:
            continue
        scores = model.scores(decision.history, decision.actions).tolist()
        for better in range(decision.rows):
            for worse in range(decision.rows):
                difference = decision.q[better] - decision.q[worse]
                if difference <= 0 or difference < margin:
                    continue
                apart = scores[better] - scores[worse]
                right += 0.5 if apart == 0 else float(apart > 0)
                count += 1
                scores_by.append(apart)
                q_by.append(difference)
    return {"pairs": count, "accuracy": right / count if count else 0.0, "correlation": _correlation(scores_by, q_by)}


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's over differences and their negatives (which pair is called better is arbitrary); 0 where one does not vary."""
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale > 0 else 0.0
