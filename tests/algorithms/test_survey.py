"""A2C, best-of-N, RWR, UNA and DRO against hand-computed numbers; every option of the survey takes a step."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from stages.algorithms.algorithm import Algorithm, resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.methods.dro import examples
from stages.algorithms.parts.advantage import GreedyReturns
from stages.algorithms.parts.loss import denominators
from stages.algorithms.parts.preference import LOSSES, PairScores
from stages.algorithms.registry import composition, names
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError

ON_POLICY = (
    *("reinforce", "a2c", "ppo", "remax", "rloo", "reinforce_pp", "reinforce_pp_baseline"),
    *("grpo", "dr_grpo", "dapo", "gspo", "gpg", "opo"),
)
PREFERENCE = ("dpo", "cdpo", "robust_dpo", "ipo", "kto", "orpo", "simpo", "cpo", "slic", "una", "dro", "sppo")
OPTIONS: list[dict[str, Any]] = [
    *({"algorithm": name} for name in (*ON_POLICY, "bon_sft", "rwr")),
    *({"loss": {"kl_coef": 0.001, "kl_estimator": kind}} for kind in ("k1", "k2", "k3")),
    *({"reward": {"kl_coef": 0.001, "kl_estimator": kind}} for kind in ("k1", "k2", "k3")),
    *({"loss": {"aggregation": kind}} for kind in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")),
    {"advantage": {"ddof": 1}},
]
"""The survey's algorithms, KL terms, aggregations and standard deviations."""
LENGTHS = [2, 3, 4, 1]
REWARDS = [1.0, 0.0, 0.5, 1.0]


def prepared(make_batch, section: dict[str, Any]) -> tuple[Algorithm, TrajectoryBatch]:
    """An algorithm and its batch of two prompts with two episodes each."""
    algorithm = resolve(Rl.model_validate({"group_size": 2, "tasks_per_step": 2, **section}), 8)
    batch = make_batch([REWARDS[:2], REWARDS[2:]], lengths=LENGTHS)
    batch = batch.with_(logprobs_ref=batch.logprobs_old - 0.05 * batch.mask).with_extra(
        GreedyReturns(torch.tensor([0.0, 0.0, 1.0, 1.0]))
    )
    if algorithm.needs_critic:
        batch = batch.with_(values=torch.full(batch.mask.shape, 0.25) * batch.mask)
    return algorithm, algorithm.prepare(algorithm.resample(algorithm.shape(batch), "key"))


def loss_of(make_batch, name: str, **section: Any) -> tuple[float, np.ndarray]:
    """The loss with an entropy of 0.7 on every policy token, and log pi of the policy tokens."""
    algorithm, batch = prepared(make_batch, {"algorithm": name, **section})
    logprobs = (batch.logprobs_old + 0.1) * batch.mask
    total = denominators(batch, float(algorithm.rl.loss.constant_length or 8))
    loss = algorithm.loss(logprobs, 0.7 * batch.mask, batch, total).loss
    return float(loss), logprobs[batch.mask].double().numpy()


def by_token(values: list[float]) -> np.ndarray:
    return np.concatenate([np.full(length, value) for length, value in zip(LENGTHS, values, strict=True)])


@pytest.mark.parametrize("section", OPTIONS, ids=str)
def test_every_survey_option_takes_a_step(make_batch, section: dict[str, Any]) -> None:
    """A finite loss and a non-zero gradient on two prompts."""
    algorithm, batch = prepared(make_batch, section)
    logprobs = batch.logprobs_old.clone().requires_grad_()
    terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    assert torch.isfinite(terms.loss)
    assert gradient.abs().sum() > 0


def test_every_survey_preference_loss_exists() -> None:
    own = {name for name in names() if composition(name).data == "pairs"}
    assert set(PREFERENCE) <= own | set(LOSSES)


