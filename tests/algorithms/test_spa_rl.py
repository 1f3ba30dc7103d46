"""Step rewards from a progress estimator: hand-computed numbers, limits, rejected settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import assert_near

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.credit import Credit
from stages.algorithms.parts.gae import compact, gae
from stages.algorithms.parts.progress import Progress, contributions, minus_mean_of_others, progress_rewards
from stages.algorithms.settings import Rl
from stages.params import parse_params
from stages.runtime.validation import ParamsError


def credited(make_batch: Any, c: list[float], reward: float, accepted: list[bool] | None = None) -> TrajectoryBatch:
    """One episode with a turn of two tokens for each contribution."""
    batch = make_batch([[reward]], turns=[[2] * len(c)])
    accepted = accepted or [True] * len(c)
    return batch.with_(accepted=torch.tensor([accepted])).with_extra(Progress(torch.tensor([c])))


def test_grounding_as_bonus_share_and_penalty(make_batch) -> None:
    """alpha 1, beta 0.5, g = (1, 0, 1): 0.6, 0.2, 1.0; as a share of 3 turns; as a penalty."""
    batch = credited(make_batch, [0.1, 0.2, 0.5], 1.0, [True, False, True])
    for kind, expected in (
        ("bonus", [0.6, 0.2, 1.0]),
        ("share", [0.1 + 0.5 / 3, 0.2, 0.5 + 0.5 / 3]),
        ("penalty", [0.1, -0.3, 0.5]),
    ):
        found = progress_rewards(batch, Credit(kind="progress", grounding=kind, grounding_coef=0.5))
        assert_near(found.turn_rewards, [expected])
        torch.testing.assert_close(found.rewards, found.turn_rewards.sum(1))
        assert found.metrics["grounded"] == pytest.approx(2 / 3)
        assert found.metrics["progress_residual"] == pytest.approx(0.2)


def test_residual_on_last_step_or_spread(make_batch) -> None:
    """R - sum(c) = 0.2 on the last turn: (0.1, 0.2, 0.7), sum exactly 1; spread: 0.0667 more each."""
    batch = credited(make_batch, [0.1, 0.2, 0.5], 1.0)
    assert_near(contributions(batch, Credit(residual="last_step")), [[0.1, 0.2, 0.7]])
    assert_near(contributions(batch, Credit(residual="spread")), [[0.1 + 0.2 / 3, 0.2 + 0.2 / 3, 0.5 + 0.2 / 3]])
    assert_near(contributions(batch, Credit(residual="none")), [[0.1, 0.2, 0.5]])


def test_residuals_stay_within_their_episode(make_batch) -> None:
    batch = make_batch([[1.0, 0.0]], turns=[[1, 1, 1], [1]])
    batch = batch.with_extra(Progress(torch.tensor([[0.1, 0.2, 0.3], [0.4, 9.0, 9.0]])))
    for residual in ("last_step", "spread"):
        found = contributions(batch, Credit(residual=residual))
        torch.testing.assert_close(found.sum(1), batch.rewards)
        assert found[1, 1:].tolist() == [0.0, 0.0]


def test_steps_to_go_weights(make_batch) -> None:
    """The authors' code weights turn i by N - 1 - i: (0.2, 0.2, 0)."""
    batch = credited(make_batch, [0.1, 0.2, 0.5], 1.0)
    assert_near(progress_rewards(batch, Credit(step_weight="steps_to_go")).turn_rewards, [[0.2, 0.2, 0.0]])


def test_rloo_broadcast_rewards(make_batch) -> None:
    """Returns 1, 0, 0.5: 0.75, -0.75, 0 on every turn; a single episode keeps its return."""
    torch.testing.assert_close(
        minus_mean_of_others(torch.tensor([1.0, 0.0, 0.5]), torch.zeros(3)), torch.tensor([0.75, -0.75, 0.0])
    )
    torch.testing.assert_close(minus_mean_of_others(torch.tensor([0.3]), torch.zeros(1)), torch.tensor([0.3]))
    batch = make_batch([[1.0, 0.0, 0.5]], turns=[[1, 1], [1], [2]])
    found = progress_rewards(batch, Credit(step_reward="rloo_broadcast")).turn_rewards
    torch.testing.assert_close(found, torch.tensor([[0.75, 0.75], [-0.75, 0.0], [0.0, 0.0]]))


def test_gae_of_two_one_token_turns() -> None:
    """V = (0.5, 0.8), return 1 at the end: A_0 = 0.5 with lam 1, 0.40 with lam 0.5."""
    rewards, values, valid = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.8]]), torch.ones(1, 2, dtype=torch.bool)
    assert gae(rewards, values, valid, 1.0, 1.0)[0, 0].item() == pytest.approx(0.5)
    assert gae(rewards, values, valid, 1.0, 0.5)[0, 0].item() == pytest.approx(0.40)


def test_observation_between_turns_does_not_change_advantages() -> None:
    """An observation token of any value leaves A_0 at 0.5 and 0.40; recursing over it with a masked value of 0, as the authors'
    trainer does, gives -0.05."""
    mask = torch.tensor([[True, False, True]])
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.5, 9.0, 0.8]])
    index, valid = compact(mask)
    for lam, expected in ((1.0, 0.5), (0.5, 0.40)):
        found = gae(rewards.gather(1, index), values.gather(1, index), valid, 1.0, lam)
        assert found[0, 0].item() == pytest.approx(expected)
    inherited = gae(rewards, values * mask, torch.ones_like(mask), 1.0, 0.5)
    assert inherited[0, 0].item() == pytest.approx(-0.05)


