import pytest
import torch

from stages.merging.contract import BLOCK
from stages.merging.methods.ties import TiesOptions as Ties
from stages.merging.methods.ties import Trim
from stages.merging.registry import get_merger
from stages.merging.streaming import tensor_generator

from .helpers import bound, merge


def trim(delta: torch.Tensor, density: float) -> torch.Tensor:
    kept = delta.flatten().clone()
    Trim.to_density("x", torch.zeros_like(delta), delta, density).apply(kept, 0)
    return kept.reshape(delta.shape)


T1, T2 = [3.0, -1.0, 0.5, 2.0], [-2.0, -2.0, 0.1, 1.0]


def test_ties_by_hand() -> None:
    """Contract: the paper's worked example, normalised with weight 1 and plain with weight 0.5."""
    assert merge("ties", [T1, T2], density=0.5).tolist() == [3.0, -2.0, 0.0, 2.0]
    assert merge("ties", [T1, T2], density=0.5, weights=(0.5, 0.5), normalize=False).tolist() == [1.5, -1.0, 0.0, 1.0]


def test_ties_averages_over_the_models_that_agree() -> None:
    """Contract: the divisor is the sum of the weights kept at that entry, without zeros and losers of the sign vote."""
    got = merge("ties", [[4.0, 2.0], [2.0, 0.0], [-1.0, 4.0]], density=1.0, weights=(1.0, 3.0, 1.0))
    torch.testing.assert_close(got, torch.tensor([(4.0 + 6.0) / 4.0, (2.0 + 4.0) / 2.0]))


def test_ties_without_conflicts_is_linear() -> None:
    """Contract: density 1, no zeros and no sign conflicts reduce to linear."""
    generator = torch.Generator().manual_seed(0)
    models = [torch.rand(3, 4, generator=generator) + 0.1 for _ in range(3)]
    torch.testing.assert_close(merge("ties", models, density=1.0), merge("linear", models))


def test_trim_keeps_an_exact_number() -> None:
    """Contract: int(density n) entries stay, at least one; of equal magnitudes the earlier; the shape is kept."""
    assert trim(torch.tensor([1.0, -1.0, 1.0, 2.0]), 0.5).tolist() == [1.0, 0.0, 0.0, 2.0]
    assert trim(torch.tensor([5.0]), 0.5).tolist() == [5.0]
    assert int((trim(torch.arange(1.0, 101.0).reshape(10, 10), 0.29) != 0).sum()) == 29
    assert trim(torch.zeros(0, 3), 0.5).shape == (0, 3)


@pytest.mark.parametrize("density", [0.003, 0.5, 0.98])
@pytest.mark.parametrize("levels", [None, 40, 1])
def test_trim_of_large_tensor_matches_stable_sort(density: float, levels: int | None) -> None:
    """Contract: also over several blocks, with many equal magnitudes, and when the sampled entries are unrepresentative."""
    delta = torch.randn(3 * BLOCK + 17, generator=torch.Generator().manual_seed(1))
    if levels:
        delta = (delta * levels).round()
    delta[:: len(delta) // 2**14] = 1e-3
    kept = delta.abs().sort(descending=True, stable=True).indices[: int(density * len(delta))]
    expected = torch.zeros_like(delta)
    expected[kept] = delta[kept]
    assert torch.equal(trim(delta, density), expected)


def test_global_scope_trims_the_flattened_model() -> None:
    """Contract: with ties.scope global a tensor of small changes loses them all to a tensor of large ones."""
    merger, params = get_merger("ties"), bound("ties", 1, density=0.5, ties=Ties(scope="global"))
    tensors = {"large": torch.tensor([4.0, -3.0, 2.0]), "small": torch.tensor([0.1, 0.2, -0.3])}
    totals: dict[str, torch.Tensor] | None = None
    for name, tensor in tensors.items():
        found = merger.scan(name, torch.zeros(3), [tensor], params)
        assert found is not None
        totals = {key: totals[key] + found[key] for key in found} if totals else dict(found)
    merged = {
        name: merger.merge_tensor(name, torch.zeros(3), [tensor], params, tensor_generator(0, "ties", name), totals)
        for name, tensor in tensors.items()
    }
    assert merged["large"].tolist() == [4.0, -3.0, 2.0]
    assert merged["small"].tolist() == [0.0, 0.0, 0.0]


def test_global_threshold_is_exact_up_to_one_histogram_bin() -> None:
    """Contract: global trimming of a single tensor keeps int(density n) entries and at most some near-equal ones."""
    delta = torch.randn(2000, generator=torch.Generator().manual_seed(3))
    kept = merge("ties", [delta], density=0.2, ties=Ties(scope="global"))
    exact = trim(delta, 0.2)
    assert bool(((kept != 0) | (exact == 0)).all())
    surplus = delta[(kept != 0) & (exact == 0)].abs()
    limit = exact[exact != 0].abs().min()
    assert bool((surplus >= limit * (1 - 2.0**-12)).all())
    assert len(surplus) <= 2
