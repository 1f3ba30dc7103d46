from pathlib import Path

import pytest
import torch
from by_hand import assert_near
from safetensors.torch import load_file

from stages.merging.contract import MergeError
from stages.merging.methods.ram import RamOptions as Ram
from stages.merging.methods.ram import enlargement, overlap_counts
from stages.merging.overlap import chance_lift
from stages.merging.registry import get_merger
from stages.merging.streaming import merge_folders, tensor_generator

from .helpers import bound, merge, write_folder

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


def test_eps_as_a_share_counts_each_models_largest_changes() -> None:
    """Contract: eps 50% counts the larger half of each model's changes, whatever their scale: A's .4 .3 and B's .06 .05."""
    first, second = [0.4, 0.3, 0.2, 0.1], [0.06, 0.01, 0.05, 0.02]
    assert_near(merge("ram", [first, second], ram=Ram(eps="50%")), [0.23, 0.3, 0.05, 0.0])
    # shared 1 and unique 1 for both: l = 1 + .2
    assert_near(merge("ram_plus", [first, second], ram=Ram(eps="50%", r=0.2)), [0.23, 0.36, 0.06, 0.0])


def test_eps_of_all_weights_is_linear() -> None:
    """Contract: 100% counts every entry, so that all models share all of them."""
    models = list(torch.randn(3, 40, generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(merge("ram_plus", models, ram=Ram(eps="100%")), merge("linear", models))


def test_eps_as_a_share_is_counted_over_all_tensors(tmp_path: Path) -> None:
    """Contract: the share is of a model's weights, not of each tensor's: a tensor of small changes may count none."""
    tensors = {"large": torch.tensor([3.0, 2.0]), "small": torch.tensor([0.2, 0.1])}
    base = write_folder(tmp_path / "base", {name: torch.zeros(2) for name in tensors})
    model = write_folder(tmp_path / "model", tensors)
    params = bound("ram_plus", 1, ram={"eps": "50%"})
    result = merge_folders("ram_plus", [model], base, tmp_path / "out", params, seed=0)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert (merged["large"].tolist(), merged["small"].tolist()) == ([3.0, 2.0], [0.0, 0.0])
    assert 0.2 < get_merger("ram_plus").change_thresholds(params, result.totals)[0] < 2.0


@pytest.mark.parametrize("eps", ["101%", "-1%", "10", "%", 0.0, "0%", "0.0%"])
def test_bad_eps_is_refused(eps: object) -> None:
    with pytest.raises(MergeError, match=r"ram\.eps"):
        bound("ram", 2, ram={"eps": eps})


def diagnostics(overlap: int, shares: tuple[float, float], zeros: float = 0.0) -> dict[str, object]:
    """Two models that changed these shares of two groups of 100 weights each, and `overlap` weights both; zeros: the share of
    weights that they left as they were."""
    groups = [{"entries": 100, "changed_fraction": {"a": share, "b": share}} for share in shares]
    models = {name: {"changed_fraction": sum(shares) / 2, "sparsity": zeros} for name in "ab"}
    return {"models": models, "pairs": [{"a": "a", "b": "b", "overlap": overlap}], "groups": groups}


def test_overlap_beside_chance_by_hand() -> None:
    """Contract: independent changes of .8 and .2 of two groups of 100 share 64 + 4 weights, not the 50 of equal shares."""
    assert chance_lift(diagnostics(68, (0.8, 0.2)), "a", "b") == pytest.approx(1.0)
    assert chance_lift(diagnostics(136, (0.8, 0.2)), "b", "a") == pytest.approx(2.0)
    assert chance_lift(diagnostics(0, (0.0, 0.0)), "a", "b") is None


def test_few_changes_and_overlap_by_chance_are_warned_of() -> None:
    """Contract: a specialist that hardly changed, and overlap without information, are said to the user, with key and remedy."""
    merger, params = get_merger("ram_plus"), bound("ram_plus", 2)
    assert merger.warnings(params, diagnostics(136, (0.8, 0.2))) == []
    (chance,) = merger.warnings(params, diagnostics(70, (0.8, 0.2)))
    assert "rl@a and rl@b changed overlap as by chance (1.03 times it)" in chance
    first, second = merger.warnings(params, diagnostics(2, (0.1, 0.0)))
    assert "merge.ram.eps 0.001 only 5.0% of rl@a's weights" in first
    assert first.endswith("lower it, or set a share of the weights, such as 30%")
    assert "rl@b" in second


def test_remedies_of_few_changes_fit_the_threshold() -> None:
    """Contract: a share that counts few weights is to be raised; where every change counts, another threshold would not help."""
    merger, few = get_merger("ram_plus"), (0.1, 0.0)
    first, _ = merger.warnings(bound("ram_plus", 2, ram={"eps": "5%"}), diagnostics(2, few))
    assert "merge.ram.eps 5% only 5.0%" in first
    assert first.endswith("raise that share")
    for eps in (1e-5, "30%"):
        sparse, _ = merger.warnings(bound("ram_plus", 2, ram={"eps": eps}), diagnostics(2, few, zeros=0.949))
        assert "only 5.1% of rl@a's weights changed, nearly all of which count" in sparse
        assert "eps" not in sparse
