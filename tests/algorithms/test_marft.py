"""MARFT: advantages along a team's texts, one ratio per text, and what is refused, against numbers computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from by_hand import assert_near

from stages.agent.team import Member
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import TrajectoryBatch, TurnWords, turn_means
from stages.algorithms.parts.advantage import Advantage, finish
from stages.algorithms.parts.gae import gae_advantage
from stages.algorithms.parts.loss import Loss, aggregate, clipped, denominators, ppo_clip, turn_clip, unit_log_ratio
from stages.algorithms.parts.team import Team
from stages.algorithms.parts.team_gae import TeamMoves, team_advantage
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError
from stages.training.rl.critic import clipped_errors, errors

PAIR = [Member(role="planner"), Member(role="solver", sees=["planner"])]
TURN = {"estimator": "team", "level": "turn"}


def team_of(members: Sequence[Member] = PAIR, **keys) -> Team:
    return Team(members=list(members), **keys)


def batch_of(
    make_batch, values: Sequence[Sequence[float]], rewards: Sequence[float], plays: Sequence[int], moves: Sequence[Sequence[int]]
) -> TrajectoryBatch:
    """A row per member and play, in turns of two tokens with the given values of their first token; the reward is on the last."""
    batch = make_batch([[reward] for reward in rewards], turns=[[2] * len(row) for row in values])
    placed = torch.full(batch.mask.shape, 7.0)
    padded = torch.full(batch.turn_rewards.shape, -1)
    for row, own in enumerate(values):
        padded[row, : len(own)] = torch.tensor(moves[row])
        for turn, value in enumerate(own):
            placed[row, (batch.turn[row] == turn).nonzero()[0]] = value
    members = torch.tensor([place % 2 for place in range(len(values))])
    return batch.with_(values=placed).with_extra(TeamMoves(torch.tensor(plays), members, padded))


def per_turn(found: torch.Tensor | None, batch: TrajectoryBatch) -> list[list[float]]:
    """The value of each turn's tokens, which is the same for all of them."""
    assert found is not None
    rows = []
    for row in range(batch.size):
        rows.append([])
        for turn in range(int(batch.turns[row])):
            values = set(found[row, batch.mask[row] & (batch.turn[row] == turn)].tolist())
            assert len(values) == 1
            rows[-1].append(values.pop())
    assert float(found[~batch.mask].abs().sum()) == 0
    return rows


def test_one_round_of_two_agents(make_batch) -> None:
    """V = (0.2, 0.5), r = (0, 1), gamma 0.99, lambda 0.95: A = (0.76525, 0.5), returns (0.96525, 1)."""
    batch = batch_of(make_batch, [[0.2], [0.5]], [0, 1], [0, 0], [[0], [1]])
    found = team_advantage(batch, Advantage(**TURN, gamma=0.99, lam=0.95), team_of())
    assert_near(torch.tensor(per_turn(found.advantages, batch)), [[0.76525], [0.5]], atol=1e-6)
    assert_near(torch.tensor(per_turn(found.returns, batch)), [[0.96525], [1.0]], atol=1e-6)


def test_a_play_after_a_finished_one_has_the_same_advantages(make_batch) -> None:
    """Contract: credit never depends on earlier plays (the reference code would give the first agent -0.2 here)."""
    batch = batch_of(make_batch, [[0.1], [0.4], [0.2], [0.5]], [0, 1, 0, 1], [0, 0, 1, 1], [[0], [1], [0], [1]])
    found = team_advantage(batch, Advantage(**TURN, gamma=0.99, lam=0.95), team_of())
    assert_near(torch.tensor(per_turn(found.advantages, batch)[2:]), [[0.76525], [0.5]], atol=1e-6)


def test_rounds_follow_each_other(make_batch) -> None:
    """V = 0.1, 0.2 in round one and 0.3, 0.4 in round two, reward 1 at the end, gamma 0.5, lambda 0.5: backwards
    d = 0.6, -0.1, -0.05, 0, A = 0.6, 0.05, -0.0375, -0.009375.

    A planner that speaks in the first round alone is before both actions."""
    batch = batch_of(make_batch, [[0.1, 0.3], [0.2, 0.4]], [0, 1], [0, 0], [[0, 2], [1, 3]])
    found = team_advantage(batch, Advantage(**TURN, gamma=0.5, lam=0.5), team_of())
    assert_near(torch.tensor(per_turn(found.advantages, batch)), [[-0.009375, 0.05], [-0.0375, 0.6]], atol=1e-6)
    once = batch_of(make_batch, [[0.0], [0.0, 0.0]], [0, 1], [0, 0], [[0], [1, 2]])
    found = team_advantage(once, Advantage(**TURN, gamma=0.5, lam=1.0), team_of())
    assert per_turn(found.advantages, once) == [[0.25], [0.5, 1.0]]


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("credit", ["chain", "shared_last"])
def test_without_discount_and_values_each_advantage_is_the_teams_return(make_batch, level: str, credit: str) -> None:
    batch = batch_of(make_batch, [[0, 0], [0, 0]], [0, 0.75], [0, 0], [[0, 2], [1, 3]])
    batch = batch.with_(values=torch.zeros(batch.mask.shape))
    found = team_advantage(batch, Advantage(estimator="team", level=level), team_of(credit=credit))
    assert found.advantages is not None
    assert found.advantages.equal(0.75 * batch.mask)


