"""Search modes: the same trees alone and among others, eager expansion, and evaluation by rollouts and models."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tabular import EAGER, MODEL, MODES, ROOT, SIGNED, ExactReader, actions_of, grow

from stages.annotation.derived import lowest_value
from stages.annotation.labels import label_rows
from stages.annotation.nodes import node_schema, tree_values
from stages.annotation.pairs import pair_rows
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.annotation.tree import Edge, Tree
from stages.claims.known_tree import ARMS, DEPTH, Chat, FakeEngine, Pool, World, policy, task, value
from stages.records.episode import read_rows, write_table


@pytest.mark.parametrize("mode", MODES)
def test_tree_is_the_same_alone_and_among_others(tmp_path, mode: str):
    """Contract: in every mode a tree has the same bytes alone and among others, with turns in another order, and its labels,
    pairs and values follow from the stored rows."""
    settings = {"iterations": 20, "expand_k": 3, **MODES[mode]}
    together = grow([f"task{number:02d}" for number in range(10)], width=7, **settings)
    for tree in together[::4]:
        (alone,) = grow([tree.task_id], width=1, threaded=False, **settings)
        assert alone.counters == tree.counters
        for name, grown in (("alone", alone), ("together", tree)):
            write_table(tmp_path / f"{name}.parquet", node_schema(tree.params), grown.rows())
        assert (tmp_path / "alone.parquet").read_bytes() == (tmp_path / "together.parquet").read_bytes()
        stored = read_rows(tmp_path / "together.parquet")
        assert label_rows(stored, tree.params) == label_rows(tree.rows(), tree.params)
        assert pair_rows(stored, tree.params) == pair_rows(tree.rows(), tree.params)
        if tree.params.evaluation.critic == "none":
            assert tree_values(stored, tree.params) == [node.value for node in tree.nodes]
    assert len({str(tree.rows()).replace(tree.task_id, "") for tree in together}) > 5


@pytest.mark.parametrize("mode", MODES)
def test_visit_counts_are_consistent(mode: str):
    """Contract: root N = iterations x rollouts; N = the children's N + the node's own evaluations, which an inner node has only
    from a value model or from discarded rollouts; nothing stays pending."""
    for tree in grow(["a", "b"], **{"iterations": 20, "expand_k": 3, **MODES[mode]}):
        params = tree.params
        if params.selection.rule not in ("flat", "omega") and params.stop.policy_tokens is None:
            assert tree.nodes[0].N == tree.iterations * params.evaluation.rollouts == 20 * params.evaluation.rollouts
        for node in tree.nodes:
            children = [tree.nodes[index] for index in node.children]
            own = node.N - sum(child.N for child in children)
            assert own >= 0
            assert node.pending == 0
            assert node.n_success <= node.n_rollouts
            if own and not node.ended:
                assert params.evaluation.kind == "value_model" or not params.evaluation.keep_rollouts
            assert max(1.0, lowest_value(params) ** 2) * node.N + 1e-9 >= node.W2
            below = sum(child.W for child in children)
            if not own:
                assert below == pytest.approx(node.W)


def test_eager_expansion_draws_once_and_drops_duplicates():
    """Contract: `expand_k` actions are drawn at once; equal ones count as one, and children start without visits."""
    (tree,) = grow(["a"], iterations=1, expand_k=12, **EAGER)
    root = tree.nodes[0]
    drawn = [tree.nodes[index] for index in root.children]
    assert len(drawn) == ARMS
    assert tree.counters["duplicate_draws"] == 12 - ARMS
    assert [child.N for child in drawn] == [1, 0, 0]
    assert root.n_rollouts == 0
    assert drawn[0].n_rollouts == 1


class RejectingWorld(World):
    """Rejects move 0; moves 1 and 2 lead to the same state."""

    def step(self, action: str):
        if len(self.actions) < DEPTH:
            refused = action == "0"
            step = super().step("1" if action == "2" else action)
            return type(step)(step.observation, step.reward, not refused, step.terminated, step.truncated)
        return super().step(action)


class RejectingPool(Pool):
    def take(self) -> World:
        return self.free.pop() if self.free else RejectingWorld()


@pytest.mark.parametrize(
    ("expansion", "children", "refused"),
    [({}, 3, 0), ({"dedupe": "state"}, 2, 0), ({"dedupe": "state", "drop_refused": True}, 1, 1)],
)
def test_dedupe_by_state_and_drop_refused(expansion: dict[str, Any], children: int, refused: int):
    """Contract: dedupe: state merges actions that lead to one state; drop_refused omits rejected actions."""
    params = Annotate(iterations=1, expand_k=12, expansion={"kind": "eager", **expansion})
    (tree,) = Search(FakeEngine(), Chat(), RejectingPool(), params, 5, 10_000).grow([task("a")])
    assert len(tree.nodes[0].children) == children
    assert bool(tree.counters["refused_draws"]) == bool(refused)


def test_dedupe_by_text_ignores_case_and_whitespace():
    edges = [
        Edge(text, (number,), (-1.0,), "", (11,), 0.0, False, False, str(number)) for number, text in enumerate(["Go  n", "go n"])
    ]
    for dedupe, count in (("tokens", 2), ("text", 1), ("state", 2)):
        tree = Tree("t", ROOT, Annotate(expansion={"kind": "eager", "dedupe": dedupe}))
        assert len(tree.draw(0, edges, 1)) == count


def test_leaves_of_all_trees_are_evaluated_in_one_batch():
    """Contract: the leaves that all trees wait for are evaluated together, each history once, in the tree's units."""
    engine = FakeEngine(width=64)
    reader = ExactReader(engine)
    params = Annotate(iterations=8, expand_k=3, **SIGNED, **MODEL)
    search = Search(engine, Chat(), Pool(), params, 0, 10_000, threaded=False, reader=reader)
    trees = search.grow([task(f"t{number}") for number in range(12)])
    assert reader.batches[0] == 12
    assert sum(reader.batches) == sum(tree.counters["values_read"] for tree in trees)
    assert len(reader.batches) < 12 * 8 / 3
    for tree in trees:
        read = [node for node in tree.nodes if node.model_value is not None and not node.ended]
        assert len(read) == tree.counters["values_read"]
        assert all(node.model_value == pytest.approx(2 * value(0, actions_of(tree, node.index)) - 1) for node in read)
    assert not engine.sessions, "open sessions"


