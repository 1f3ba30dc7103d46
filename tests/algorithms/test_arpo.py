"""ARPO's branching plan, advantages and rewards against the paper's worked example. Rollouts with branches:
tests/agent/test_branching.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from stages.agent.branching import Path
from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import StepKeys, TrajectoryBatch
from stages.algorithms.parts.branching import Branching, EntropyPlan, branches, turn_entropy
from stages.algorithms.parts.loss import denominators
from stages.algorithms.parts.shaping import hierarchical
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError
from stages.seeding import stream

DRAWS = [index / 1000 for index in range(1000)]


@pytest.mark.parametrize(("rise", "expected"), [(0, 0.5), (1, 0.7), (-1, 0.3), (3, 1.0), (-3, 0.0)])
def test_branch_probability(rise: float, expected: float) -> None:
    """Over draws spaced evenly in [0, 1); with weight 0 the rise has no effect, and probability 0 never branches."""
    assert sum(branches(draw, rise, 0.5, 0.2) for draw in DRAWS) / 1000 == pytest.approx(expected, abs=2e-3)
    assert sum(branches(draw, rise, 0.5, 0.0) for draw in DRAWS) / 1000 == pytest.approx(0.5, abs=2e-3)
    assert not any(branches(draw, rise, 0.0, 0.0) for draw in DRAWS)


def test_turn_entropy_sum_and_mean() -> None:
    """20 tokens, uniform over 10 candidates, vocabulary e^11.93: the sum is 46.05 / 11.93 = 3.86, the mean 3.86 / 20."""
    entropies = [math.log(10)] * 30
    vocabulary = round(math.exp(11.93))
    assert turn_entropy(entropies, 20, "sum", vocabulary) == pytest.approx(3.86, abs=1e-2)
    assert turn_entropy(entropies, 20, "mean", vocabulary) == pytest.approx(3.86 / 20, abs=1e-3)
    assert turn_entropy(entropies[:5], 20, "sum", vocabulary) == pytest.approx(3.86 / 4, abs=1e-2)


def path(row: int, *turns: float, inherited: int = 0, moved: bool = True, alive: bool = True) -> Path:
    """Turns of one token each, with entropies in units of ln 100."""
    return Path(row, inherited, tuple((value * math.log(100),) for value in turns), moved, alive)


def plan(**values) -> EntropyPlan:
    section = {"algorithm": "arpo", "branching": {"entropy_weight": 1.0, "base": 0.0, "initial": 4, **values}}
    return EntropyPlan(resolve(Rl.model_validate(section)).rl.branching, 100)


def test_branch_point_for_each_probe() -> None:
    """answer: after the answer before the turn whose entropy rose; call: after the newest answer, which a finished episode lacks,
    and the first answer has no rise yet."""
    paths = [path(0, 0.5, 2.0), path(1, 0.5, 0.4), path(2, 0.5), path(3, 0.5, 2.0, alive=False), path(4, 0.5, 2.0, moved=False)]
    found = {probe: [(fork.row, fork.turns) for fork in plan(probe=probe).grow(paths, 9, "key")] for probe in ("answer", "call")}
    assert found == {"answer": [(0, 1), (3, 1)], "call": [(0, 2)]}


def test_beam_and_free_rows_limit_forks() -> None:
    paths = [path(row, 0.0, 2.0) for row in range(3)]
    assert [fork.row for fork in plan(beam=3).grow(paths, 9, "key")] == [0, 0, 1, 1, 2, 2]
    assert [fork.row for fork in plan(beam=3).grow(paths, 3, "key")] == [0, 0, 1]
    assert plan(beam=1).grow(paths, 9, "key") == []


def test_entropy_rise_of_a_branch() -> None:
    """inherit: relative to the first turn overall; otherwise to the branch's own first turn, which has no rise itself. A branch
    does not branch again at its own branch point."""
    branch = path(1, 0.5, 0.5, 2.0, 1.0, inherited=2)
    assert plan().rise(branch) == pytest.approx(0.5)
    assert plan(inherit=False).rise(branch) == pytest.approx(-1.0)
    assert plan().grow([path(1, 0.5, 0.5, 2.0, inherited=2)], 9, "key") == []
    assert len(plan(probe="call").grow([path(1, 0.5, 0.5, 2.0, inherited=2)], 9, "key")) == 1


def with_draws(batch: TrajectoryBatch, draws: list[list[int]]) -> TrajectoryBatch:
    return batch.with_extra(replace(batch.get(StepKeys), draws=torch.tensor(draws)))


def test_branch_draws_depend_only_on_key_row_and_turn() -> None:
    half = plan(base=0.5, entropy_weight=0.0)
    paths = [path(row, 0.5, 0.5) for row in range(40)]
    rows = [fork.row for fork in half.grow(paths, 99, "key")]
    assert rows == [row for row in range(40) if stream("key", row, 1).random() <= 0.5]
    assert rows == [fork.row for row in range(40) for fork in half.grow(paths[row : row + 1], 99, "key")]
    assert rows != [fork.row for fork in half.grow(paths, 99, "other")]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 1, 0, 0], [0.8660, 0.8660, -0.8660, -0.8660]), ([1.1, 1, 0, -1], [0.8380, 0.7364, -0.2793, -1.2951])],
)
def test_soft_advantages(make_batch, rewards: list[float], expected: list[float]) -> None:
    algorithm = resolve(Rl(algorithm="arpo", group_size=4))
    assert algorithm.prepare(make_batch([rewards])).advantages[:, 1].tolist() == pytest.approx(expected, abs=1e-4)


def shared_gradient(make_batch, credit: str, aggregation: str) -> float:
    """Negative gradient of the loss on each of 2 tokens that two rows of 4 and 8 policy tokens share, A = +-0.7071, ratio 1."""
    section = {"algorithm": "arpo", "group_size": 2, "credit": {"kind": credit}, "loss": {"aggregation": aggregation}}
    algorithm = resolve(Rl.model_validate(section))
    batch = make_batch([[1, 0]], turns=[[2, 2], [2, 6]])
    batch = algorithm.prepare(with_draws(batch, [[0, 1], [0, 2]]))
    assert batch.advantages[:, 4].tolist() == pytest.approx([0.7071, -0.7071], abs=1e-4)
    logprobs = batch.logprobs_old.clone().requires_grad_()
    terms = algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0))
    (gradient,) = torch.autograd.grad(terms.loss, logprobs)
    first = gradient[:, 1:3].sum(0)
    assert first[0] == first[1]
    return -float(first[0])


def test_soft_and_hard_attribution_of_shared_tokens(make_batch) -> None:
    """Equal under token_mean, where opposite rows cancel; different where shorter rows weigh more."""
    assert shared_gradient(make_batch, "outcome", "token_mean") == pytest.approx(0.0, abs=1e-7)
    assert shared_gradient(make_batch, "branches", "token_mean") == 0.0
    assert shared_gradient(make_batch, "outcome", "seq_mean_token_mean") == pytest.approx(0.0442, abs=1e-4)
    assert shared_gradient(make_batch, "branches", "seq_mean_token_mean") == 0.0


@pytest.mark.parametrize(("aggregation", "equal"), [("token_mean", True), ("seq_mean_token_mean", False)])
def test_attribution_matters_only_if_rows_weigh_differently(make_batch, aggregation: str, equal: bool) -> None:
    """Without clipping a shared token's gradient is the sum of its rows' advantages over all tokens, so averaging them first
    changes nothing; soft and hard attribution differ only if rows have different weights."""
    rewards = [0.9, -0.3, 0.2, 0.7]
    found = []
    for credit in ("outcome", "branches"):
        section = {"algorithm": "arpo", "group_size": 4, "credit": {"kind": credit}, "loss": {"aggregation": aggregation}}
        algorithm = resolve(Rl.model_validate(section))
        batch = make_batch([rewards], turns=[[1, 1], [1, 1, 1], [1, 1, 1], [1, 1]])
        batch = algorithm.prepare(with_draws(batch, [[0, 1, -1], [0, 2, 3], [0, 2, 4], [5, 6, -1]]))
        logprobs = batch.logprobs_old.clone().requires_grad_()
        algorithm.loss(logprobs, torch.zeros(batch.mask.shape), batch, denominators(batch, 8.0)).loss.backward()
        assert logprobs.grad is not None
        per_turn = [logprobs.grad[row][batch.mask[row]] for row in range(4)]
        shared = [sum(turns[0] for turns in per_turn[:3]), per_turn[1][1] + per_turn[2][1]]
        found.append(torch.stack([*shared, per_turn[0][1], per_turn[1][2], per_turn[2][2], *per_turn[3]]))
    assert torch.allclose(*found, atol=1e-6) is equal


def test_hard_attribution_averages_rows_that_share_a_draw(make_batch) -> None:
    """Rows 0 to 2 share turn 0, rows 1 and 2 also turn 1: a shared draw gets the mean advantage of its rows."""
    batch = make_batch([[1, 0, 0, 0]], turns=[[1, 1], [1, 1, 1], [1, 1, 1], [1, 1]])
    batch = with_draws(batch, [[0, 1, -1], [0, 2, 3], [0, 2, 4], [5, 6, -1]])
    algorithm = resolve(Rl.model_validate({"algorithm": "arpo", "group_size": 4, "credit": {"kind": "branches"}}))
    prepared = algorithm.prepare(batch)
    found = [prepared.advantages[row][prepared.mask[row]].tolist() for row in range(4)]
    for mine, theirs in zip(found, [[1 / 6, 1.5], [1 / 6, -0.5, -0.5], [1 / 6, -0.5, -0.5], [-0.5, -0.5]], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert prepared.metrics["merged_steps"] == pytest.approx(5 / 10)


@pytest.mark.parametrize(
    ("score", "formed", "tools", "expected"),
    [(0.8, False, 2, -1.0), (0.8, True, 2, 0.9), (0.8, True, 1, 0.8), (0.0, True, 2, 0.0), (1.0, True, 3, 1.1)],
)
def test_hierarchical_reward(score: float, formed: bool, tools: int, expected: float) -> None:
    found = hierarchical(torch.tensor([score]), torch.tensor([formed]), torch.tensor([tools]), -1.0, 0.1)
    assert found.item() == pytest.approx(expected)


def with_format(batch: TrajectoryBatch) -> TrajectoryBatch:
    """Row 0 has an action that was not understood, row 1 runs out of tokens, row 2 calls two tools, row 3 one."""
    accepted = torch.ones_like(batch.accepted)
    accepted[0, 0] = False
    overlong = torch.tensor([False, True, False, False])
    return batch.with_(accepted=accepted, overlong=overlong, tools=torch.tensor([2, 2, 2, 1]))


def test_hierarchical_reward_falls_on_last_turn(make_batch) -> None:
    """On the last turn, so that turn rewards still sum to the return; acceptance after the end of an episode is ignored."""
    batch = with_format(make_batch([[0.8, 0.8, 0.8, 0.8]], turns=[[1, 1], [1], [1, 1], [1]]))
    batch = batch.with_(accepted=batch.accepted & torch.tensor([[True, True], [True, True], [True, True], [True, False]]))
    shaped = resolve(Rl(algorithm="arpo", group_size=4)).shape(batch)
    assert shaped.rewards.tolist() == pytest.approx([-1.0, -1.0, 0.9, 0.8])
    torch.testing.assert_close(shaped.turn_rewards.sum(1), shaped.rewards)
    assert shaped.metrics["well_formed"] == 0.5
    plain = resolve(Rl.model_validate({"algorithm": "arpo", "group_size": 4, "reward": {"kind": "environment"}})).shape(batch)
    assert plain.rewards.tolist() == batch.rewards.tolist()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"algorithm": "arpo", "branching": {"initial": 9}}, "more than the 8 episodes"),
        (
            {"algorithm": "arpo", "group_size": 4, "branching": {"initial": 3}, "external": {"per_group": 2}},
            "more than the 2 episodes",
        ),
        ({"algorithm": "arpo", "group_size": 2, "external": {"per_group": 1}}, "and there is 1"),
        ({"algorithm": "arpo", "group_resampling": {"kind": "value", "r_max": 1.0}}, "rl.reward gives up to 1.1"),
        ({"algorithm": "grpo", "branching": {"initial": 4}}, "needs branching.kind: entropy or random"),
        ({"algorithm": "arpo", "branching": {"kind": "random", "tokens": 5}}, "needs branching.kind: entropy"),
        ({"algorithm": "grpo", "credit": {"kind": "branches"}}, "set rl.branching.kind"),
        ({"algorithm": "arpo", "group_size": 1, "advantage": {"mean": "none", "std": "none"}}, "and there is 1"),
        ({"algorithm": "arpo", "reward": {"density": "dense"}}, "scores entire episodes"),
        ({"algorithm": "grpo", "branching": {"kind": "own"}}, "no branching of its own"),
        ({"algorithm": "dpo", "branching": {"kind": "entropy"}}, "learns from preference pairs"),
    ],
)
def test_conflicting_settings_are_rejected(section: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate(section))


def test_any_group_method_can_branch_with_the_same_defaults() -> None:
    section = {"algorithm": "grpo", "branching": {"kind": "entropy"}, "credit": {"kind": "branches"}}
    algorithm = resolve(Rl.model_validate(section))
    assert algorithm.rl.branching == Branching(
        kind="entropy",
        initial=4,
        beam=2,
        base=0.5,
        entropy_weight=0.2,
        tokens=20,
        candidates=10,
        aggregate="sum",
        probe="answer",
        inherit=True,
    )
    assert algorithm.plan(400).initial(8) == 4
    assert resolve(Rl(algorithm="grpo")).plan(400) is None
