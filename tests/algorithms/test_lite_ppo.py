"""Lite PPO as a whole method: composition, numbers and limits. Its statistics and losses: test_advantage.py, test_losses.py."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.loss import denominators
from stages.algorithms.settings import Rl


def advantages(make_batch, rewards: list[list[float]], **changes) -> torch.Tensor:
    algorithm = resolve(Rl(algorithm="lite_ppo", group_size=len(rewards[0]), advantage=changes))
    batch = algorithm.prepare(make_batch(rewards))
    assert batch.advantages is not None
    return batch.advantages[:, 1].reshape(len(rewards), -1)


def test_composition_matches_the_paper() -> None:
    """Group mean, batch std, PPO clip 0.2, token mean; no KL, critic, entropy bonus, decoupled clip or filtering."""
    algorithm = resolve(Rl(algorithm="lite_ppo"))
    rl = algorithm.rl
    assert (rl.advantage.mean, rl.advantage.std, rl.advantage.ddof, rl.advantage.whiten) == ("group", "batch", 1, False)
    assert (rl.loss.kind, rl.loss.clip_low, rl.loss.clip_high, rl.loss.aggregation) == ("ppo_clip", 0.2, 0.2, "token_mean")
    assert (rl.loss.kl_coef, rl.loss.entropy_coef, rl.group_resampling.kind, rl.group_resampling.overlong) == (
        0.0,
        0.0,
        "none",
        "keep",
    )
    assert rl.loss.dual_clip is None
    assert rl.advantage.clip is None
    assert not algorithm.needs_critic
    assert not algorithm.needs_reference


def test_advantages_match_hand_computed_values(make_batch) -> None:
    first = [[1.40312, -0.46771, -0.46771, -0.46771], [0.46771, 0.46771, 0.46771, -1.40312]]
    torch.testing.assert_close(advantages(make_batch, [[1, 0, 0, 0], [1, 1, 1, 0]]), torch.tensor(first), rtol=0, atol=1e-5)
    second = advantages(make_batch, [[1, 1, 1, 1], [1, 1, 1, 0]])
    assert second[0].tolist() == [0.0] * 4
    torch.testing.assert_close(second[1], torch.tensor([0.70711, 0.70711, 0.70711, -2.12132]), rtol=0, atol=1e-5)
    third = advantages(make_batch, [[1, 1, 1, 1]] * 15 + [[1, 1, 1, 0]])
    torch.testing.assert_close(third[15], torch.tensor([2.0, 2.0, 2.0, -6.0]), rtol=0, atol=1e-4)


def test_advantages_are_invariant_to_reward_shifts(make_batch) -> None:
    rewards = [[1.0, 0.0, 0.5, 0.0], [1.0, 1.0, 1.0, 0.0]]
    shifted = [[value + 3 for value in row] for row in rewards]
    torch.testing.assert_close(advantages(make_batch, shifted), advantages(make_batch, rewards), rtol=1e-5, atol=1e-6)


def loss_of(make_batch, rewards: list[list[float]], lengths: list[int], **section) -> float:
    algorithm = resolve(Rl.model_validate({"group_size": len(rewards[0]), **section}), 7)
    batch = algorithm.prepare(make_batch(rewards, lengths=lengths))
    logprobs = batch.logprobs_old + 0.3 * torch.sin(torch.arange(batch.mask.numel()).reshape(batch.mask.shape)) * batch.mask
    total = denominators(batch, float(algorithm.rl.loss.constant_length or 7))
    return float(algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, total).loss)


def test_limits_are_grpo_and_dr_grpo(make_batch) -> None:
    """One group: GRPO with token mean; equal lengths: both aggregations agree; std none with constant aggregation: Dr. GRPO."""
    one, lengths = [[1.0, 0.0, 0.25, 1.0]], [3, 1, 5, 2]
    lite = loss_of(make_batch, one, lengths, algorithm="lite_ppo")
    assert lite == pytest.approx(
        loss_of(make_batch, one, lengths, algorithm="grpo", loss={"aggregation": "token_mean"}), rel=1e-6
    )
    two = [[1.0, 0.0], [1.0, 1.0]]
    equal = {
        kind: loss_of(make_batch, two, [4] * 4, algorithm="lite_ppo", loss={"aggregation": kind})
        for kind in ("token_mean", "seq_mean_token_mean")
    }
    assert equal["token_mean"] == pytest.approx(equal["seq_mean_token_mean"], rel=1e-6)
    lengths = [4, 2, 3, 1]
    constant = loss_of(
        make_batch, two, lengths, algorithm="lite_ppo", advantage={"std": "none"}, loss={"aggregation": "constant"}
    )
    assert constant == loss_of(make_batch, two, lengths, algorithm="dr_grpo")


def test_every_combination_of_the_ablation_grid_runs(make_batch) -> None:
    """mean x std x aggregation x clip_high x overlong: each combination resolves, and most losses differ."""
    grid = product(
        ("none", "group", "batch", "leave_one_out"),
        ("none", "group", "batch"),
        ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"),
        (0.2, 0.32),
        ("keep", "mask"),
    )
    seen = set()
    for mean, std, aggregation, clip_high, overlong in grid:
        section = {
            "algorithm": "lite_ppo",
            "advantage": {"mean": mean, "std": std},
            "loss": {"aggregation": aggregation, "clip_high": clip_high},
            "group_resampling": {"overlong": overlong},
        }
        seen.add(loss_of(make_batch, [[1.0, 0.0], [1.0, 0.5]], [4, 2, 3, 1], **section))
    assert len(seen) > 60


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("grpo", ("group", "group", "seq_mean_token_mean")),
        ("dr_grpo", ("group", "none", "constant")),
        ("dapo", ("group", "group", "token_mean")),
        ("lite_ppo", ("group", "batch", "token_mean")),
    ],
)
def test_parts_of_presets(name: str, parts: tuple[str, str, str]) -> None:
    rl = resolve(Rl(algorithm=name), 100).rl
    assert (rl.advantage.mean, rl.advantage.std, rl.loss.aggregation) == parts
    assert rl.loss.clip_high == (0.28 if name == "dapo" else 0.2)
