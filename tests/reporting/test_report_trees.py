"""The tree viewer's data: which trees are chosen, what is shown of them, and the size limit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stages.annotation.correct_paths import path_episode
from stages.annotation.labels import label_rows
from stages.annotation.pairs import pair_rows
from stages.annotation.settings import Annotate
from stages.records.forgotten import left_context
from stages.reporting.sections.search import path_table
from stages.reporting.tree_summary import BACKUPS, LABELS, meanings
from stages.reporting.trees import EVEN, DomainTrees, choose, forest, left_on_path, opening_text, pack

PARAMS = Annotate()


def row(task: str, node: int, parent: int, n: int, c: int, end: bool = False, **changes: Any) -> dict[str, Any]:
    base = {"task_id": task, "node": node, "parent": parent, "depth": int(node > 0) + int(parent > 0), "action": f"go {node}"}
    base |= {"N": n, "W": float(c), "n_success": c, "n_rollouts": n, "prior": -float(node), "observation": f"room {node}"}
    base |= {"reward": float(end and c > 0), "terminal": end, "truncated": False, "context_ids": [node]}
    base |= dict.fromkeys(("R", "R2"), 0.0 if end else float(c))
    return {**base, **changes}


def tree(task: str, good: int = 4) -> list[dict[str, Any]]:
    """A root and two actions: the first ends in success, the second in failure."""
    return [
        row(task, 0, -1, good + 2, good),
        row(task, 1, 0, good, good),
        row(task, 2, 0, 2, 0),
        row(task, 3, 1, good, good, end=True),
        row(task, 4, 2, 2, 0, end=True),
    ]


def domain_trees(*trees: list[dict[str, Any]]) -> DomainTrees:
    nodes = [node for one in trees for node in one]
    return DomainTrees(nodes, label_rows(nodes, PARAMS), pair_rows(nodes, PARAMS), PARAMS)


def test_packed_tree_has_all_that_the_viewer_shows() -> None:
    """Contract: values, visits, priors normalised over siblings, ends, the most visited path and the pairs."""
    given = domain_trees(tree("a"))
    packed = pack("search", EVEN, given, None)
    first, second = packed["nodes"][1], packed["nodes"][2]
    assert (first["N"], first["Q"], first["right"], first["rollouts"]) == (4, 1, 4, 4)
    assert first["prior"] + second["prior"] == pytest.approx(1.0, abs=2e-3)
    assert first["prior"] > second["prior"]
    assert packed["path"] == [0, 1, 3]
    assert packed["pairs"] == [[1, 2, 1, 1]]
    assert [node.get("end") for node in packed["nodes"]] == [None, None, None, "success", "failure"]
    assert first["away"] == 1
    assert packed["nodes"][0]["answer"] == "room 0"
    assert "advantage" not in packed["nodes"][0]
    text = packed["summary"]
    assert "4 of 6 rollouts succeed" in text
    assert "1 success, 1 failure" in text
    assert "“go 1” over “go 2”, q differs by 1.00" in text
    alone = pack("search", "random", domain_trees(tree("a")[:1]), None)
    assert "No preference pairs" in alone["summary"]
    assert "No success found" in alone["summary"]
    assert alone["path"] == [0]


def hiding_tree() -> list[dict[str, Any]]:
    """Four turns in a row, of which the third and the fourth hide the first observation, and a second branch after the first
    turn, which hides it at once and, with its end, would hide the turn before."""
    nodes = [row("a", node, node - 1, 9 - node, 4, depth=node) for node in range(5)]
    nodes[3]["forgets"], nodes[4]["forgets"] = 2, 3
    nodes += [row("a", 5, 1, 3, 0, depth=2, forgets=1), row("a", 6, 5, 3, 0, depth=3, end=True, forgets=1)]
    return nodes


def test_hidden_observations_are_marked_as_in_episodes() -> None:
    """Contract: a node that hides an observation says whose; the first on a path counts, and the end of an episode hides none.
    The reading is that of the path as an episode."""
    nodes = hiding_tree()
    packed = pack("search", "", domain_trees(nodes), None)
    assert [node.get("hides") for node in packed["nodes"]] == [None, None, None, 1, None, 1, None]
    for path in ([0, 1, 2, 3, 4], [0, 1, 5, 6]):
        full = [{**node, "token_ids": [1], "logprob": [0.0], "state_key": ""} for node in nodes]
        left = left_context(path_episode(full, path, "search").forgotten)
        assert left_on_path(nodes, path) == {path[turn + 1]: by for turn, by in left.items()}
    assert all("hides" not in node for node in pack("search", "", domain_trees(tree("a")), None)["nodes"])


def test_the_table_of_the_most_visited_path_marks_them_too() -> None:
    """Contract: readers without scripts are told; a path that hides nothing has no column for it."""
    table = path_table(hiding_tree())
    assert table.header[-1] == "observation"
    assert [row[-1] for row in table.rows] == ["left the context after turn 3", "", "", ""]
    assert "observation" not in path_table(tree("a")).header


def test_pair_margin_is_the_difference_of_its_nodes_q() -> None:
    """Contract: a node shows the q used for pairs beside the tree's value, and the value range is the tree's."""
    params = Annotate(reward_range=[-1.0, 1.0], labels={"q": "hard"}, pairs={"min_margin": 0.1})
    nodes = tree("a")
    nodes[0]["W"], nodes[1]["W"], nodes[2]["W"] = 2.0, 1.0, -2.0
    packed = pack("search", "", DomainTrees(nodes, label_rows(nodes, params), pair_rows(nodes, params), params), None)
    assert packed["range"] == [-1.0, 1.0]
    assert packed["words"]["scale"] == "−1 = failure, 1 = success"
    assert packed["words"]["q"] == LABELS["hard"]
    assert "Q 0.25 vs. 0.33 before it (−1 = failure, 1 = success)" in packed["summary"]
    first, second = packed["nodes"][1], packed["nodes"][2]
    assert (first["Q"], first["q"], second["Q"], second["q"]) == (0.25, 1, -1, 0)
    ((win, lose, margin, _),) = packed["pairs"]
    assert packed["nodes"][win]["q"] - packed["nodes"][lose]["q"] == margin
    bare = row("a", 5, 0, 2, 0, n_rollouts=0)
    nodes.append(bare)
    packed = pack("search", "", DomainTrees(nodes, [], [], params), None)
    assert "q" not in packed["nodes"][5], "a node without rollouts has no q"


def test_opening_text_is_the_decoded_prompt() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return f" prompt {ids} "

    assert opening_text(row("a", 0, -1, 1, 0), Tokenizer()) == "prompt [0]"
    assert opening_text(row("a", 0, -1, 1, 0), None) == "room 0"


def test_choice_is_even_tree_then_most_pairs_then_random() -> None:
    """Contract: the tree nearest to 50 % success, the one with most pairs, then others by seed; none twice."""
    trees = [tree("a", 9), tree("b", 2), tree("c", 30), tree("d", 9)]
    more = row("c", 5, 0, 4, 0)
    trees[2] += [more, row("c", 6, 5, 4, 0, end=True)]
    given = domain_trees(*trees)
    picked = choose(given.nodes, given.pairs, 4, 0)
    assert picked[:2] == [("b", EVEN), ("c", "most pairs")]
    assert sorted(task for task, _ in picked) == ["a", "b", "c", "d"]
    assert picked == choose(given.nodes[::-1], given.pairs[::-1], 4, 0)
    assert len({tuple(choose(given.nodes, given.pairs, 4, seed)) for seed in range(8)}) > 1
    assert choose(given.nodes, given.pairs, 0, 0) == []
    assert choose([], [], 3, 0) == []


def test_size_limit_drops_whole_trees_evenly_over_domains() -> None:
    """Contract: trees beyond the size limit are dropped, evenly over domains, and counted."""
    given = domain_trees(*(tree(name) for name in "abcd"))
    everything, requested = forest({"search": given, "shop": given}, 3, None, 0)
    assert (len(everything), requested) == (6, 6)
    size = len(json.dumps(everything[0], separators=(",", ":")))
    some, requested = forest({"search": given, "shop": given}, 3, None, 0, limit=3 * size)
    assert [one["domain"] for one in some] == ["search", "shop"]
    assert requested == 6
    assert forest({}, 3, None, 0) == ([], 0)


def test_summary_counts_ends_by_kind() -> None:
    cut = tree("a")
    cut[4] |= {"terminal": False, "truncated": True}
    assert "1 success, 1 truncated" in pack("search", "", domain_trees(cut), None)["summary"]


def test_summary_names_first_choice_and_shortest_success() -> None:
    """Contract: an action that all visits share is no choice; the summary names the first node with several visited children."""
    nodes = [
        row("a", 0, -1, 4, 2),
        row("a", 1, 0, 4, 2),
        row("a", 2, 1, 3, 2, depth=2),
        row("a", 3, 1, 1, 0, depth=2, end=True),
        row("a", 4, 2, 3, 2, depth=3),
        row("a", 5, 4, 2, 2, depth=4, end=True),
    ]
    packed = pack("search", "", domain_trees(nodes), None)
    text = packed["summary"]
    assert "First choice after “go 1”: “go 2” has 3 of 4 visits (2 actions tried), Q 0.67 vs. 0.50" in text
    assert "Shortest success: “go 1” → “go 2” → “go 4” → “go 5”." in text
    assert [node.get("prior") is None for node in packed["nodes"]] == [True, True, False, False, True, True]
    assert all("logprob" in node for node in packed["nodes"][1:])
    chain = pack("search", "", domain_trees([nodes[0], nodes[1]]), None)["summary"]
    assert "all visits take “go 1”, Q 0.50" in chain
    assert "First choice at the start: " in pack("search", "", domain_trees(tree("a")), None)["summary"]


def test_long_paths_are_abbreviated() -> None:
    nodes = [row("a", node, node - 1, 2, 2, depth=node, end=node == 12) for node in range(13)]
    assert "“go 7” → … → “go 12”." in pack("search", "", domain_trees(nodes), None)["summary"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"backup": "max"}, "maximum over the child actions"),
        ({"backup": "discounted_max", "gamma": 0.9}, "best of the tried actions"),
        ({"backup": "children_mean"}, "weighted by visits"),
        (
            {"expansion": {"kind": "eager"}, "evaluation": {"kind": "value_model"}, "labels": {"q": "tree"}},
            "by the step-value model",
        ),
        ({"expansion": {"kind": "eager"}, "evaluation": {"kind": "mixed"}}, "by rollouts and the step-value model"),
        ({"evaluation": {"critic": "prior"}}, "the policy's ranking of siblings"),
    ],
)
def test_legend_describes_q_of_the_configured_search(changes: dict[str, Any], text: str) -> None:
    """Contract: the legend describes Q as this search computes it, not as another would."""
    assert text in meanings(Annotate(**changes))["Q"]
    assert text not in meanings(PARAMS)["Q"]


def test_every_setting_and_scale_is_described() -> None:
    fields = Annotate.model_fields
    assert set(BACKUPS) == set(fields["backup"].annotation.__args__)
    assert set(LABELS) == set(type(PARAMS.labels).model_fields["q"].annotation.__args__)
    assert meanings(PARAMS)["scale"] == "0 = failure, 1 = success"
    assert meanings(Annotate(returns=[-6.0, 0.0], reward_range=[-6.0, 0.0]))["scale"] == "−6 = worst, 0 = best"
    assert "min-max scaled" in meanings(Annotate(labels={"scale": "min_max"}))["q"]


def test_even_tree_is_chosen_by_the_value_range() -> None:
    """Contract: if a failure counts as -1, the tree nearest to 50 % success has value 0."""
    given = domain_trees(tree("even", 2), tree("good", 4))
    for node in given.nodes:
        node["W"] = 2.0 * node["n_success"] - node["N"]
    assert choose(given.nodes, [], 1, 0, limits=(-1.0, 1.0)) == [("even", EVEN)]
    assert choose(given.nodes, [], 1, 0) == [("good", EVEN)]
