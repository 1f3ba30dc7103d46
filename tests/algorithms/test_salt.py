"""SALT against the paper's worked example and a brute-force reference."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from stages.algorithms.algorithm import resolve
from stages.algorithms.batch import CUT, ENDED, INVALID, StepKeys, TrajectoryBatch
from stages.algorithms.parts.credit import Credit
from stages.algorithms.parts.graph import edges, merge, similar_states
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError

Episode = list[tuple[str, str, str]]


def graph_batch(make_batch, rewards: list[list[float]], episodes: list[Episode]) -> TrajectoryBatch:
    """Episodes of steps (s, a, s'), two policy tokens a step."""
    batch = make_batch(rewards, turns=[[2] * len(steps) for steps in episodes])
    states: dict[str, int] = {"TRUNC": CUT, "END": ENDED}
    actions: dict[str, int] = {"?": INVALID}
    width = batch.turn_rewards.shape[1]
    number = torch.full((len(episodes), width + 1), -1)
    action = torch.full((len(episodes), width), -1)
    for row, steps in enumerate(episodes):
        for turn, (before, taken, after) in enumerate(steps):
            for place, name in ((turn, before), (turn + 1, after)):
                number[row, place] = states.setdefault(name, len(states))
            action[row, turn] = actions.setdefault(taken, len(actions))
    names = ["", "", *(name for name, value in states.items() if value >= 0)]
    return batch.with_extra(StepKeys(number, action, action, tuple(names)))


def steps_of(batch: TrajectoryBatch) -> list[list[float]]:
    """Each row's advantages, one per step; asserts that both tokens of a step agree and other tokens have none."""
    assert batch.advantages is not None
    assert batch.advantages[~batch.mask].abs().sum() == 0
    found = []
    for row in range(batch.size):
        values = batch.advantages[row][batch.mask[row]].reshape(-1, 2)
        assert torch.equal(values[:, 0], values[:, 1])
        found.append(values[:, 0].tolist())
    return found


def salt(batch: TrajectoryBatch, algorithm: str = "salt", credit: dict | None = None, **section) -> TrajectoryBatch:
    values = {"algorithm": algorithm, "group_size": 3, "credit": credit or {}, **section}
    return resolve(Rl.model_validate(values)).prepare(batch)


FORK = [
    [("s0", "a", "s1"), ("s1", "b", "s2")],
    [("s0", "a", "s1"), ("s1", "c", "s3")],
    [("s0", "d", "s4")],
]
GOOD, BAD = 1.154701, -0.577350


def test_three_trajectories_with_a_shared_step(make_batch) -> None:
    batch = salt(graph_batch(make_batch, [[1, 0, 0]], FORK))
    assert steps_of(batch) == [
        pytest.approx([0.288675, GOOD], abs=1e-5),
        pytest.approx([0.288675, BAD], abs=1e-5),
        [pytest.approx(BAD, abs=1e-5)],
    ]
    assert batch.metrics["merged_steps"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("advantage", [{}, {"mean": "leave_one_out", "std": "none"}])
def test_step_shared_by_all_has_zero_advantage(make_batch, advantage: dict) -> None:
    """For GRPO and RLOO, with rewards that do not cancel exactly in floating point."""
    episodes = [[("s0", "a", "s1"), ("s1", f"b{row}", "s2")] for row in range(7)]
    found = steps_of(salt(graph_batch(make_batch, [[0.1, 0.7, 0.3, 1, 0, 0.9, 0.05]], episodes), advantage=advantage))
    assert [steps[0] for steps in found] == [0.0] * 7
    assert all(steps[1] != 0 for steps in found)


def test_without_shared_steps_equals_grpo(make_batch) -> None:
    """With different actions and with scrambled keys; identical trajectories have no advantage."""
    rewards = [[1, 0, 0], [0.3, 0.9, 0.4]]
    apart = [[(f"s{row}", "a", f"t{row}"), (f"t{row}", "b", "END")] for row in range(6)]
    grpo = salt(graph_batch(make_batch, rewards, apart), "grpo").advantages
    assert torch.equal(salt(graph_batch(make_batch, rewards, apart)).advantages, grpo)
    scrambled = salt(graph_batch(make_batch, rewards, FORK * 2), credit={"match": "scrambled"})
    assert torch.equal(scrambled.advantages, salt(graph_batch(make_batch, rewards, FORK * 2), "grpo").advantages)
    assert scrambled.metrics["merged_steps"] == 0
    same = salt(graph_batch(make_batch, [[1, 0, 0]], FORK[:1] * 3))
    assert same.advantages.abs().sum() == 0
    assert same.metrics["merged_steps"] == 1


def test_step_shared_by_successes_keeps_their_advantage(make_batch) -> None:
    episodes = [[("s0", "a", "s1")], [("s0", "a", "s1")], [("s0", "b", "s2")], [("s0", "c", "s3")]]
    found = steps_of(salt(graph_batch(make_batch, [[1, 1, 0, 0]], episodes), group_size=4))
    assert [steps[0] for steps in found] == pytest.approx([0.866025, 0.866025, -0.866025, -0.866025], abs=1e-5)


def random_episodes(draws: random.Random, count: int) -> list[Episode]:
    """Walks over four rooms with two actions, so that many steps are shared and loops occur."""
    walks = []
    for _ in range(count):
        rooms = ["r0", *(f"r{draws.randrange(4)}" for _ in range(draws.randrange(1, 6)))]
        walks.append([(here, f"a{draws.randrange(2)}", there) for here, there in itertools.pairwise(rooms)])
    return walks


def reference(
    episodes: list[Episode], advantages: list[float], history: int, each: bool, state_action: bool
) -> list[list[float]]:
    """Advantages by comparing each step with every other one."""

    def key(steps: Episode, turn: int) -> tuple:
        lengths = range(max(0, turn - history), turn + 1)
        return tuple(steps[place][: 2 if state_action else 3] for place in lengths)

    result = []
    for steps in episodes:
        mine = []
        for turn in range(len(steps)):
            votes = []
            for other, advantage in zip(episodes, advantages, strict=True):
                times = sum(key(other, place) == key(steps, turn) for place in range(len(other)))
                votes += [advantage] * (times if each else min(times, 1))
            mine.append(sum(votes) / len(votes))
        result.append(mine)
    return result


@pytest.mark.parametrize(
    ("history", "repeats", "key"), [(0, "once", "transition"), (1, "each", "transition"), (2, "once", "state_action")]
)
def test_advantages_match_brute_force_and_conserve_their_sum(make_batch, history: int, repeats: str, key: str) -> None:
    """With repeats: each, the advantages of an edge's members sum to those of their episodes."""
    draws = random.Random(7)
    for _ in range(5):
        episodes = [random_episodes(draws, 4), random_episodes(draws, 4)]
        rewards = [[draws.random() for _ in range(4)] for _ in range(2)]
        batch = graph_batch(make_batch, rewards, [*episodes[0], *episodes[1]])
        credit = {"history": history, "repeats": repeats, "key": key}
        found = steps_of(salt(batch, credit=credit, group_size=4))
        plain = [steps[0] for steps in steps_of(salt(batch, "grpo", group_size=4))]
        expected = [
            steps
            for group in range(2)
            for steps in reference(
                episodes[group], plain[4 * group : 4 * group + 4], history, repeats == "each", key == "state_action"
            )
        ]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-5)
        if repeats == "each":
            edge = edges(batch, Credit(kind="graph", history=history))
            for number in edge[edge >= 0].unique().tolist():
                members = torch.nonzero(edge == number).tolist()
                assert sum(found[row][turn] for row, turn in members) == pytest.approx(
                    sum(plain[row] for row, _ in members), abs=1e-5
                )


def test_advantages_ignore_row_order_state_names_and_other_groups(make_batch) -> None:
    draws = random.Random(3)
    episodes, rewards = random_episodes(draws, 5), [draws.random() for _ in range(5)]
    base = steps_of(salt(graph_batch(make_batch, [rewards], episodes), group_size=5))
    order = [3, 0, 4, 2, 1]
    permuted = graph_batch(make_batch, [[rewards[row] for row in order]], [episodes[row] for row in order])
    assert steps_of(salt(permuted, group_size=5)) == [base[row] for row in order]
    renamed = [[(f"x{before}", taken, f"x{after}") for before, taken, after in steps] for steps in episodes]
    assert steps_of(salt(graph_batch(make_batch, [rewards], renamed), group_size=5)) == base
    with_others = graph_batch(make_batch, [rewards, [0, 1, 0, 1, 0]], [*episodes, *random_episodes(draws, 5)])
    assert steps_of(salt(with_others, group_size=5))[:5] == base


def test_longer_history_merges_fewer_steps(make_batch) -> None:
    """History 2 separates steps with different predecessors, history 0 merges them; more history never merges more."""
    episodes = [[("u", "a", "v"), ("v", "b", "s"), ("s", "c", "t")], [("w", "a", "v"), ("v", "b", "s"), ("s", "c", "t")]]
    batch = graph_batch(make_batch, [[1, 0]], episodes)
    assert [edges(batch, Credit(history=history))[:, 2].unique().numel() for history in (0, 1, 2)] == [1, 1, 2]
    draws = random.Random(5)
    for _ in range(5):
        walk = graph_batch(make_batch, [[1, 0, 0, 1, 0, 0]], random_episodes(draws, 6))
        shares = [salt(walk, credit={"history": history}, group_size=6).metrics["merged_steps"] for history in range(4)]
        assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("repeats", "expected"), [("once", 0.288675), ("each", 0.721688)])
