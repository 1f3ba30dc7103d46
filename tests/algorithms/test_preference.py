"""Preference losses against hand-computed numbers and numpy."""

from __future__ import annotations

import math
from typing import get_args

import numpy as np
import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.preference import LOSSES, PairScores, Preference, kto_examples, log_odds, margin
from stages.algorithms.registry import composition, names
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError


def pairs(
    win: float, lose: float, ref_win: float = 0.0, ref_lose: float = 0.0, tokens: tuple[int, int] = (1, 1), z0: float = 0.0
):
    values = (torch.tensor([value], dtype=torch.float64) for value in (win, lose, ref_win, ref_lose))
    return PairScores(*values, torch.tensor([tokens[0]]), torch.tensor([tokens[1]]), torch.ones(1), torch.zeros(1), z0)


def with_difference(difference: float) -> PairScores:
    """D = difference, from four log-probabilities."""
    return pairs(-3.0, -4.0, -3.0 - difference / 2, -4.0 + difference / 2)


def value(name: str, scores: PairScores, **params: float | bool) -> float:
    return LOSSES[name](scores, Preference.model_validate(params)).item()


def test_dpo_loss() -> None:
    """D = 0: 0.6931; beta 0.1, D = 10: 0.3133."""
    assert value("dpo", with_difference(0.0), beta=0.1) == pytest.approx(0.6931, abs=1e-4)
    assert value("dpo", with_difference(10.0), beta=0.1) == pytest.approx(0.3133, abs=1e-4)


def test_ipo_loss() -> None:
    """beta 0.1: D = 5: 0, D = 0: 25. Sum or mean over tokens: log-ratios 6 over 2 tokens and 0 differ by 6 or 3."""
    assert value("ipo", with_difference(5.0), beta=0.1) == pytest.approx(0.0, abs=1e-9)
    assert value("ipo", with_difference(0.0), beta=0.1) == pytest.approx(25.0)
    scores = pairs(6.0, 0.0, tokens=(2, 1))
    assert value("ipo", scores, beta=0.1) == pytest.approx(1.0)
    assert value("ipo", scores, beta=0.1, length_normalise=True) == pytest.approx(4.0)


def test_slic_hinge_loss() -> None:
    """beta D = 1: 0."""
    assert value("slic", with_difference(10.0), beta=0.1) == pytest.approx(0.0, abs=1e-9)
    assert value("slic", with_difference(4.0), beta=0.1) == pytest.approx(0.6)


def test_simpo_loss() -> None:
    """Mean log-probs -1 and -2, beta 2, gamma 1: 0.3133 for any lengths."""
    for tokens in ((1, 1), (3, 7)):
        scores = pairs(-1.0 * tokens[0], -2.0 * tokens[1], tokens=tokens)
        assert value("simpo", scores, beta=2.0, gamma=1.0) == pytest.approx(0.3133, abs=1e-4)


def test_orpo_loss() -> None:
    """Odds term of p 0.5 and 0.25: ln(4/3) = 0.2877, plus the winner's NLL; finite at p = 1."""
    scores = pairs(math.log(0.5), math.log(0.25))
    assert value("orpo", scores, beta=1.0, nll_coef=0.0) == pytest.approx(0.2877, abs=1e-4)
    assert value("orpo", scores, beta=1.0, nll_coef=1.0) == pytest.approx(0.2877 + math.log(2), abs=1e-4)
    assert math.isfinite(float(log_odds(torch.tensor(0.0))))


def test_kto_loss() -> None:
    """h = z0: 0.5; examples of one label only still give a loss and a gradient."""
    params = Preference(beta=0.1, desirable=1.0, undesirable=1.0)
    assert value("kto", pairs(-1.0, -1.0, -3.0, -3.0, z0=2.0), beta=0.1, desirable=1.0, undesirable=1.0) == pytest.approx(0.5)
    h = torch.tensor([0.5, -0.3], requires_grad=True)
    for label in (True, False):
        loss = kto_examples(h, torch.full((2,), label), 0.1, params).sum()
        (gradient,) = torch.autograd.grad(loss, h)
        assert torch.isfinite(loss)
        assert bool(((gradient < 0) == label).all())
    weighted = Preference(beta=0.1, desirable=2.0, undesirable=3.0)
    assert kto_examples(torch.zeros(2), torch.tensor([True, False]), 0.0, weighted).tolist() == [1.0, 1.5]


def test_losses_reduce_to_dpo_and_cpo() -> None:
    """cDPO and robust DPO without swapped labels are DPO; SimPO with gamma 0 is CPO without NLL for one token."""
    for difference in (-2.0, 0.0, 3.0):
        plain = value("dpo", with_difference(difference), beta=0.5)
        for name in ("cdpo", "robust_dpo"):
            assert value(name, with_difference(difference), beta=0.5, smoothing=0.0) == pytest.approx(plain)
    assert value("simpo", pairs(-1.0, -2.0), beta=0.7, gamma=0.0) == pytest.approx(
        value("cpo", pairs(-1.0, -2.0), beta=0.7, nll_coef=0.0)
    )


