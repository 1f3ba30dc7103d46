"""The flat optimiser beside torch's own."""

from __future__ import annotations

import copy
import subprocess
import sys
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


@pytest.mark.parametrize("options", [{}, {"largest_norm": 0.1}, {"largest_norm": 1e3}, {"weight_decay": 0.1}, {"epsilon": 1e-5}])
def test_updates_are_those_of_adam(options: dict[str, float]) -> None:
    """Also with a limit of each group's norm, and for a group that a loss leaves out."""
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


def test_decoupled_decay_is_that_of_adamw() -> None:
    ours, _ = networks()
    theirs = copy.deepcopy(ours)
    flat = FlatAdam(ours.parameters(), learning_rate=1e-2, weight_decay=0.1, decoupled=True)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2, weight_decay=0.1)
    seen = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        flat.descend((ours(seen) - 1.0).square().mean())
        plain.zero_grad()
        (theirs(seen) - 1.0).square().mean().backward()
        plain.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, atol=1e-6)


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


def test_a_parameter_without_gradient_in_a_group_with_one_has_gradient_zero() -> None:
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimiser = FlatAdam([first, second], learning_rate=0.1)
    optimiser.descend(first.sum())
    assert torch.allclose(first, torch.full((2,), 0.9))
    assert (second == 1.0).all()
    optimiser.descend(second.sum())
    assert (first < 0.9).all(), "the mean of its gradients still moves it"


@pytest.mark.parametrize("threads", [1, 2])
def test_other_threads_compute_with_denormal_numbers(threads: int) -> None:
    """Also those that begin with the first update: checked in a process of its own."""
    code = (
        f"import torch; torch.set_num_threads({threads}); from stages.control.off_policy.updates import FlatAdam; "
        "weights = torch.nn.Parameter(torch.ones(70_000)); FlatAdam([weights], learning_rate=0.1).descend(weights.sum()); "
        f"torch.set_num_threads(2); print(int((torch.full((400_000,), 1e-30) * 1e-10 == 0).sum()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "0\n"


def test_moments_of_other_parameters_are_refused() -> None:
    small, large = (FlatAdam([nn.Parameter(torch.ones(size))], learning_rate=0.1) for size in (3, 5))
    with pytest.raises(RuntimeError, match="size of tensor"):
        large.load_state_dict(small.state_dict())


def test_a_copy_of_an_agent_does_not_stop_learning_silently() -> None:
    network = nn.Linear(3, 1)
    network.optimiser = FlatAdam(network.parameters(), learning_rate=0.1)
    other = copy.deepcopy(network)
    with pytest.raises(RuntimeError, match="make a new optimiser"):
        other.optimiser.descend(other(torch.ones(1, 3)).sum())
