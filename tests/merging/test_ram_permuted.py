import torch

from .helpers import merge


def test_without_overlap_or_with_all_of_it_permuting_changes_nothing() -> None:
    """Contract: equal factors can be permuted without effect: one model, disjoint supports, full overlap."""
    apart = [[1.0, 0.0, 0.0], [0.0, -2.0, 0.0]]
    together = list(torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(0)) + 0.1)
    for models in (apart[:1], apart, together):
        torch.testing.assert_close(merge("ram_permuted", models), merge("ram_plus", models))


def test_factors_keep_their_number_and_move_within_a_models_changes() -> None:
    """Contract: with deltas of 1 the merged sum is that of ram_plus, entries no model changed stay, and places differ by seed."""
    first = [1.0] * 40 + [0.0] * 20
    second = [0.0] * 20 + [1.0] * 30 + [0.0] * 10
    plain = merge("ram_plus", [first, second])
    mixed = [merge("ram_permuted", [first, second], seed=seed) for seed in (0, 1)]
    for one in mixed:
        torch.testing.assert_close(one.sum(), plain.sum())
        assert one[50:].tolist() == [0.0] * 10
        assert not torch.equal(one, plain)
    assert not torch.equal(*mixed)
    assert torch.equal(mixed[0], merge("ram_permuted", [first, second], seed=0))