def test_credit_alone_pays_what_follows_a_text(make_batch) -> None:
    """Rewards 0.5 and 1 of two actions; lambda 0 and V 0: shared_last gives both members 0.5, then 1; mean_mix half of an own
    reward and a quarter (half of the mean of two) of the team's."""
    batch = batch_of(make_batch, [[0, 0], [0, 0]], [0, 1], [0, 0], [[0, 2], [1, 3]])
    batch = batch.with_(turn_rewards=torch.tensor([[0.0, 0.0], [0.5, 1.0]]), values=torch.zeros(batch.mask.shape))
    params = Advantage(**TURN, gamma=1.0, lam=0.0)
    found = {credit: team_advantage(batch, params, team_of(credit=credit)).advantages for credit in ("shared_last", "mean_mix")}
    assert per_turn(found["shared_last"], batch) == [[0.5, 1.0], [0.5, 1.0]]
    assert per_turn(found["mean_mix"], batch) == [[0.125, 0.25], [0.375, 0.75]]


def test_token_level_discounts_between_texts_alone(make_batch) -> None:
    """Two texts of two tokens, V 0, reward 1 at the end, lambda 1, gamma 0.5: the planner's tokens get 0.5, the solver's 1; with
    0.5 within texts, too: 0.125 and 0.25, 0.5 and 1."""
    batch = batch_of(make_batch, [[0], [0]], [0, 1], [0, 0], [[0], [1]])
    batch = batch.with_(values=torch.zeros(batch.mask.shape))
    params = Advantage(estimator="team", level="token", gamma=0.5, lam=1.0)
    within = team_advantage(batch, params, team_of(token_gamma=0.5)).advantages
    plain = team_advantage(batch, params, team_of()).advantages
    assert plain is not None
    assert within is not None
    assert plain[batch.mask].tolist() == [0.5, 0.5, 1.0, 1.0]
    assert within[batch.mask].tolist() == [0.125, 0.25, 0.5, 1.0]


@pytest.mark.parametrize("level", ["turn", "token"])
def test_one_agent_is_gae(make_batch, level: str) -> None:
    """Contract: a team of one has PPO's advantages and returns, bit for bit, at either level."""
    batch = make_batch([[1.0, 0.0]], turns=[[2, 1, 3], [1, 2]])
    values = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(5))
    moves = torch.tensor([[0, 1, 2], [0, 1, -1]])
    batch = batch.with_(values=values).with_extra(TeamMoves(torch.arange(2), torch.zeros(2, dtype=torch.int64), moves))
    ours = team_advantage(batch, Advantage(estimator="team", level=level, lam=0.5), team_of([Member(role="solver")]))
    theirs = gae_advantage(batch, Advantage(estimator="gae", level=level, lam=0.5))
    assert ours.advantages is not None
    assert ours.returns is not None
    assert ours.advantages.equal(theirs.advantages)
    assert ours.returns.equal(theirs.returns)


def test_normalised_over_texts_with_a_mask_of_their_own(make_batch) -> None:
    """(1, 0, -1) -> (1.2247, 0, -1.2247), however many tokens each has: a true 0 counts. Zeros stay zeros."""
    batch = make_batch([[0.0, 0.0, 0.0]], lengths=[1, 4, 2])
    params = Advantage(**TURN, whiten=True)
    spread = batch.with_(advantages=torch.tensor([[1.0], [0.0], [-1.0]]) * batch.mask)
    found = finish(spread, params).advantages
    assert found is not None
    assert [round(float(found[row][batch.mask[row]].mean()), 4) for row in range(3)] == [1.2247, 0.0, -1.2247]
    zeros = finish(batch.with_(advantages=torch.zeros(batch.mask.shape)), params).advantages
    assert zeros is not None
    assert zeros.equal(torch.zeros(batch.mask.shape))


