"""Tree search: trees do not depend on each other, limits hold, and no known step is repeated."""

from dataclasses import replace

import pytest
from tabular import actions_of, grow

from stages.annotation.labels import label_rows
from stages.annotation.prefixes import PrefixStore
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.annotation.tree import evidence_owners
from stages.claims.known_tree import DEPTH, Chat, FakeEngine, Pool, World, task
from stages.engine.engine import Turn
from stages.environments.protocol import Step
from stages.records.episode import NODE_SCHEMA, Owner, write_table


@pytest.mark.parametrize("rollouts", [1, 3])
def test_tree_is_the_same_alone_and_among_64(tmp_path, rollouts: int):
    """Contract: a tree grown alone and one grown among 64, with turns finishing in another order, have the same bytes."""
    names = [f"task{number:02d}" for number in range(64)]
    settings = {"iterations": 24, "expand_k": 3, "evaluation": {"rollouts": rollouts}}
    together = grow(names, width=7, **settings)
    assert [tree.task_id for tree in together] == names
    for tree in together[::9]:
        (alone,) = grow([tree.task_id], width=1, threaded=False, **settings)
        assert alone.counters == tree.counters
        for name, grown in (("alone", alone), ("together", tree)):
            write_table(tmp_path / f"{name}.parquet", NODE_SCHEMA, grown.rows())
        assert (tmp_path / "alone.parquet").read_bytes() == (tmp_path / "together.parquet").read_bytes()
    assert len({str(tree.rows()).replace(tree.task_id, "") for tree in together}) == 64


def test_random_keys_are_never_used_twice():
    engine = FakeEngine()
    search = Search(engine, Chat(), Pool(), Annotate(iterations=40, expand_k=3, evaluation={"rollouts": 2}), 0, 10_000)
    search.grow([task("a"), task("b")])
    assert len(set(engine.given)) == len(engine.given) > 100
    assert not engine.sessions, "open sessions"


def test_one_iteration_labels_every_step_with_the_outcome():
    outcomes = set()
    for tree in grow([f"t{number}" for number in range(40)], iterations=1):
        outcome = tree.nodes[-1].total
        outcomes.add(outcome)
        assert len(tree.nodes) == DEPTH + 2
        assert all((node.N, node.n_rollouts, node.value, node.n_success) == (1, 1, outcome, outcome) for node in tree.nodes)
        labels = label_rows(tree.rows(), Annotate(labels={"min_visits": 1}))
        assert [label["q"] for label in labels] == [outcome] * (DEPTH + 2)
    assert outcomes == {0.0, 1.0}


def test_expand_k_of_one_grows_a_chain():
    """Contract: later iterations only count visits and cost nothing."""
    (tree,) = grow(["a"], iterations=9, expand_k=1)
    assert [node.children for node in tree.nodes] == [[index + 1] for index in range(DEPTH + 1)] + [[]]
    assert {node.N for node in tree.nodes} == {9}
    assert {node.n_rollouts for node in tree.nodes} == {1}
    assert (tree.counters["known_ends"], tree.counters["environment_steps"]) == (8, DEPTH + 1)


def test_eager_chain_measures_each_prefix():
    """Contract: with eager expansion, expand_k = 1 and discarded rollouts, `rollouts` rollouts are played from each prefix of one
    chain."""
    settings = {"expansion": {"kind": "eager"}, "evaluation": {"rollouts": 3, "keep_rollouts": False}}
    (tree,) = grow(["a"], iterations=5, expand_k=1, **settings)
    assert [node.children for node in tree.nodes] == [[index + 1] for index in range(len(tree.nodes) - 1)] + [[]]
    assert [node.N for node in tree.nodes] == [15, 15, 12, 9, 6, 3]
    assert {node.n_rollouts for node in tree.nodes[1:-1]} == {3}


def test_known_terminals_are_revisited_only_when_exhausted():
    """Contract: an iteration revisits a known terminal only once everything below the root is known."""
    (tree,) = grow(["a"], kind="paid", iterations=100, expand_k=6)
    assert tree.counters["known_ends"] == 0
    assert not tree.nodes[0].exhausted
    (tree,) = grow(["a"], kind="paid", iterations=1500, expand_k=6)
    assert tree.nodes[0].exhausted
    rollouts = 1500 - tree.counters["known_ends"]
    assert all(node.ended or node.n_rollouts >= 6 for node in tree.nodes)
    assert rollouts < 6 * 40


def test_environment_is_stepped_only_for_unknown_actions():
    """Contract: environment steps = new outcomes + steps replayed to return to a state."""
    World.steps = 0
    (tree,) = grow(["a"], iterations=50, expand_k=3)
    new = len(tree.nodes) - 1
    assert World.steps == tree.counters["environment_steps"] == new + tree.counters["replayed_steps"]
    assert tree.counters["reused_steps"] > 0
    # Each start node is reached by replay at most once, then from its snapshot.
    assert tree.counters["replayed_steps"] < 50 * DEPTH / 2
    assert tree.counters["policy_tokens"] == 2 * (new + tree.counters["reused_steps"])


def test_rollouts_start_in_the_state_of_their_node():
    """Contract: whatever prefix and snapshot a rollout starts from, its environment is in its node's state."""
    for tree in grow([f"t{number}" for number in range(5)], iterations=60, expand_k=3):
        for node in tree.nodes[1:]:
            actions = actions_of(tree, node.index)
            if not node.ended:
                assert node.edge.state_key == str(actions)
            assert node.depth == len(actions)


