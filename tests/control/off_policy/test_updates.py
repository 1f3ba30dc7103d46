"""The flat optimiser beside torch's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from stages.control.off_policy.updates import FlatAdam


def networks() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 17), nn.Tanh(), nn.Linear(17, 1)), nn.Linear(3, 1)


def losses(value: nn.Module, policy: nn.Module, updates: int) -> Iterator[tuple[Tensor, bool]]:
    """Of random batches; every other one is of both networks, the others of the first alone."""
    generator = torch.Generator().manual_seed(0)
    for number in range(updates):
        seen = torch.randn(8, 3, generator=generator)
        loss = (value(seen) - seen.sum(1, keepdim=True)).square().mean()
        both = number % 2 == 0
        yield (loss + policy(seen).exp().mean() if both else loss), both


@pytest.mark.parametrize("options", [{}, {"largest_norm": 0.1}, {"weight_decay": 0.1}, {"epsilon": 1e-5}])
def test_updates_are_those_of_adam(options: dict[str, float]) -> None:
    """Also that of the norm's limit, which holds for each group, and of a group that a loss leaves out."""
    ours = networks()
    theirs = copy.deepcopy(ours)
    flat = FlatAdam(*(one.parameters() for one in ours), learning_rate=1e-2, **options)
    rest = {"eps": options.get("epsilon", 1e-8), "weight_decay": options.get("weight_decay", 0.0)}
    plain = [torch.optim.Adam(one.parameters(), lr=1e-2, **rest) for one in theirs]
    for (loss, _), (other, both) in zip(losses(*ours, 20), losses(*theirs, 20), strict=True):
        flat.descend(loss)
        for optimiser in plain:
            optimiser.zero_grad()
        other.backward()
        for network, optimiser in list(zip(theirs, plain, strict=True))[: 2 if both else 1]:
            if "largest_norm" in options:
                nn.utils.clip_grad_norm_(network.parameters(), options["largest_norm"])
            optimiser.step()
    for mine, one in zip(ours, theirs, strict=True):
        for parameter, other in zip(mine.parameters(), one.parameters(), strict=True):
            assert torch.allclose(parameter, other, atol=1e-6)


def test_moments_without_gradient_end_at_zero() -> None:
    """A weight without gradient has moments that fall to 0, not to the smallest denormal number."""
    weights = nn.Parameter(torch.ones(40))
    optimiser = FlatAdam([weights], learning_rate=1e-3)
    used = torch.ones(40)
    for number in range(1200):
        used[:20] = 1.0 if number == 0 else 0.0
        optimiser.descend((weights * used).sum())
    mean = optimiser.moments[0][0]
    assert (mean[:20] == 0.0).all()
    assert (mean[20:] > 0.9).all()
    assert float(torch.tensor(1e-30) * 1e-10) > 0.0, "other code computes with denormal numbers as before"


def test_a_parameter_that_is_not_used_stays() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    FlatAdam([first, second], learning_rate=0.1).descend(first.sum())
    assert torch.allclose(first, torch.full((2,), 0.9))
    assert (second == 1.0).all()
