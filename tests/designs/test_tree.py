"""AgentSwift: selection, uncertainty, covering arrays and acquisition by hand, and limits of the search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from searches import SPACE, node, run, search, settings, true_score, uncovered

from stages.designs.covering import combinations_of, covering_array
from stages.designs.search import Search, remedies
from stages.designs.session import journal_key
from stages.designs.settings import parse_search
from stages.designs.space import COMPONENTS, DECODING, FACTORS, INDEX, Design, Space
from stages.designs.tree import (
    Node,
    backed_up,
    node_probabilities,
    selection_probabilities,
    surprise,
    uncertainties,
    visits,
)
from stages.designs.value_model import acquisition
from stages.params import parse_params
from stages.records.sections import params_hash
from stages.seeding import stream


def test_selection_probabilities_of_three_designs() -> None:
    """s = 0.8, 0.6, 0.5 with lambda 0.3 and alpha 20: exponents 0, -4, -6 without uncertainty. With beta 0.3 and u = 0.3 for the
    second: 0.7 s + 0.3 u = 0.56, 0.51, 0.35, exponents 0, -1, -4.2."""
    of: dict[str, Any] = {"scores": [0.8, 0.6, 0.5], "lam": 0.3, "alpha": 20.0}
    plain = selection_probabilities(uncertainty=[0, 0, 0], beta=0.0, **of)
    assert plain == pytest.approx([0.7857, 0.1126, 0.1017], abs=5e-5)
    unsure = selection_probabilities(uncertainty=[0, 0.3, 0], beta=0.3, **of)
    assert unsure == pytest.approx([0.6062, 0.2862, 0.1076], abs=5e-5)


def test_selection_probabilities_in_the_limits() -> None:
    scores, third = [0.8, 0.6, 0.5], [1 / 3] * 3
    assert selection_probabilities(scores, [0, 0, 0], lam=1.0, alpha=20, beta=0) == pytest.approx(third)
    assert selection_probabilities(scores, [0, 0.9, 0], lam=0.3, alpha=0, beta=0.3) == pytest.approx(third)
    for beta in (0.0, 0.3, 1.0):
        found = selection_probabilities(scores, [0.1, 0.4, 0.2], lam=0.3, alpha=20, beta=beta)
        assert found.sum() == pytest.approx(1.0)
        assert (found >= 0.1 - 1e-12).all()
    sharp = selection_probabilities([0.9, 0.1], [0, 0], lam=0.0, alpha=1e6, beta=0.0)
    assert sharp.tolist() == [1.0, 0.0], "greedy, without overflow"
    with pytest.raises(ValueError, match="no design was evaluated"):
        selection_probabilities([], [], lam=0.3, alpha=20, beta=0)


def test_selection_is_shift_invariant() -> None:
    """s_max cancels: shifting all scores leaves the probabilities unchanged."""
    scores, u = [0.2, 0.35, 0.1], [0.1, 0.0, 0.2]
    first = selection_probabilities(scores, u, lam=0.3, alpha=20, beta=0.3)
    moved = selection_probabilities([s + 0.5 for s in scores], u, lam=0.3, alpha=20, beta=0.3)
    assert moved == pytest.approx(first, abs=1e-12)


def test_failed_design_is_selected_only_by_the_uniform_share() -> None:
    found = selection_probabilities([0.5, 0.0, 0.4], [0, 0.9, 0], lam=0.3, alpha=20, beta=0.3, failed=[False, True, False])
    assert found[1] == pytest.approx(0.1)
    assert found.sum() == pytest.approx(1.0)
    assert selection_probabilities([0.0], [0.0], lam=0.3, alpha=20, beta=0, failed=[True]).tolist() == [1.0]
    assert uncertainties([node(0.0, predicted=0.9, failed="no such file")], settings().design.tree) == [0.0]


def test_uncertainty_is_surprise_minus_noise() -> None:
    """|0.80 - 0.65| = 0.15; subtract_noise takes off the standard error, such as 0.0625 of s = 0.5 on 64 tasks."""
    assert surprise(0.80, 0.65) == pytest.approx(0.15)
    assert surprise(0.5, 0.6, 0.0625) == pytest.approx(0.0375)
    assert surprise(0.5, 0.55, 0.0625) == 0.0
    nodes = [node(0.8, -1), node(0.8, 0, 0.65, std=0.2, error=0.05)]
    trees = [settings(tree=tree).design.tree for tree in ({}, {"subtract_noise": False}, {"uncertainty": "std"})]
    assert [uncertainties(nodes, tree)[1] for tree in trees] == pytest.approx([0.10, 0.15, 0.2])
    assert uncertainties(nodes, trees[0])[0] == 0.0, "the root has no prediction"


def test_backup_over_subtrees() -> None:
    """0 -> 1, 2; 1 -> 3: means over the subtrees."""
    values, parents = [0.4, 0.6, 0.2, 0.8], [-1, 0, 0, 1]
    assert backed_up(values, parents, "mean") == pytest.approx([0.5, 0.7, 0.2, 0.8])
    assert backed_up(values, parents, "max") == [0.8, 0.8, 0.2, 0.8]
    assert backed_up(values, parents, "none") == values
    assert visits(parents) == [4, 2, 1, 1]
    nodes = [node(value, parent) for value, parent in zip(values, parents, strict=True)]
    tree = settings(tree={"backup": "max"}).design.tree
    assert node_probabilities(nodes, tree, 0.0) == pytest.approx(
        selection_probabilities([0.8, 0.8, 0.2, 0.8], [0] * 4, lam=0.3, alpha=20, beta=0)
    )


def test_covering_arrays_cover_all_combinations() -> None:
    """Three factors of two: the rows 000, 011, 101, 110 cover all 12 pairs, three of them do not; strength three is the full
    factorial."""
    rows = [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    assert len(combinations_of([2, 2, 2], 2)) == 12
    assert uncovered(rows, [2, 2, 2], 2) == set()
    assert len(uncovered(rows[:3], [2, 2, 2], 2)) == 3
    for sizes in ([2, 2, 2], [4, 3, 2, 3], [4], [3, 1, 2]):
        for strength in (1, 2):
            found = covering_array(sizes, strength, 1)
            assert uncovered(found, sizes, strength) == set()
            assert len(found) <= 1.5 * np.prod(sorted(sizes)[-strength:])
            assert found == covering_array(sizes, strength, 1)
    assert len(covering_array([2, 2, 2], 2, 0)) == 4
    assert sorted(covering_array([2, 2, 2], 3, 0)) == sorted(product(range(2), repeat=3))
    assert covering_array([2, 2], 0, 0) == covering_array([], 2, 0) == []


def test_acquisition_of_promising_and_poor_designs() -> None:
    """mu 0.5, sigma 0.1, kappa 2: 0.7 for a promising design, -0.3 for a poor one."""
    mean, std = np.array([0.5]), np.array([0.1])
    assert acquisition(mean, std, 2.0, 1)[0] == pytest.approx(0.7)
    assert acquisition(mean, std, 2.0, -1)[0] == pytest.approx(-0.3)


def test_equivalent_designs_are_merged() -> None:
    space = Space.of(settings())
    names = {name: space.all()[0][INDEX[name]] for name in INDEX}
    assert names["model"] == "sft"
    designs = space.all()
    # greedy: 3 windows * 3 recalls; one draw: twice that; votes: twice that for each number of draws.
    assert len(designs) == len(set(designs)) == 9 * (1 + 2 + 2 * 2)
    assert space.root in designs
    assert all(space.canonical(design) == design for design in designs)
    assert len({space.name(design) for design in designs}) == len(designs)
    vote = next(d for d in designs if d[INDEX["choose"]] == "vote")
    values = space.overrides(vote)["evaluate"]
    assert values["models"] == ["sft+vote"]
    assert set(values) == {"models", "best_of", "sampling", "scaffold"}
    parse_params({"domains": ["search"], "per_domain": {"search": {}}, **space.overrides(vote)})
    assert space.label(space.root) == "as params.yaml has it"
    assert "choose vote" in space.label(vote)


def test_top_k_1_is_greedy_like_temperature_0() -> None:
    """Contract: no choice among equal draws, and one form of greedy designs: temperature 0 where that is an option."""
    top_k = INDEX["top_k"]
    space = Space.of(settings({**SPACE, "top_k": [0, 1]}))
    assert len(space.all()) == 9 * (1 + 2 + 2 * 2)
    assert {design[top_k] for design in space.all()} == {0}
    space = Space.of(settings({**SPACE, "top_k": [0, 1], "temperature": [0.5, 1.0]}))
    greedy = [design for design in space.all() if design[top_k] == 1]
    assert len(space.all()) == 9 * (1 + 2 + 2 * 2)
    assert {(design[INDEX["choose"]], design[INDEX["temperature"]]) for design in greedy} == {("none", 0.5)}
    for design in space.all():
        parse_params({"domains": ["search"], "per_domain": {"search": {}}, **space.overrides(design)})


SCORING: dict[str, Any] = {**SPACE, "choose": ["none", "logprob", "vote"], "per_token": [False, True]}


def test_per_token_is_a_factor_only_of_choices_by_score() -> None:
    """Contract: per_token varies only where logprob or value chooses; labels cover each choice with each way of scoring."""
    space = Space.of(settings(SCORING))
    by_choice: dict[str, set[bool]] = {}
    for design in space.all():
        by_choice.setdefault(design[INDEX["choose"]], set()).add(design[INDEX["per_token"]])
        values = space.overrides(design)["evaluate"]
        assert values["best_of"]["per_token"] is design[INDEX["per_token"]]
    assert by_choice == {"none": {False}, "logprob": {False, True}, "vote": {False}}
    assert len(space.all()) == 9 * (1 + 2 + 2 * 2 + 2 * 2 * 2)
    for strength in (1, 2):
        labels = run(search(settings(SCORING, labels={"strength": strength, "balanced": 0}), seed=3))
        covered = {(one.design[INDEX["choose"]], one.design[INDEX["per_token"]]) for one in labels if one.origin == "covering"}
        assert covered | {("none", False)} == {("none", False), ("logprob", False), ("logprob", True), ("vote", False)}
    without = Space.of(settings({**SCORING, "choose": ["none", "vote"]}))
    assert without.options[INDEX["per_token"]] == (False,), "votes have no scores"


def test_space_without_per_token_keeps_names_and_journals() -> None:
    """Contract: designs keep the names under which they were evaluated, journals their keys, and a space with the factor reuses
    evaluations of one without it."""
    space = Space.of(settings())
    assert space.name(space.root) == "7cd9b54df606"
    assert space.name(next(design for design in space.all() if design[INDEX["choose"]] == "vote")) == "029b386d924a"
    assert set(space.factor_options) == set(INDEX) - {"per_token"}
    assert "per_token" not in space.overrides(space.root)["evaluate"]["best_of"]
    old, new = Space.of(settings({**SCORING, "per_token": None})), Space.of(settings(SCORING))
    names = {old.name(design) for design in old.all()}
    assert names == {new.name(design) for design in new.all() if not design[INDEX["per_token"]]}
    assert len({new.name(design) for design in new.all()}) == len(new.all())
    assert old.restored(list(old.root)[:-1]) == old.root
    shaping = settings().design.model_dump(mode="json", exclude={"budget": True, "confirm": True, "space": {"per_token"}})
    assert journal_key(settings().design, 4) == params_hash({**shaping, "seed": 4})
    assert journal_key(settings(SCORING).design, 4) != journal_key(settings({**SCORING, "per_token": None}).design, 4)


def test_choice_by_value_is_available_with_b_coder() -> None:
    params = parse_search(
        {
            "domains": ["search"],
            "per_domain": {"search": {"rollout": {"tasks": 96}, "rl": {"algorithm": "b_coder"}}},
            "design": {"space": {**SCORING, "choose": ["value"]}},
        }
    )
    space = Space.of(params)
    chosen = {design[INDEX["per_token"]]: design for design in space.all() if design[INDEX["choose"]] == "value"}
    assert set(chosen) == {False, True}
    assert space.overrides(chosen[True])["evaluate"]["models"] == ["sft+value"]


def test_labels_are_covering_then_promising_and_poor() -> None:
    one = search(settings(labels={"strength": 2, "balanced": 4}))
    nodes = run(one, budget=18)
    origins = [item.origin for item in nodes]
    assert origins[0] == "root"
    assert nodes[0].design == one.space.root
    covering = origins.count("covering")
    assert origins == ["root", *["covering"] * covering, *["promising", "poor"] * 2, *["tree"] * (13 - covering)]
    places = one.space.free()
    rows = [tuple(one.space.options[place].index(item.design[place]) for place in places) for item in nodes]
    assert uncovered(rows[: covering + 1], [len(one.space.options[place]) for place in places], 2) == set()


@pytest.mark.parametrize("method", ["agentswift", "unguided", "random"])
def test_search_evaluates_new_designs_within_the_budget(method: str) -> None:
    """Contract: every evaluation is of a new design, up to the budget or all designs; the same seed gives the same search, and a
    stopped one continues identically."""
    one = search(settings(method=method, budget=16, labels={"balanced": 4}))
    nodes = run(one)
    assert len(nodes) == len({item.design for item in nodes}) == 16
    assert one.propose(nodes) is None
    assert all(item.parent < place for place, item in enumerate(nodes))
    again = search(settings(method=method, budget=16, labels={"balanced": 4}))
    proposal = again.propose(nodes[:12])
    assert proposal is not None
    assert (proposal.design, proposal.parent) == (nodes[12].design, nodes[12].parent)
    others = {tuple(item.design for item in run(search(settings(method=method, budget=5), seed=seed))) for seed in range(2)}
    assert len(others) == 2
    few = {**SPACE, "window": [None], "recall": ["none"], "choose": ["none"]}
    everything = run(search(settings(few, method=method, budget=50)))
    assert len(everything) == len(Space.of(settings(few)).all()) == 3


def test_single_component_evaluates_each_option_once() -> None:
    few = {**SPACE, "choose": ["none"], "recall": ["none"], "temperature": [0.5]}
    for method in ("agentswift", "unguided"):
        nodes = run(search(settings(few, method=method, labels={"strength": 0, "balanced": 0})))
        assert Counter(item.design[INDEX["window"]] for item in nodes) == Counter([1, 2, None])


class PerfectModel:
    """Predicts the true scores."""

    def __init__(self, space: Space) -> None:
        self.space = space

    def fit(self, nodes: Sequence[Node]) -> None: ...

    def predict(self, designs: Sequence[Design]) -> tuple[np.ndarray, np.ndarray]:
        return np.array([true_score(self.space, design) for design in designs]), np.zeros(len(designs))


def test_perfect_model_climbs_greedily() -> None:
    """Contract: with true scores as predictions and beta 0 every proposal is the best of its candidates, operation by operation,
    and the optimum is found in fewer evaluations than at random."""
    params = settings(
        labels={"strength": 0, "balanced": 0}, tree={"beta": 0.0, "lam": 0.0, "alpha": 1e6, "proposals": 50}, budget=8
    )
    space = Space.of(params)
    best = max(true_score(space, design) for design in space.all())
    one = search(params, value_model=PerfectModel(space))
    nodes = run(one)

    def best_of(candidates: Sequence[Design]) -> Design:
        return max(sorted(set(candidates), key=space.order), key=lambda design: true_score(space, design))

    for place, item in enumerate(nodes[1:], start=1):
        before, parent, rng = nodes[:place], nodes[item.parent], stream("any")  # with so few candidates all are considered
        if item.origin == "random":
            assert max(done.score for done in before) == best, "no better design is left"
            continue
        design = best_of([parent.design, *one.recombined(parent.design, [done.design for done in before], rng)])
        design = best_of([design, *one.mutated(design, rng)])
        last = {design, *one.refined(design, parent, rng)} - {done.design for done in before}
        assert item.design == best_of(list(last))

    def evaluations(found: list[Node]) -> int:
        return next(count for count, item in enumerate(found, start=1) if item.score == best)

    drawn = [evaluations(run(search(settings(method="random", budget=100), seed=seed))) for seed in range(8)]
    assert evaluations(nodes) < np.mean(drawn) / 2
    assert max(item.score for item in nodes[:4]) == best, "each proposal makes the best three changes"
    assert [item.predicted for item in nodes[1:]] == [item.score for item in nodes[1:]]
    assert uncertainties(nodes, params.design.tree) == [0.0] * len(nodes)


@pytest.mark.parametrize("lam", [0.0, 0.4])
def test_lambda_is_the_share_of_uniform_restarts(lam: float) -> None:
    """Contract: a greedy search continues from the best design, and with probability lambda from a uniformly drawn one."""
    tree = {"beta": 0.0, "lam": lam, "alpha": 1e6, "backup": "none"}
    one = search(settings(labels={"strength": 0, "balanced": 0}, tree=tree), value_model=PerfectModel(Space.of(settings())))
    nodes = [node(true_score(one.space, design), -1 + (at > 0), design=design) for at, design in enumerate(one.space.all()[::12])]
    best, count, draws = max(range(len(nodes)), key=lambda at: nodes[at].score), len(nodes), 600
    parents: Counter[int] = Counter()
    for seed in range(draws):
        one.seed = seed
        proposal = one.propose(nodes)
        assert proposal is not None
        assert proposal.origin == "tree"
        parents[proposal.parent] += 1
    share = lam / count
    for at in range(count):
        expected = share + (1 - lam) * (at == best)
        noise = (expected * (1 - expected) / draws) ** 0.5
        assert parents[at] / draws == pytest.approx(expected, abs=4 * noise)


class RandomModel:
    """Predicts random numbers that are unrelated to the scores."""

    def fit(self, nodes: Sequence[Node]) -> None: ...

    def predict(self, designs: Sequence[Design]) -> tuple[np.ndarray, np.ndarray]:
        return np.array([stream("guess", str(design)).random() for design in designs]), np.ones(len(designs))


def is_neighbour(space: Space, parent: Design, child: Design) -> bool:
    """Whether the child differs from the parent by at most a component, a factor and a decoding factor."""
    decoding = COMPONENTS[DECODING]
    changes = product(COMPONENTS.values(), set(range(len(FACTORS))) - set(decoding), decoding)
    taken = ({*component, factor, step} for component, factor, step in changes)
    mixed = ([child[place] if place in own else value for place, value in enumerate(parent)] for own in taken)
    return any(space.canonical(tuple(one)) == child for one in mixed)


@pytest.mark.parametrize("method", ["unguided", "agentswift"])
def test_single_proposal_is_random_local_search(method: str) -> None:
    """Contract: with one proposal, and no value model or a random one, at most a component, a factor and a decoding factor
    change, all changes occur, and with uniform selection proposals do not depend on scores."""
    wide = {**SPACE, "think": ["none", "plan"], "temperature": [0.0, 0.25, 0.5, 1.0]}
    params = settings(wide, method=method, tree={"proposals": 1, "lam": 1.0}, labels={"strength": 0, "balanced": 0}, budget=60)
    one = search(params, value_model=RandomModel() if method == "agentswift" else None)
    nodes, space = run(one), one.space
    assert not all(is_neighbour(space, space.root, design) for design in space.all()), "some designs are further away"
    changed: Counter[str] = Counter()
    for item in nodes[1:]:
        if item.origin == "tree":
            parent = nodes[item.parent].design
            assert is_neighbour(space, parent, item.design)
            differing = [place for place in range(len(FACTORS)) if item.design[place] != parent[place]]
            changed.update(FACTORS[place].name for place in differing)
            assert (item.predicted is None) == (method == "unguided")
    assert {"window", "recall", "temperature"} <= set(changed)
    inverted = run(one, lambda space, design: 1 - true_score(space, design))
    assert [item.design for item in inverted] == [item.design for item in nodes]


def test_operations_change_only_their_factors() -> None:
    one = search(settings(tree={"proposals": 50}))
    space, rng = one.space, stream("test")

    def differing(design: Design) -> set[str]:
        return {factor.name for factor, a, b in zip(FACTORS, design, space.root, strict=True) if a != b}

    changes: dict[str, Any] = {"window": 1, "recall": "task", "temperature": 1.0}
    other = tuple(changes.get(factor.name, value) for factor, value in zip(FACTORS, space.root, strict=True))
    swaps = [differing(design) for design in one.recombined(space.root, [other], rng)]
    assert sorted(map(sorted, swaps)) == [["recall", "window"], ["temperature"]], "one component at a time"
    for design in one.mutated(space.root, rng):
        assert len(differing(design)) == 1
        assert not differing(design) & {"temperature", "draws", "top_p"}
    steps = one.refined(space.root, node(0.5, failures={"refused": 0.5}), rng)
    assert steps[0][INDEX["temperature"]] == 0.0, "lower temperature first if actions are rejected"
    assert one.refined(space.root, node(0.5, failures={"cut": 0.5}), rng)[0][INDEX["temperature"]] == 1.0
    assert remedies({"refused": 0.1, "cut": 0.1}) == []


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ({"space": {**SPACE, "model": ["sft", "rl@shop"]}}, r"space\.model: unknown \['rl@shop'\]"),
        ({"space": {**SPACE, "choose": ["q"]}}, r"q needs a Q-model"),
        ({"space": {**SPACE, "choose": ["value"]}}, r"rl\.algorithm b_coder, but in search it is grpo"),
        (
            {"space": {**SPACE, "max_tokens": list(range(1, 2000)), "top_p": [i / 1000 for i in range(1, 1000)]}},
            r"has [\d,]+ designs",
        ),
    ],
)
def test_invalid_space_is_rejected(design: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Space.of(settings(**design))


def test_conflicting_settings_are_rejected() -> None:
    with pytest.raises(ValueError, match="lists an option twice"):
        settings({**SPACE, "draws": [3, 3]})
    with pytest.raises(ValueError, match="method random has none"):
        settings(method="random", tree={"uncertainty": "std"})
    with pytest.raises(ValueError, match="takes a value model"):
        Search(Space.of(settings()), settings().design, 0, None)