def expected(
    name: str, w: np.ndarray, lose: np.ndarray, rw: np.ndarray, rl: np.ndarray, nw: np.ndarray, nl: np.ndarray
) -> np.ndarray:
    """Each loss in numpy, with beta 0.3, gamma 0.2, smoothing 0.1, z0 0.05, weights 1.2 and 0.8, nll 0.5."""
    b, difference = 0.3, (w - rw) - (lose - rl)

    def sigma(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    pw, pl = np.exp(w / nw), np.exp(lose / nl)
    forms = {
        "dpo": lambda: -np.log(sigma(b * difference)),
        "cdpo": lambda: -0.9 * np.log(sigma(b * difference)) - 0.1 * np.log(sigma(-b * difference)),
        "robust_dpo": lambda: (-0.9 * np.log(sigma(b * difference)) + 0.1 * np.log(sigma(-b * difference))) / 0.8,
        "slic": lambda: np.maximum(0, 1 - b * difference),
        "ipo": lambda: (difference - 1 / (2 * b)) ** 2,
        "kto": lambda: (1.2 * (1 - sigma(b * (w - rw - 0.05))) + 0.8 * (1 - sigma(b * (0.05 - (lose - rl))))) / 2,
        "orpo": lambda: -0.5 * w / nw - b * np.log(sigma(np.log(pw / (1 - pw)) - np.log(pl / (1 - pl)))),
        "simpo": lambda: -np.log(sigma(b * (w / nw - lose / nl) - 0.2)),
        "cpo": lambda: -np.log(sigma(b * (w - lose))) - 0.5 * w / nw,
        "sppo": lambda: (w - rw - 1 / (2 * b)) ** 2 + (lose - rl + 1 / (2 * b)) ** 2,
    }
    return forms[name]()


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_and_gradients_match_numpy(name: str) -> None:
    """Values to 1e-5; gradients by finite differences."""
    rng = np.random.default_rng(0)
    w, lose, rw, rl = (-rng.uniform(0.5, 9.0, 5) for _ in range(4))
    nw, nl = rng.integers(2, 6, 5), rng.integers(2, 6, 5)
    params = Preference(beta=0.3, gamma=0.2, smoothing=0.1, desirable=1.2, undesirable=0.8, nll_coef=0.5, length_normalise=False)
    win, other = (torch.tensor(part, requires_grad=True) for part in (w, lose))
    rest = (torch.tensor(part) for part in (rw, rl, nw, nl))
    ref_win, ref_lose, win_tokens, lose_tokens = rest
    values = torch.ones(5), torch.zeros(5)
    loss = LOSSES[name](PairScores(win, other, ref_win, ref_lose, win_tokens, lose_tokens, *values, 0.05), params)
    np.testing.assert_allclose(loss.detach().numpy(), expected(name, w, lose, rw, rl, nw, nl), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(loss.sum(), (win, other), allow_unused=True)
    step = 1e-5
    for place, part in enumerate((w, lose)):
        shifted = [[w, lose], [w, lose]]
        shifted[0][place], shifted[1][place] = part + step, part - step
        slope = (expected(name, *shifted[0], rw, rl, nw, nl) - expected(name, *shifted[1], rw, rl, nw, nl)) / (2 * step)
        given = gradients[place]
        np.testing.assert_allclose(np.zeros(5) if given is None else given.numpy(), slope, rtol=1e-4, atol=1e-5)


def test_every_loss_can_be_selected() -> None:
    assert {*LOSSES, "own"} == set(get_args(Preference.model_fields["loss"].annotation))
    for name in LOSSES:
        assert resolve(Rl(algorithm="dpo", preference={"loss": name})).rl.preference.loss == name
    for name in names():
        if composition(name).data == "pairs":
            assert resolve(Rl(algorithm=name)).rl.preference.loss in (*LOSSES, "own")


def test_kto_needs_at_least_two_pairs() -> None:
    with pytest.raises(ParamsError, match="at least 2"):
        resolve(Rl(algorithm="kto", preference={"pairs_per_step": 1}))


def test_margin_depends_on_the_loss() -> None:
    scores = pairs(-2.0, -3.0, -1.0, -5.0, tokens=(1, 2))
    assert margin(scores, "dpo").item() == pytest.approx(-3.0)
    assert margin(scores, "simpo").item() == pytest.approx(-0.5)
    assert margin(scores, "cpo").item() == pytest.approx(1.0)
