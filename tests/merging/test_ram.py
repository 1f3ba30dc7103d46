import pytest
import torch
from by_hand import assert_near

from stages.merging.methods.ram import RamOptions as Ram
from stages.merging.methods.ram import enlargement, overlap_counts
from stages.merging.registry import get_merger
from stages.merging.streaming import tensor_generator

from .helpers import bound, merge

A = [0.4, 0.0, 0.2, 0.0, 0.1, 0.0]
B = [0.2, 0.6, 0.0, 0.0, -0.3, 0.0]
C = [0.0, 0.0, 0.0, 0.0, 0.5, 0.0]


def test_ram_by_hand() -> None:
    """Contract: RAM averages an entry over the models that changed it; the linear mean divides by all models."""
    assert_near(merge("ram", [A, B, C]), [0.3, 0.6, 0.2, 0.0, 0.1, 0.0])
    torch.testing.assert_close(merge("linear", [A, B, C]), torch.tensor([0.2, 0.2, 0.0667, 0.0, 0.1, 0.0]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize(
    ("r", "alpha", "expected"),
    [(0.2, 1.0, [0.3, 0.72, 0.24, 0.0, -0.1, 0.0]), (0.1, 0.2, [0.3, 0.612, 0.204, 0.0, -0.1, 0.0])],
)
def test_ram_plus_by_hand(scope: str, r: float, alpha: float, expected: list[float]) -> None:
    """Contract: rho = 2 for both; unique entries are enlarged by 1 + r clip(rho, 0, alpha)."""
    assert_near(merge("ram_plus", [A, B], ram=Ram(r=r, alpha=alpha, scope=scope)), expected)


def test_ram_plus_with_r_zero_is_ram() -> None:
    """Contract: r = 0 equals RAM."""
    assert torch.equal(merge("ram_plus", [A, B, C], ram=Ram(r=0.0)), merge("ram", [A, B, C]))


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
@pytest.mark.parametrize("models", [[A], [[1.0, 0.0, 0.0], [0.0, -2.0, 0.0]]])
def test_ram_without_overlap_is_task_arithmetic(method: str, models: list[list[float]]) -> None:
    """Contract: without shared entries nothing is averaged or enlarged."""
    assert_near(merge(method, models), merge("task_arithmetic", models))


@pytest.mark.parametrize("method", ["ram", "ram_plus"])
def test_ram_with_full_overlap_is_the_mean(method: str) -> None:
    """Contract: full overlap gives the mean of deltas, without a division by zero."""
    models = list(torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)) + 0.1)
    torch.testing.assert_close(merge(method, models), merge("linear", models))


def test_enlargement_without_unique_or_changed_entries_is_one() -> None:
    """Contract: a model without unique entries, or without any change, has l = 1."""
    assert enlargement(torch.tensor([5, 0, 1]), torch.tensor([0, 0, 4]), r=0.4, alpha=1.0) == [1.0, 1.0, 1.1]


def test_changes_up_to_eps_are_dropped() -> None:
    """Contract: |t| > eps is strict; smaller changes are dropped, not averaged in."""
    got = merge("ram", [[0.5, 0.25], [0.25, 1.0]], ram=Ram(eps=0.25))
    assert got.tolist() == [0.5, 1.0]


def test_global_counts_differ_from_tensor_counts() -> None:
    """Contract: global counts enlarge a tensor without overlap by the overlap in other tensors; tensor counts do not."""
    merger = get_merger("ram_plus")
    names = {"shared": (torch.ones(2), torch.ones(2)), "own": (torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0]))}
    expected = {"global": 1.2, "tensor": 1.0}
    for scope, value in expected.items():
        params = bound("ram_plus", 2, ram=Ram(r=0.2, alpha=1.0, scope=scope))
        totals = None
        for name, pair in names.items():
            found = merger.scan(name, torch.zeros(2), pair, params)
            if found is not None:
                totals = {key: totals[key] + found[key] for key in found} if totals else dict(found)
        got = merger.merge_tensor("own", torch.zeros(2), names["own"], params, tensor_generator(0, "ram_plus", "own"), totals)
        assert got.tolist() == pytest.approx([value, 0.0])


def test_weights_and_lam_scale_the_changes() -> None:
    """Contract: weights multiply the models' changes and lam the whole delta; the mask is taken before weighing."""
    got = merge("ram", [[2.0, 0.0], [4.0, 1.0]], base=[0.0, 0.0], weights=(1.0, 0.5), lam=2.0)
    assert_near(got, [2.0 * (2.0 + 2.0) / 2, 2.0 * 0.5])


def test_counts_of_a_scalar_tensor() -> None:
    """Contract: tensors without dimensions are counted like any other."""
    shared, unique = overlap_counts(torch.tensor([True, True, False]))
    assert (shared.tolist(), unique.tolist()) == ([1, 1, 0], [0, 0, 0])
