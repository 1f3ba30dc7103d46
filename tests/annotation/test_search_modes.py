"""Search modes beyond the default: eager expansion, value models, OmegaPRM, several leaves at once, limits of a tree."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pytest
from tabular import SIGNED, ExactReader, actions_of, grow

from stages.annotation.derived import lowest_value
from stages.annotation.labels import first_error, label_rows
from stages.annotation.nodes import node_schema, tree_values
from stages.annotation.pairs import pair_rows
from stages.annotation.plans import lazy
from stages.annotation.requests import TurnRequest
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.annotation.solutions import omega
from stages.annotation.tree import Edge, Tree
from stages.claims.known_tree import (
    ARMS,
    DEPTH,
    Chat,
    FakeEngine,
    Pool,
    World,
    policy,
    task,
    value,
)
from stages.records.episode import read_rows, write_table
from stages.seeding import key64

EAGER = {"expansion": {"kind": "eager"}}
MODEL = {**EAGER, "evaluation": {"kind": "value_model"}, "labels": {"q": "tree"}}
MODES: dict[str, dict[str, Any]] = {
    "eager": {**EAGER, "labels": {"q": "tree"}},
    "eager_state": {"expansion": {"kind": "eager", "dedupe": "state", "drop_refused": True}, "evaluation": {"rollouts": 2}},
    "discarded": {**EAGER, "evaluation": {"keep_rollouts": False}, "labels": {"q": "tree"}},
    "value_model": MODEL,
    "rest": {
        **MODEL,
        "evaluation": {"kind": "value_model", "lookahead": 3},
        "selection": {"rule": "uct_2ln", "c": 0.7, "unvisited": "bonus"},
        "backup": "children_mean",
    },
    "own_engine": {**MODEL, "evaluation": {"kind": "value_model", "backbone": "own"}, "selection": {"rule": "puct"}},
    "lats": {**EAGER, "evaluation": {"kind": "mixed"}, "selection": {"rule": "uct_2ln", "unvisited": "value"}},
    "mixed": {"evaluation": {"kind": "mixed", "value_share": 0.3}},
    "critic": {**MODEL, "evaluation": {"kind": "value_model", "critic": "value"}, "selection": {"rule": "uct_1p"}},
    "qlass": {**MODEL, "backup": "discounted_max", "gamma": 0.9, "evaluation": {"kind": "value_model"}},
    "rstar": {**EAGER, "selection": {"c": 2.0, "decay": "exponential", "unvisited": "random"}},
    "signed": {**SIGNED, "cut_return": -0.5, "max_depth": 3},
    "random": {"selection": {"rule": "random"}},
    "omega": {"selection": {"rule": "omega", "c": 0.125}, "evaluation": {"rollouts": 4}},
    "flat": {"selection": {"rule": "flat"}, "evaluation": {"rollouts": 3}, "iterations": 4},
    "wu_uct": {"leaves_per_tree": 4},
    "virtual_loss": {**MODEL, "leaves_per_tree": 4, "virtual": "loss"},
    "budget": {"stop": {"policy_tokens": 60}},
}


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


ROOT = Edge("", (), (), "", (20,), 0.0, False, False, "")


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


# ---- OmegaPRM ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [1, 2, 5, 8, 11, 15, 16])
def test_bisection_finds_the_first_error(error: int):
    """Contract: on 16 steps with k = 8, 32 rollouts (not 128) find step j if MC is 1 before it and 0 from it on."""
    tree = Tree("t", ROOT, Annotate(iterations=1, selection={"rule": "omega", "c": 0.125}, evaluation={"rollouts": 8}))
    plan = omega(tree)
    work = next(plan)
    assert work == [TurnRequest(0, number) for number in range(8)]

    def step(name: str, end: bool, reward: float = 0.0) -> Edge:
        return Edge(name, (key64(name) % 10**9,), (), "", () if end else (11,), reward, end, False, "")

    wrong = [step(f"w{depth}", depth == 16) for depth in range(1, 17)]
    results = [wrong, *([step(f"r{number}", True, 1.0)] for number in range(7))]
    measured = []
    with suppress(StopIteration):
        while True:
            work = plan.send(results)
            depth = tree.nodes[work[0].start].depth
            measured.append(depth)
            assert len(work) == 8
            results = [[step(f"{depth}-{play.number}", True, float(depth < error))] for play in work]
    assert 8 * len(measured) == 32
    assert tree.iterations == 1
    path = tree.path(16)
    # The measurements locate the error: MC 1 before it, 0 from it on.
    before = [depth for depth in measured if depth < error]
    from_error = [depth for depth in measured if depth >= error]
    assert max(before, default=0) == error - 1
    assert min(from_error, default=16) == error
    assert first_error(tree.rows(), 16) == (path[error] if error < 16 else 16)


def test_equal_rollouts_are_searched_once():
    """Contract: of four rollouts from the root three are the same failure, which is searched once."""
    tree = Tree("t", ROOT, Annotate(iterations=9, selection={"rule": "omega", "c": 0.125}, evaluation={"rollouts": 4}))
    plan = omega(tree)
    next(plan)

    def step(token: int, reward: float = 0.0, end: bool = True) -> Edge:
        return Edge(str(token), (token,), (), "", () if end else (11,), reward, end, False, "")

    (first,) = {play.start for play in plan.send([[step(1, end=False), step(2)]] * 3 + [[step(3, 1.0)]])}
    assert tree.path(first) == [0, first]
    with pytest.raises(StopIteration):
        plan.send([[step(number)] for number in range(4, 8)])
    assert tree.iterations == 1


def test_each_rollout_is_searched_at_most_once():
    """Contract: the pool holds failed rollouts of states with 0 < MC < 1; each is searched once, and a tree with an empty pool
    ends."""
    for tree in grow([f"t{number}" for number in range(6)], iterations=500, **MODES["omega"]):
        assert tree.iterations < 500
        measured = {node.index for node in tree.nodes if node.n_rollouts >= 4}
        assert 4 * max(1, len(measured)) >= tree.nodes[0].N
    certain = grow(["a"], kind="paid", iterations=3, **MODES["omega"])  # no return reaches 1, so MC is 0
    assert certain[0].iterations == 0
    assert certain[0].nodes[0].N == 4


def test_flat_measures_every_state_of_a_solution():
    """Contract: every state of a solution is measured by k rollouts, which give its MC."""
    settings = {"selection": {"rule": "flat"}, "evaluation": {"rollouts": 6}}
    for tree in grow(["a", "b"], iterations=1, **settings):
        assert tree.nodes[0].N == 1 + 6 * (DEPTH + 1)
        way = [node for node in tree.nodes if node.iteration == 1][: DEPTH + 1]
        assert all(node.n_rollouts >= 7 for node in way)
    (tree,) = grow(["a"], iterations=50, stop={"policy_tokens": 200}, **settings)
    assert 200 <= tree.counters["policy_tokens"] < 200 + 6 * 2 * (DEPTH + 1)


# ---- several leaves at once -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("virtual", ["wu_uct", "loss"])
def test_pending_visits_are_reverted_exactly(virtual: str):
    """Contract: with four leaves at once, counts and values are those of the rollouts inserted one by one."""
    (tree,) = grow(["a"], iterations=40, expand_k=3, leaves_per_tree=4, virtual=virtual)
    again = Tree("a", tree.nodes[0].edge, tree.params)
    for node in sorted((node for node in tree.nodes if node.ended), key=lambda node: node.iteration):
        edges = [tree.nodes[index].edge for index in tree.path(node.index)[1:]]
        for _ in range(node.N):
            again.insert(0, edges, node.iteration)
    assert {node.path: (node.N, node.W) for node in again.nodes} == {node.path: (node.N, node.W) for node in tree.nodes}
    assert tree.nodes[0].N == 40
    assert all(node.pending == 0 for node in tree.nodes)


def test_iterations_count_leaves_for_any_batch_size():
    """Contract: iterations count leaves, however many are evaluated at once; the last batch is no larger than what remains."""
    for leaves in (1, 3, 7):
        (tree,) = grow(["a"], iterations=20, expand_k=3, leaves_per_tree=leaves)
        assert tree.iterations == tree.nodes[0].N == 20


def test_pending_leaf_diverts_the_next_descent():
    """Contract: with equal statistics a second descent avoids the pending leaf."""
    for rule in ("wu_uct", "loss"):
        tree = Tree("t", ROOT, Annotate(expand_k=2, virtual=rule, leaves_per_tree=2))
        for token, outcome in enumerate([0.6, 0.5]):
            edges = [
                Edge(str(token), (token,), (), "", (11,), 0.0, False, False, ""),
                Edge("end", (9,), (), "", (), outcome, True, False, ""),
            ]
            tree.insert(0, edges, token + 1)
        plan = lazy(tree)
        first = tree.descend()
        tree.pend(first, 3)
        assert tree.descend(1) != first
        plan.close()


# ---- limits -----------------------------------------------------------------------------------------------------------------


def test_budget_ends_a_tree_between_iterations():
    """Contract: a tree stops with the iteration that reaches its budget of environment steps or tokens."""
    for name, counter in (("environment_steps", "environment_steps"), ("policy_tokens", "policy_tokens")):
        (tree,) = grow(["a"], iterations=500, expand_k=3, stop={name: 40})
        overshoot = 2 * (DEPTH + 1) if name == "policy_tokens" else 2 * DEPTH + 1
        assert 40 <= tree.counters[counter] < 40 + overshoot
        assert tree.nodes[0].N == tree.iterations < 500


def test_extra_iterations_follow_the_first_success():
    for tree in grow([f"t{n}" for n in range(8)], iterations=64, expand_k=3, stop={"on_success": True, "extra_after_success": 5}):
        first = tree.first_success
        assert tree.iterations == (64 if first is None else min(64, first + 5))


def test_stop_value_ends_a_tree():
    """Contract: a tree ends once the model's value of a history reaches stop.value, with or without success."""
    best = max(value(2, (a, b)) for a in range(3) for b in range(3))
    (tree,) = grow(["a"], world=2, iterations=400, expand_k=6, stop={"value": best - 1e-9}, **MODEL)
    assert max(node.model_value or 0.0 for node in tree.nodes) >= best - 1e-9
    assert tree.iterations < 400


def test_depth_one_is_a_bandit():
    """Contract: at max_depth 1 the tree is the root and its arms, and the best arm gets most visits."""

    class Bandit(World):
        def step(self, action: str):
            step = super().step(action)
            return type(step)(step.observation, [0.1, 0.9, 0.3][int(action)], True, True, False)

    class BanditPool(Pool):
        def take(self) -> World:
            return self.free.pop() if self.free else Bandit()

    params = Annotate(iterations=300, expand_k=12, max_depth=1, selection={"c": 0.3})
    (tree,) = Search(FakeEngine(), Chat(), BanditPool(), params, 5, 10_000).grow([task("a")])
    arms = {actions_of(tree, index)[0]: tree.nodes[index] for index in tree.nodes[0].children}
    assert len(tree.nodes) == 1 + ARMS
    assert [arms[arm].value for arm in range(ARMS)] == pytest.approx([0.1, 0.9, 0.3])
    assert arms[1].N > 200


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