@pytest.mark.parametrize(
    "section",
    [
        {"loss": {"kl_estimator": "k4", "kl_coef": 0.1}},
        {"loss": {"aggregation": "mean"}},
        {"advantage": {"ddof": 2}},
        {"preference": {"loss": "bpo"}},
        {"reward": {"kind": "orm"}},
    ],
    ids=str,
)
def test_unknown_option_is_rejected(section: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Rl.model_validate(section)


def test_a2c_loss(make_batch) -> None:
    """-(G - V) log pi - 0.01 H, token mean: V = 0.25, H = 0.7. Without entropy and with V = 0: REINFORCE without baseline."""
    loss, log = loss_of(make_batch, "a2c")
    assert loss == pytest.approx(float((-by_token([value - 0.25 for value in REWARDS]) * log).mean()) - 0.007, abs=1e-5)
    algorithm, batch = prepared(make_batch, {"algorithm": "a2c", "loss": {"entropy_coef": 0.0}})
    assert algorithm.needs_critic
    assert batch.returns is not None
    assert batch.returns[batch.mask].tolist() == by_token(REWARDS).tolist()
    bare = algorithm.prepare(batch.with_(values=torch.zeros(batch.mask.shape))).advantages
    plain = resolve(Rl(algorithm="reinforce", group_size=2, advantage={"mean": "none"})).prepare(batch).advantages
    assert bare is not None
    assert plain is not None
    torch.testing.assert_close(bare, plain)


def test_best_of_n_loss(make_batch) -> None:
    """Of the returns 1, 0, 0.5 and 1 the first and the last are trained on: the mean over their 3 tokens of -log pi."""
    loss, log = loss_of(make_batch, "bon_sft")
    assert loss == pytest.approx(-float(np.concatenate([log[:2], log[-1:]]).mean()), abs=1e-5)
    loss, log = loss_of(make_batch, "bon_sft", settings={"threshold": 0.5})
    assert loss == pytest.approx(-float(np.concatenate([log[:2], log[5:]]).mean()), abs=1e-5)
    best, log = loss_of(make_batch, "bon_sft", settings={"threshold": 0.5, "keep": "best"})
    assert best == pytest.approx(-float(np.concatenate([log[:2], log[-1:]]).mean()), abs=1e-5)
    algorithm, batch = prepared(make_batch, {"algorithm": "bon_sft", "settings": {"threshold": 2.0}})
    assert batch.metrics == {"kept": 0.0, "skipped": 1.0}
    assert algorithm.forward_rows(batch).tolist() == []


def test_best_of_n_with_binary_returns_is_scaled_reinforce(make_batch) -> None:
    """Up to tokens / tokens of successes: 10 / (2 + 3)."""
    batch, losses = make_batch([[1, 1], [0, 0]], lengths=LENGTHS), []
    for section in ({"algorithm": "bon_sft"}, {"algorithm": "reinforce", "advantage": {"mean": "none"}}):
        algorithm = resolve(Rl.model_validate({"group_size": 2, **section}))
        ready = algorithm.prepare(algorithm.resample(batch))
        losses.append(
            float(algorithm.loss(batch.logprobs_old, torch.zeros(batch.mask.shape), ready, denominators(ready, 8.0)).loss)
        )
    assert losses[0] == pytest.approx(losses[1] * 10 / 5, rel=1e-6)


def test_reward_weighted_regression_loss(make_batch) -> None:
    """w = exp(R / 0.5) over its mean, over all four episodes or over the two of a group."""
    raw = np.exp(np.array(REWARDS) / 0.5)
    loss, log = loss_of(make_batch, "rwr")
    assert loss == pytest.approx(float((-by_token(list(raw / raw.mean())) * log).mean()), abs=1e-5)
    within = (raw.reshape(2, 2) / raw.reshape(2, 2).mean(1, keepdims=True)).ravel()
    loss, log = loss_of(make_batch, "rwr", settings={"over": "group"})
    assert loss == pytest.approx(float((-by_token(list(within)) * log).mean()), abs=1e-5)
    flat, log = loss_of(make_batch, "rwr", settings={"beta": 1e9})
    assert flat == pytest.approx(-float(log.mean()), abs=1e-5)
    sharp, log = loss_of(make_batch, "rwr", settings={"beta": 1e-3})
    best = np.concatenate([log[:2], log[-1:]])
    assert sharp == pytest.approx(-float(best.sum()) * 2 / len(log), abs=1e-5), "two of four episodes share all the weight"
    with pytest.raises(ParamsError, match=r"rl\.group_size is 1"):
        resolve(Rl(algorithm="rwr", group_size=1, settings={"over": "group"}))


def pairs(win: list[float], lose: list[float], values: tuple[float, float] = (1.0, 0.0)) -> PairScores:
    """Pairs with these log-ratios h; the reference log-probs are -1."""
    h = [torch.tensor(side, dtype=torch.float64, requires_grad=True) for side in (win, lose)]
    zeros, ones = torch.zeros(len(win), dtype=torch.float64), torch.ones(len(win))
    worth = [torch.full((len(win),), value, dtype=torch.float64) for value in values]
    return PairScores(h[0] - 1, h[1] - 1, zeros - 1, zeros - 1, ones, ones, *worth)


def own_loss(name: str, scores: PairScores, **settings: Any) -> torch.Tensor:
    method = resolve(Rl(algorithm=name, settings=settings, preference={"beta": 0.5}))
    return method.method.pieces["preference"](scores, method.rl)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_una_loss() -> None:
    """beta 0.5, h = 2 and -1, z = 1 and 0.25: mse ((1 - 1)^2 + (-0.5 - 0.25)^2) / 2 = 0.28125; bce and logistic by hand."""
    scores = pairs([2.0], [-1.0], (1.0, 0.25))
    assert own_loss("una", scores).item() == pytest.approx(0.28125)
    bce = (-math.log(sigma(1.0)) - 0.25 * math.log(sigma(-0.5)) - 0.75 * math.log(sigma(0.5))) / 2
    assert own_loss("una", scores, distance="bce").item() == pytest.approx(bce)
    assert own_loss("una", scores, distance="logistic").item() == pytest.approx(-math.log(sigma(1.5)))
    assert own_loss("una", pairs([0.0], [0.0]), distance="bce").item() == pytest.approx(math.log(2))
    params = resolve(Rl(algorithm="dpo", preference={"beta": 0.5})).rl.preference
    torch.testing.assert_close(own_loss("una", scores, distance="logistic"), LOSSES["dpo"](scores, params))


def test_dro_loss() -> None:
    """0.5 (R - V - tau h)^2: R 1, V 0.4, tau 0.5, h 0.2: 0.125. With the optimal V a pair's loss is (dR - tau D)^2 / 8."""
    one = [torch.tensor([value]) for value in (0.2, 1.0, 0.4)]
    assert examples(*one, tau=0.5).item() == pytest.approx(0.125)
    scores = pairs([2.0, 0.3], [-1.0, 0.7], (1.0, 0.25))
    difference = torch.tensor([3.0, -0.4], dtype=torch.float64)
    torch.testing.assert_close(own_loss("dro", scores), (0.75 - 0.5 * difference) ** 2 / 8)
    gradients = torch.autograd.grad(own_loss("dro", scores).sum(), (scores.win, scores.lose))
    torch.testing.assert_close(gradients[0], -0.5 * (0.75 - 0.5 * difference) / 4)
    torch.testing.assert_close(gradients[1], -gradients[0])
    assert own_loss("dro", pairs([1.0], [-1.0])).item() == pytest.approx(0.0), "D = 1 / tau"
