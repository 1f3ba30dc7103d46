"""How `rl.algorithm` and explicit switches become one algorithm."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from stages.algorithms.aggregation import denominators
from stages.algorithms.compose import _DEFAULTS, resolve
from stages.algorithms.registry import COMPOSITIONS, cards, composition
from stages.params import Rl
from stages.validation import ParamsError


def test_every_name_in_params_has_a_method_and_a_card() -> None:
    assert set(get_args(Rl.model_fields["algorithm"].annotation)) == set(COMPOSITIONS)
    for card in cards():
        assert all(
            getattr(card, name) for name in ("title", "paper", "equation", "assumptions", "reduces_to", "tested_by", "switch")
        )
    with pytest.raises(ValueError, match="grpo"):
        composition("dpo")


@pytest.mark.parametrize("name", sorted(COMPOSITIONS))
def test_null_means_the_algorithms_own_choice(name: str) -> None:
    """Contract: no null is left, each is the composition's part; parts only fill keys that can be null."""
    algorithm = resolve(Rl(algorithm=name))
    assert set(COMPOSITIONS[name].parts) <= set(_DEFAULTS)
    assert algorithm.needs_critic is COMPOSITIONS[name].needs_critic
    for key, default in _DEFAULTS.items():
        section, field = key.split(".")
        assert getattr(getattr(Rl(), section), field) is None
        assert getattr(getattr(algorithm.rl, section), field) == COMPOSITIONS[name].parts.get(key, default)


def test_an_explicit_switch_wins() -> None:
    """lite_ppo's composition: GRPO with the batch's std and the token mean."""
    rl = resolve(Rl(algorithm="grpo", advantage={"std": "batch"}, loss={"aggregation": "token_mean", "clip_high": 0.28})).rl
    assert (rl.advantage.mean, rl.advantage.std, rl.loss.aggregation) == ("group", "batch", "token_mean")
    assert (rl.loss.kind, rl.loss.clip_low, rl.loss.clip_high) == ("ppo_clip", 0.2, 0.28)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algorithm": "ppo", "advantage": {"mean": "group"}}, "estimator group"),
        ({"algorithm": "grpo", "advantage": {"lam": 0.5}}, "estimator gae"),
        ({"algorithm": "reinforce", "loss": {"clip_low": 0.2}}, "ppo_clip"),
        ({"algorithm": "grpo", "sampling": {"top_p": 0.9}}, "top_p 1"),
        ({"algorithm": "grpo", "sampling": {"temperature": 0.0}}, "temperature above 0"),
        ({"algorithm": "reinforce", "group_size": 1, "advantage": {"std": "group"}}, "group_size"),
    ],
)
def test_switches_without_effect_are_refused(values: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl(**values))


@pytest.mark.parametrize("name", sorted(COMPOSITIONS))
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"])
def test_every_switch_runs_a_step(make_batch, name: str, aggregation: str) -> None:
    """survey_taxonomy 8: a finite loss and a non-zero gradient on two prompts."""
    algorithm = resolve(Rl(algorithm=name, group_size=2, loss={"aggregation": aggregation}))
    batch = make_batch([[1, 0], [0, 1]], lengths=[2, 3, 4, 1])
    if algorithm.needs_critic:
        batch = batch.with_(values=torch.full(batch.mask.shape, 0.5) * batch.mask)
    batch = algorithm.prepare(batch)
    logprobs = batch.logprobs_old.clone().requires_grad_()
    terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    assert torch.isfinite(terms.loss)
    assert gradient.abs().sum() > 0
    assert gradient[~batch.mask].abs().sum() == 0
    assert int(terms.sums["tokens"]) == 10


def test_a_kl_term_needs_the_reference(make_batch) -> None:
    algorithm = resolve(Rl(algorithm="grpo", group_size=2, loss={"kl_coef": 0.1}))
    assert algorithm.needs_reference
    batch = algorithm.prepare(make_batch([[1, 0]]))
    with pytest.raises(ValueError, match="reference"):
        algorithm.loss(batch.logprobs_old, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
