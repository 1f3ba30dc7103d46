"""Fits Q-models (stages/values/q_model.py) to pairs and labels of search trees, and evaluates them on held-out trees."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from stages.agent.logprobs import States, states_at
from stages.agent.shared_prefixes import fastest_states
from stages.annotation.decisions import Decision, Rows
from stages.engine.attention import use_attention
from stages.seeding import seed_torch
from stages.values import fitting
from stages.values.conservative import conservative
from stages.values.fitting import FitReport
from stages.values.pessimism import disagreement, similarity
from stages.values.q_model import ActionScorer, PreferenceQ, RegressionQ
from stages.values.settings import QModel
from stages.values.step_value import StepValueModel


def preference_loss(win: Tensor, lose: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta (h_w - h_l)), [P], of log-ratios of winners and losers [P] each."""
    return -logsigmoid(beta * (win - lose))


def logprobs(model: PreferenceQ, of: Any, pairs: Sequence[Decision], states: States) -> Tensor:
    """Log-probabilities [P, 2] of winners and losers under `of`: the model's policy or its reference."""
    rows = Rows.of(pairs)
    return model.logprobs(of, rows.token_ids, rows.mask, states).reshape(-1, 2)


def fit_preferences(
    policy: Any,
    pairs: Sequence[Decision],
    params: QModel,
    seed: int,
    micro_tokens: int,
    on_step: Callable[[int, int, float], None] | None = None,
) -> tuple[PreferenceQ, FitReport]:
    """A copy of `policy` (a causal LM) trained on the pairs; a pair's weight is the sum of its sides' weights."""
    seed_torch(seed, "q_model")
    reference = copy.deepcopy(policy).float().eval().requires_grad_(False)
    use_attention(reference, "sdpa")
    model = PreferenceQ(copy.deepcopy(reference).requires_grad_(True), reference, params)
    states = fastest_states(reference)
    # The frozen reference's log-probabilities are computed once.
    reference_logprobs: dict[int, Tensor] = {}
    with torch.no_grad():
        for run in fitting.token_batches(sorted(pairs, key=lambda pair: pair.width), micro_tokens):
            for pair, both in zip(run, logprobs(model, reference, run, states), strict=True):
                reference_logprobs[id(pair)] = both

    def loss(run: Sequence[Decision]) -> Tensor:
        h = logprobs(model, model.policy, run, states) - torch.stack([reference_logprobs[id(pair)] for pair in run])
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
    """A copy of `backbone` (no output layer) with a head trained on each action's q, weighted by `weight`, plus
    `params.conservative` times each decision's CQL regulariser. The data's action probabilities are proportional to `weight`. The
    loss of an ensemble is its members' mean, since they share the backbone."""
    seed_torch(seed, "q_model")
    own = copy.deepcopy(backbone).float()
    use_attention(own, "sdpa")
    values = StepValueModel(own, params.head)
    values.to(next(backbone.parameters()).device)
    device = next(values.parameters()).device
    targets = torch.tensor([q for decision in decisions for q in decision.q], device=device)
    weights = torch.tensor([weight for decision in decisions for weight in decision.weight], device=device)
    values.start_at(targets, weights)
    model = RegressionQ(values, params)
    if params.ensemble is not None:
        model.start_apart(seed)
    model.train()
    states = fastest_states(own)

    def loss(run: Sequence[Decision]) -> Tensor:
        rows = Rows.of(run)
        hidden = states_at(states, own, rows.token_ids.to(device), rows.last[:, None].to(device))[:, 0].float()
        logits = model.member_logits(hidden)
        target = torch.tensor([q for decision in run for q in decision.q], device=device)
        weight = torch.tensor([weight for decision in run for weight in decision.weight], device=device)
        total = (values.head.loss(logits, target.expand(logits.shape[:-1])) * weight).sum() / len(logits)
        if params.conservative:
            q = torch.split(values.head.decode(logits), [decision.rows for decision in run], dim=1)
            penalties = []
            for decision, one in zip(run, q, strict=True):
                share = torch.tensor(decision.weight, device=device) / decision.total
                penalties.append(decision.total * conservative(one, share.expand(one.shape)).mean())
            total = total + params.conservative * torch.stack(penalties).sum()
        if params.ensemble is not None and params.ensemble.diversity:
            total = total + params.ensemble.diversity * sum(one.total for one in run) * _likeness(model, hidden)
        return total

    key = (seed, "q_epoch")
    report = fitting.fit(model, decisions, loss, lambda one: one.total, params, micro_tokens, *key, on_step=on_step)
    report.clamped = float(values.head.outside(targets).float().mean())
    return model.eval(), report


def _likeness(model: RegressionQ, hidden: Tensor) -> Tensor:
    """EDAC's similarity of the members' gradients by the hidden states [R, D], which keep theirs out of it."""
    at = hidden.detach().expand(len(model.members), -1, -1).clone().requires_grad_()
    logits = torch.stack([member(own) for member, own in zip(model.members, at, strict=True)])
    (slopes,) = torch.autograd.grad(model.model.head.decode(logits).sum(), at, create_graph=True)
    return similarity(slopes)


def disagreements(model: RegressionQ, decisions: Sequence[Decision]) -> float:
    """Mean standard deviation of the members' values over all actions."""
    spreads = [disagreement(model.member_scores(one.history, one.actions)) for one in decisions]
    return float(torch.cat(spreads).mean()) if spreads else 0.0


def evaluate(model: ActionScorer, decisions: Sequence[Decision], margin: float) -> dict[str, float]:
    """Ranking quality over all pairs of actions of one decision whose q differ, by at least `margin`: the number of `pairs`,
    `accuracy` (ties count half), and `correlation` of score differences with q differences."""
    right = 0.0
    score_differences, q_differences = [], []
    for decision in decisions:
        if decision.rows < 2:
            continue
        scores = model.scores(decision.history, decision.actions).tolist()
        for better in range(decision.rows):
            for worse in range(decision.rows):
                difference = decision.q[better] - decision.q[worse]
                if difference <= 0 or difference < margin:
                    continue
                score_differences.append(scores[better] - scores[worse])
                q_differences.append(difference)
                right += 0.5 if score_differences[-1] == 0 else float(score_differences[-1] > 0)
    count = len(q_differences)
    correlation = _correlation(score_differences, q_differences)
    return {"pairs": count, "accuracy": right / count if count else 0.0, "correlation": correlation}


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's over differences and their negatives (the order of a pair is arbitrary); 0 if either is constant."""
    a, b = torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)
    scale = float((a.square().sum() * b.square().sum()).sqrt())
    return float((a * b).sum()) / scale if scale > 0 else 0.0