def test_repeated_step_counts_once_or_each_time(make_batch, repeats: str, expected: float) -> None:
    loop = ("s", "a", "s")
    episodes = [[loop] * 3, [loop], [("s", "b", "t")]]
    found = steps_of(salt(graph_batch(make_batch, [[1, 0, 0]], episodes), credit={"history": 0, "repeats": repeats}))
    assert found[0] == pytest.approx([expected] * 3, abs=1e-5)
    assert found[1] == pytest.approx([expected], abs=1e-5)


def test_truncated_ends_do_not_merge_and_invalid_actions_do(make_batch) -> None:
    """A truncated end is no state; invalid actions are one action and merge where the states agree."""
    episodes = [[("s", "a", "TRUNC")], [("s", "a", "t")], [("s", "?", "s")], [("s", "?", "s")], [("t", "?", "t")]]
    number = edges(graph_batch(make_batch, [[0] * 5], episodes), Credit())[:, 0].tolist()
    assert number[2] == number[3]
    assert len(set(number)) == 4


def test_state_action_key_merges_different_successors(make_batch) -> None:
    episodes = [[("s", "a", "t")], [("s", "a", "u")]]
    batch = graph_batch(make_batch, [[1, 0]], episodes)
    assert salt(batch, group_size=2).metrics["merged_steps"] == 0
    assert salt(batch, group_size=2, credit={"key": "state_action"}).metrics["merged_steps"] == 1