def test_search_without_its_value_model_is_rejected():
    with pytest.raises(ValueError, match="needs a value model"):
        Search(FakeEngine(), Chat(), Pool(), Annotate(**MODEL), 0, 10_000)


def test_lookahead_averages_leaf_value_and_best_future_value():
    """Contract: V <- V/2 + (largest V along the greedy turns)/2, once, at the leaf; without lookahead the leaf's own V."""
    (plain,) = grow(["a"], iterations=1, **MODEL)
    settings = {**MODEL, "evaluation": {"kind": "value_model", "lookahead": 2}}
    (tree,) = grow(["a"], iterations=1, **settings)
    way = [node for node in tree.nodes[1:] if node.iteration == 1 and node.model_value is not None]
    ahead = [value(0, actions_of(tree, node.index)) for node in way[:2]]
    assert [node.depth for node in way[:2]] == [1, 2]
    assert plain.nodes[0].value == pytest.approx(value(0, ()))
    assert tree.nodes[0].value == pytest.approx(0.5 * value(0, ()) + 0.5 * max(ahead))


def test_mixed_evaluation_weights_return_and_value():
    """Contract: (1 - share) * return + share * V of the leaf is backed up; rollouts are counted separately."""
    (tree,) = grow(["a"], iterations=1, evaluation={"kind": "mixed", "value_share": 0.25})
    outcome = tree.nodes[-1].total
    assert tree.nodes[0].value == pytest.approx(0.75 * outcome + 0.25 * value(0, ()))
    assert (tree.nodes[0].n_rollouts, tree.nodes[0].n_success) == (1, outcome)


def test_signed_rewards_and_truncated_episodes():
    """Contract: with reward_range [-1, 1] outcomes 1, 1, 0, 1 give W = 2; a truncated episode counts as cut_return."""
    tree = Tree("t", ROOT, Annotate(**SIGNED, expand_k=9))
    for token, outcome in enumerate([1.0, 1.0, 0.0, 1.0]):
        tree.insert(0, [Edge("", (token,), (), "", (), outcome, True, False, "")], token + 1)
    assert (tree.nodes[0].W, tree.nodes[0].W2, tree.nodes[0].N, tree.nodes[0].value) == (2.0, 4.0, 4, 0.5)
    assert (tree.nodes[0].n_success, tree.nodes[0].n_rollouts) == (3, 4)
    (tree,) = grow(["a"], iterations=5, max_depth=2, **SIGNED, cut_return=-0.5)
    assert tree.nodes[0].value == -0.5
    assert tree.nodes[0].n_success == 0


def test_exact_value_model_finds_good_first_moves_without_rollouts():
    """Contract: no rollout is played, and the better moves get the visits."""
    for world in (1, 2, 4):
        (tree,) = grow(["a"], world=world, iterations=200, expand_k=12, selection={"c": 0.2}, **MODEL)
        root = tree.nodes[0]
        assert all(node.n_rollouts <= node.ended for node in tree.nodes)
        most_visited = max(root.children, key=lambda index: tree.nodes[index].N)
        best = max(((arm,) for arm in range(ARMS)), key=lambda move: value(world, move, best=True))
        assert value(world, actions_of(tree, most_visited), best=True) >= 0.8 * value(world, best, best=True)


def test_random_selection_ignores_values():
    """Contract: the control visits siblings equally often, whatever their outcomes."""
    (tree,) = grow(["a"], kind="paid", iterations=1500, expand_k=6, selection={"rule": "random"})
    visits = [tree.nodes[index].N for index in tree.nodes[0].children]
    assert max(visits) < 1.35 * min(visits)


def test_incomplete_snapshot_is_reported():
    """Contract: a state that differs when it is revisited ends the search."""

    class Inconsistent(World):
        def state_key(self) -> str:
            World.steps += 1
            return f"{self.actions} {World.steps}"

    class InconsistentPool(Pool):
        def take(self) -> World:
            return Inconsistent()

    with pytest.raises(ValueError, match="snapshots of the whole state"):
        Search(FakeEngine(), Chat(), InconsistentPool(), Annotate(), 0, 10_000).grow([task("a")])


def test_prior_is_the_mean_token_logprob():
    (tree,) = grow(["a"], iterations=2, expand_k=6, **EAGER)
    for index in tree.nodes[0].children:
        (arm,) = actions_of(tree, index)
        assert tree.nodes[index].prior == pytest.approx(math.log(policy(0, ())[arm]) / 2)