def test_max_depth_truncates_without_reward():
    """Contract: an unfinished episode at max_depth is truncated and has the rewards so far (none)."""
    (tree,) = grow(["a"], iterations=20, max_depth=2)
    ends = [node for node in tree.nodes if node.ended]
    assert {(node.depth, node.edge.truncated, node.edge.terminal, node.total) for node in ends} == {(2, True, False, 0.0)}
    assert all(node.edge.context_ids == () for node in ends)


def test_context_limit_truncates_the_episode():
    """Contract: an episode without room for the next turn is truncated; a prompt without room gives a tree of the root alone."""
    search = Search(FakeEngine(), Chat(), Pool(), Annotate(iterations=6), 0, max_length=2 + 3 * 2)
    (tree,) = search.grow([task("a")])
    assert {node.depth for node in tree.nodes if node.edge.truncated} == {2}
    search = Search(FakeEngine(), Chat(), Pool(), Annotate(iterations=6), 0, max_length=2)
    (tree,) = search.grow([task("a")])
    assert (len(tree.nodes), tree.nodes[0].N, tree.nodes[0].edge.truncated) == (1, 6, True)


def test_stop_on_success_ends_a_tree():
    """Contract: with stop.on_success a tree ends with the iteration that first succeeds."""
    trees = grow([f"t{number}" for number in range(8)], iterations=64, expand_k=3, stop={"on_success": True})
    assert sum(tree.first_success is not None for tree in trees) >= 4
    for tree in trees:
        wins = [node for node in tree.nodes if node.total >= 1.0]
        if not wins:
            assert tree.iterations == 64
            continue
        assert len(wins) == 1
        assert wins[0].iteration == tree.iterations == tree.nodes[0].N


@pytest.mark.parametrize("rule", ["uct", "uct_2ln", "puct"])
def test_larger_c_spreads_visits(rule: str):
    """Contract: c = 0 stays with the best child; a huge c visits the root's children evenly (PUCT: by prior)."""
    greedy, even = (
        grow(["a"], kind="paid", iterations=1500, expand_k=6, selection={"rule": rule, "c": c})[0] for c in (0.0, 1e6)
    )
    best = max(greedy.nodes[index].N for index in greedy.nodes[0].children)
    assert best >= 0.85 * 1500
    visits = [even.nodes[index].N for index in even.nodes[0].children]
    assert len(visits) == 3
    if rule != "puct":
        assert max(visits) - min(visits) <= 5


def test_prefix_store_respects_its_budget():
    """Contract: the root's prefix stays; others are evicted by last use once their tokens exceed the budget."""
    store = PrefixStore("root", 10)
    store.add(1, "one", 4)
    store.add(2, "two", 4)
    assert store.nearest([0, 1, 5]) == (1, "one")
    store.add(3, "three", 4)
    assert store.nearest([0, 2]) == (0, "root")
    assert store.nearest([0, 1]) == (1, "one")
    store.add(4, "four", 11)
    assert store.nearest([0, 4]) == (0, "root")


def test_environment_error_ends_the_search():
    """Contract: environment errors propagate from any thread."""

    class Broken(World):
        def step(self, action: str):
            raise ValueError("the game file is damaged")

    class BrokenPool(Pool):
        def take(self) -> World:
            return Broken()

    with pytest.raises(ValueError, match="the game file is damaged"):
        Search(FakeEngine(), Chat(), BrokenPool(), Annotate(), 0, 10_000).grow([task("a"), task("b")])


class HearingWorld(World):
    """Depends on how likely its actions were, and takes the first one for a result that the policy wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.told: tuple[float, ...] = ()
        self.heard: tuple[float, ...] = ()

    def drawn(self, logprobs) -> None:
        self.told = tuple(logprobs)

    def step(self, action: str) -> Step:
        first = not self.actions
        assert self.told, "log-probabilities come before the action, also where a path is repeated"
        self.heard, self.told = (*self.heard, *self.told), ()
        return replace(super().step(action), evidence=first)

    def snapshot(self):
        return super().snapshot(), self.heard

    def restore(self, state) -> None:
        super().restore(state[0])
        self.heard, self.told = state[1], ()

    def state_key(self) -> str:
        return f"{self.actions} {sum(self.heard):.6f}"


def test_trees_tell_log_probabilities_and_record_written_results(monkeypatch: pytest.MonkeyPatch):
    """Contract: a state that depends on how sure the policy was is the same when its path is repeated (the search checks that);
    tokens of a result that the policy wrote are evidence."""
    monkeypatch.setattr(Pool, "take", lambda self: self.free.pop() if self.free else HearingWorld())
    (tree,) = grow(["a"], iterations=24, expand_k=3, threaded=False)
    assert tree.counters["replayed_steps"] > 0
    for index, node in enumerate(tree.nodes[1:], start=1):
        written = len(tree.path(index)) == 2
        assert node.edge.owners == ((int(Owner.EVIDENCE),) * len(node.edge.token_ids) if written else ())


def test_forced_tokens_of_a_written_result_stay_forced():
    """Contract: of a turn that becomes an observation only the policy's own tokens are evidence."""
    turn = Turn(0, (7, 8, 9), (0.0, -0.5, -0.5), "stop")
    assert evidence_owners(turn) == (Owner.EVIDENCE,) * 3
    mixed = replace(turn, owners=(int(Owner.FORCED), int(Owner.POLICY), int(Owner.POLICY)))
    assert evidence_owners(mixed) == (Owner.FORCED, Owner.EVIDENCE, Owner.EVIDENCE)