def test_cosine_match_merges_similar_states(make_batch) -> None:
    """Texts that differ in one word of ten have cosine 0.9: merged at 0.85, separate at 0.95."""
    first, second = "you see one two three four five six seven key", "you see one two three four five six seven box"
    assert len(set(similar_states([first, second], 0.85).values())) == 1
    assert len(set(similar_states([first, second], 0.95).values())) == 2
    batch = graph_batch(make_batch, [[1, 0]], [[(first, "a", "END")], [(second, "a", "END")]])
    assert salt(batch, group_size=2, credit={"match": "cosine"}).metrics["merged_steps"] == 0
    assert salt(batch, group_size=2, credit={"match": "cosine", "threshold": 0.85}).metrics["merged_steps"] == 1


def test_renormalise_restores_the_group_std(make_batch) -> None:
    batch = salt(graph_batch(make_batch, [[1, 0, 0]], FORK), credit={"renormalise": "group_std"})
    before, after = (
        torch.tensor([value for steps in found for value in steps])
        for found in (steps_of(salt(graph_batch(make_batch, [[1, 0, 0]], FORK), "grpo")), steps_of(batch))
    )
    torch.testing.assert_close(after.square().sum(), before.square().sum())
    assert after[0] == after[2] != before[0]


def test_merge_averages_step_advantages(make_batch) -> None:
    """Each member contributes the advantage of its own step; advantages that differ within a turn are rejected."""
    merged, shared = merge(torch.tensor([[1.0, 5.0], [3.0, 7.0]]), torch.tensor([[0, 1], [2, 0]]), torch.tensor([0, 0]))
    assert merged.tolist() == [[4.0, 5.0], [3.0, 4.0]]
    assert shared.tolist() == [[True, False], [False, True]]
    with pytest.raises(ParamsError, match="level: token"):
        salt(graph_batch(make_batch, [[1, 0, 0]], FORK), advantage={"level": "token"})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"algorithm": "grpo", "credit": {"history": 2}}, "needs credit.kind: graph"),
        ({"algorithm": "salt", "credit": {"threshold": 0.9}}, "needs credit.match: cosine"),
        ({"algorithm": "salt", "credit": {"weight": 2.0}}, "needs credit.kind: annotated"),
        ({"algorithm": "salt", "group_size": 1, "advantage": {"mean": "none", "std": "none"}}, "group_size is 1"),
    ],
)
def test_conflicting_settings_are_rejected(section: dict, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        resolve(Rl.model_validate(section))


def test_batch_without_step_keys_is_rejected(make_batch) -> None:
    with pytest.raises(ValueError, match="states and actions"):
        salt(make_batch([[1, 0, 0]]).with_(extra={}))