def prepared(make_batch: Any, algorithm: str, credit: dict[str, Any] | None = None, c: list[float] | None = None) -> Any:
    """Two episodes of two and three turns."""
    rl = Rl(algorithm=algorithm, group_size=2, advantage={"level": "turn", "lam": 0.95}, credit=credit or {})
    batch = make_batch([[1.0, 0.0]], turns=[[2, 1], [1, 1, 2]])
    batch = batch.with_(values=0.3 * batch.mask)
    batch = batch.with_extra(Progress(torch.tensor([[*(c or [0.0, 0.0]), 0.0], [0.0, 0.0, 0.0]])))
    return resolve(rl, 64).prepare(batch)


def test_without_contributions_equals_ppo(make_batch) -> None:
    """Limit: grounding_coef 0, residual last_step and c = 0 give PPO's advantages bit for bit."""
    sparse = prepared(make_batch, "spa_rl", {"grounding_coef": 0.0, "residual": "last_step"})
    assert sparse.advantages.equal(prepared(make_batch, "ppo").advantages)
    assert sparse.returns.equal(prepared(make_batch, "ppo").returns)


def test_one_turn_episodes_equal_ppo(make_batch) -> None:
    """With N = 1 a perfect estimator's contribution is the return."""
    batch = make_batch([[1.0, 0.0]], turns=[[2], [3]])
    batch = batch.with_(values=0.3 * batch.mask).with_extra(Progress(batch.rewards[:, None].clone()))
    spa, ppo = (resolve(Rl(algorithm=name, group_size=2, advantage={"level": "turn"}), 64) for name in ("spa_rl", "ppo"))
    torch.testing.assert_close(spa.prepare(batch).advantages, ppo.prepare(batch).advantages)


def test_success_probabilities_give_potential_based_credit(make_batch) -> None:
    """Limit: with c_i = p_i - p_{i-1} (p_0 in c_1) the reward-to-go of turn i is R - p_{i-1}."""
    batch = credited(make_batch, [0.3, 0.4, 0.3], 1.0)
    advantage, credit = {"level": "turn", "mean": "none"}, {"kind": "progress", "grounding_coef": 0.0}
    rl = Rl(algorithm="reinforce", advantage=advantage, credit=credit)
    found = resolve(rl, 64).prepare(batch).advantages
    torch.testing.assert_close(found[batch.mask], torch.tensor([1.0, 1.0, 0.7, 0.7, 0.3, 0.3]))


def test_idle_turns_change_the_return_only_with_bonus(make_batch) -> None:
    """Contract: an accepted turn without contribution leaves the return unchanged; only the published bonus rewards it."""
    short, idle = credited(make_batch, [0.5, 0.5], 1.0), credited(make_batch, [0.5, 0.0, 0.0, 0.5], 1.0)
    for kind, differs in (("penalty", False), ("share", False), ("bonus", True)):
        sums = [progress_rewards(one, Credit(grounding=kind, grounding_coef=0.5)).rewards.item() for one in (short, idle)]
        assert (sums[0] != pytest.approx(sums[1])) is differs


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "grpo", "credit": {"kind": "progress"}}, "set level to turn"),
        ({"algorithm": "grpo", "credit": {"residual": "spread"}}, r"rl\.credit\.residual has no effect here"),
        ({"credit": {"step_reward": "rloo_broadcast", "residual": "spread"}}, r"rl\.credit\.residual has no effect here"),
        ({"credit": {"step_reward": "rloo_broadcast"}, "group_size": 1}, "compares the episodes of a group"),
        ({"reward": {"correct": 1.0, "wrong": -1.0}}, "residual: none replaces the return"),
        ({"critic": {"head": {"loss": "hl_gauss"}}}, r"rl\.critic\.head: returns are in \[-0\.5, 1\]"),
        ({"credit": {"grounding": "bonus"}, "critic": {"head": {"loss": "two_hot"}}}, r"returns are in \[0, 1\.5\]"),
    ],
)
def test_conflicting_settings_are_rejected(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParamsError, match=reason):
        resolve(Rl(**{"algorithm": "spa_rl", **changes}), 64)


def test_spa_rl_requires_the_progress_estimator() -> None:
    values: dict[str, Any] = {"domains": ["search"], "per_domain": {"search": {}}, "rl": {"algorithm": "spa_rl"}}
    with pytest.raises(ParamsError, match=r"annotate\.progress\.kind is none: set it to spa"):
        parse_params(values)
    parse_params({**values, "rollout": {"tasks": 96}, "annotate": {"progress": {"kind": "spa"}}})
    parse_params({**values, "rl": {"algorithm": "spa_rl", "credit": {"step_reward": "rloo_broadcast"}}})


def test_missing_contributions_raise(make_batch) -> None:
    with pytest.raises(ValueError, match="has none"):
        progress_rewards(make_batch([[1.0]], turns=[[1, 1]]), Credit(kind="progress"))