def test_ratio_of_a_text(make_batch) -> None:
    """Log-probabilities -1, -2 and then -0.9, -1.9: the product of ratios is 1.2214, clipped at 1.2 where A > 0, their geometric
    mean 1.1052, not clipped; with four words 1.0513."""
    batch = make_batch([[1.0]], lengths=[2]).with_extra(TurnWords(torch.tensor([[4.0]])))
    old, new = torch.zeros(2, *batch.mask.shape)
    old[batch.mask], new[batch.mask] = torch.tensor([-1.0, -2.0]), torch.tensor([-0.9, -1.9])
    batch = batch.with_(logprobs_old=old, advantages=batch.mask.float())
    for norm, ratio, cut in (("sum", 1.2214, True), ("token", 1.1052, False), ("word", 1.0513, False)):
        params = Loss(kind="turn_clip", ratio_norm=norm)
        assert unit_log_ratio(new, batch, params)[batch.mask].exp().tolist() == pytest.approx([ratio] * 2, abs=1e-4)
        assert turn_clip(new, batch, params)[batch.mask].tolist() == pytest.approx([-min(ratio, 1.2)] * 2, abs=1e-4)
        assert clipped(new, batch, params)[batch.mask].tolist() == [cut] * 2


def test_mean_over_texts_and_texts_of_one_token(make_batch) -> None:
    """turn_mean: turns of 1 and 3 tokens with losses 1 and 5 have the mean 3, also in two micro-batches. A text of one token has
    PPO's loss."""
    batch = make_batch([[1.0, 0.0]], turns=[[1], [3]])
    loss, total = torch.tensor([[1.0], [5.0]]) * batch.mask, denominators(batch, None)
    assert float(aggregate(loss, batch.mask, "turn_mean", total, means=turn_means(batch))) == 3.0
    parts = [aggregate(loss[row : row + 1], own.mask, "turn_mean", total, means=turn_means(own)) for row, own in rows_of(batch)]
    assert float(sum(parts)) == 3.0
    single = make_batch([[1.0, 0.0]], lengths=[1, 1])
    single = single.with_(advantages=single.mask.float())
    new = single.logprobs_old + 0.1 * single.mask
    assert turn_clip(new, single, Loss(kind="turn_clip")).equal(ppo_clip(new, single, Loss(kind="ppo_clip")))


def rows_of(batch: TrajectoryBatch) -> list[tuple[int, TrajectoryBatch]]:
    return [(row, batch.rows(torch.tensor([row]))) for row in range(batch.size)]


def test_value_loss_is_linear_beyond_delta_on_both_sides_and_clipped() -> None:
    """Errors 1, 3, -3 with delta 2: 0.5, 4, 4. V = 1 from an old 0, clipped at 0.2, R = 1: the larger of 0 and 0.8^2 / 2."""
    assert errors(torch.tensor([1.0, 3.0, -3.0]), 2.0).tolist() == [0.5, 4.0, 4.0]
    moved = clipped_errors(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0]), 0.2, 10.0)
    assert moved.tolist() == pytest.approx([0.32])


def test_agent_by_agent() -> None:
    """Interval 1000, two agents: 0 to 999 train the first at the level of turns, the second at that of tokens."""
    team = team_of(interval=1000)
    assert [team.learns(step, "turn") for step in (0, 999, 1000, 2000)] == [["planner"], ["planner"], ["solver"], ["planner"]]
    assert [team.learns(step, "token") for step in (0, 1000)] == [["solver"], ["planner"]]
    assert team_of().learns(7, "turn") == ["planner", "solver"]


BAD = {
    "rl.team.members has one: set it to 0": {"team": {"members": [{"role": "solver"}], "interval": 2}},
    "rl.team.members is empty": {"team": {"members": []}},
    "two members with the role solver": {"team": {"members": [{"role": "solver"}, {"role": "solver"}]}},
    r"lets solver see judge, which is no other member \(planner\)": {
        "team": {"members": [{"role": "planner"}, {"role": "solver", "sees": ["judge"]}]}
    },
    "ends with solver, whose texts are the actions": {"team": {"members": [{"role": "solver", "speaks": "first"}]}},
    "turn_clip has one ratio for all tokens of a turn": {"advantage": {"level": "token"}},
    "team.token_gamma has no effect here: it needs advantage.level: token": {"team": {"token_gamma": 0.5}},
    r"rl\.imitation\.ratio is about the episodes of one agent": {"imitation": {"ratio": 0.5}},
    r"rl\.branching\.kind is about the episodes of one agent": {"branching": {"kind": "random"}},
    r"rl\.observation\.coef is about the episodes of one agent": {"observation": {"coef": 0.05}},
    "critic.huber_delta has no effect here: it needs critic.head.loss: mse": {
        "critic": {"huber_delta": 1.0, "head": {"loss": "hl_gauss"}}
    },
    "rl.team plays tasks that curate wrote": {"tasks": {"source": "instructions"}},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_settings_are_refused(message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate({"algorithm": "marft", **BAD[message]}))


def test_teams_of_other_methods_are_refused() -> None:
    with pytest.raises(ParamsError, match=r"rl\.team\.members has no effect here: it needs advantage\.estimator: team"):
        resolve(Rl.model_validate({"algorithm": "ppo", "team": {"members": [{"role": "solver"}]}}))
    with pytest.raises(ValueError, match=r"is nothing\.txt, which is no text file"):
        Rl.model_validate({"team": {"members": [{"role": "solver", "prompt": "nothing.txt"}]}})
