"""Preference pairs between actions taken from the same history: a pure function of the stored nodes (NODE_SCHEMA).

Rules, for the children of one parent:
  top_bottom  rStar-Math (2501.04519): winners are the `top` children of highest Q, losers the `bottom` of lowest Q; `lone` of a
              side if the other has a single child. A parent's pairs weigh 1 / (winners x losers), of those in a pair
  threshold   Agent Q (2408.07199): any two whose Q differs by more than min_margin; a parent's pairs weigh 1 / their number
  best_path   step_q: along the best path of the tree (highest return, then highest mean Q, then fewest steps, then the first),
              the action on it against the sibling of lowest Q (ties: more visits, then the first)
Under every rule both sides have min_visits, their actions differ by min_edit_distance characters (ignoring case and white space),
and Q(win) - Q(lose) >= min_margin and > 0. `outcome_gate` requires a success below the winner and a failure below the loser;
`continuation` requires a higher mean Q along the best path below the winner than below the loser, as in rStar-Math.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stages.annotation.labels import has_enough_visits, node_q, steps_to
from stages.annotation.nodes import Row, children_of, ended, path_to, totals_of, trees_of
from stages.records.actions import action_key

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

PAIR_SCHEMA = pa.schema(
    [
        ("task_id", pa.string()),
        ("parent", pa.int32()),
        ("win", pa.int32()),
        ("lose", pa.int32()),
        ("margin", pa.float64()),
        ("n_win", pa.int32()),
        ("n_lose", pa.int32()),
        ("weight", pa.float64()),
    ]
)
"""`parent`, `win` and `lose` are nodes of the task's tree, which hold the actions' tokens."""


def edit_distance(first: str, second: str, limit: int) -> int:
    """Levenshtein distance of two texts, capped at `limit`."""
    if first == second or abs(len(first) - len(second)) >= limit:
        return 0 if first == second else limit
    row = list(range(len(second) + 1))
    for place, letter in enumerate(first, start=1):
        above, row[0] = row[0], place
        for column, other in enumerate(second, start=1):
            above, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, above + (letter != other))
        if min(row) >= limit:
            return limit
    return min(row[-1], limit)


def best_path(tree: Sequence[Row], q: Sequence[float]) -> list[int]:
    """Nodes of the best path from the root to a visited end; [] if no end was visited or all ends have the same return."""
    totals = totals_of(tree)
    ends = [row["node"] for row in tree if ended(row) and row["N"] and row["node"]]
    if len({totals[end] for end in ends}) < 2:
        return []

    def rank(path: list[int]) -> tuple[float, float, int, int]:
        return (-totals[path[-1]], -sum(q[node] for node in path[1:]) / (len(path) - 1), len(path), path[-1])

    return min((path_to(tree, end) for end in ends), key=rank)


@dataclass(frozen=True)
class _RatedTree:
    """One tree with what the pair rules need, by node."""

    tree: Sequence[Row]
    children: list[list[int]]
    q: list[float]
    right: list[bool]
    """Whether the node is or leads to a successful end, or one of its rollouts succeeded."""
    wrong: list[bool]
    params: Annotate

    @classmethod
    def of(cls, tree: Sequence[Row], params: Annotate) -> _RatedTree:
        right, wrong = (steps_to(tree, success) for success in (True, False))
        # Rollouts that did not become nodes are only in the counts.
        return cls(
            tree,
            children_of(tree),
            node_q(tree, params),
            [steps is not None or row["n_success"] > 0 for steps, row in zip(right, tree, strict=True)],
            [steps is not None or row["n_success"] < row["n_rollouts"] for steps, row in zip(wrong, tree, strict=True)],
            params,
        )

    def candidates(self, parent: int) -> list[int]:
        """Children that may be in a pair."""
        visits = self.params.pairs.min_visits
        return [node for node in self.children[parent] if has_enough_visits(self.tree[node], self.params, visits)]

    def wins(self, node: int) -> bool:
        return self.right[node] or not self.params.pairs.outcome_gate

    def loses(self, node: int) -> bool:
        return self.wrong[node] or not self.params.pairs.outcome_gate

    def continuation_q(self, node: int) -> float:
        """Mean Q from a node down the visited children of highest Q."""
        found = [self.q[node]]
        while below := [child for child in self.children[node] if self.tree[child]["N"]]:
            node = max(below, key=lambda child: (self.q[child], -child))
            found.append(self.q[node])
        return sum(found) / len(found)

    def differs(self, win: int, lose: int) -> bool:
        """Whether margin, edit distance and continuations allow the pair."""
        rule, margin = self.params.pairs, self.q[win] - self.q[lose]
        if margin <= 0 or margin < rule.min_margin or (rule.rule == "threshold" and margin == rule.min_margin):
            return False
        actions = action_key(self.tree[win]["action"]), action_key(self.tree[lose]["action"])
        if edit_distance(*actions, rule.min_edit_distance) < rule.min_edit_distance:
            return False
        return not rule.continuation or self.continuation_q(win) > self.continuation_q(lose)

    # ---- rules: (win, lose) of each pair with its weight --------------------------------------------------------------------

    def top_bottom(self, parent: int) -> list[tuple[int, int, float]]:
        rule, seen = self.params.pairs, self.candidates(parent)
        winners = sorted((node for node in seen if self.wins(node)), key=lambda node: (-self.q[node], node))
        losers = sorted((node for node in seen if self.loses(node)), key=lambda node: (self.q[node], node))
        top = rule.lone if rule.lone and len(losers) == 1 else rule.top
        bottom = rule.lone if rule.lone and len(winners) == 1 else rule.bottom
        found = [(win, lose) for win in winners[:top] for lose in losers[:bottom] if self.differs(win, lose)]
        weight = 1.0 / (len({win for win, _ in found}) * len({lose for _, lose in found})) if found else 0.0
        return [(win, lose, weight) for win, lose in found]

    def threshold(self, parent: int) -> list[tuple[int, int, float]]:
        ordered = sorted(self.candidates(parent), key=lambda node: (-self.q[node], node))
        found = [
            (win, lose)
            for win in ordered
            for lose in ordered[::-1]
            if self.wins(win) and self.loses(lose) and self.differs(win, lose)
        ]
        return [(win, lose, 1.0 / len(found)) for win, lose in found]

    def along_path(self, path: Sequence[int]) -> list[tuple[int, int, int, float]]:
        """(parent, win, lose, weight) along the best path."""
        found = []
        for parent, win in pairwise(path):
            seen = self.candidates(parent)
            losers = [node for node in seen if node != win and self.loses(node)]
            if win not in seen or not losers or not self.wins(win):
                continue
            lose = min(losers, key=lambda node: (self.q[node], -self.tree[node]["N"], node))
            if self.differs(win, lose):
                found.append((parent, win, lose, 1.0))
        return found

    def pairs(self) -> list[tuple[int, int, int, float]]:
        """(parent, win, lose, weight) of the tree's pairs, by parent and rank."""
        if self.params.pairs.rule == "best_path":
            return self.along_path(best_path(self.tree, self.q))
        rule = self.top_bottom if self.params.pairs.rule == "top_bottom" else self.threshold
        return [(parent, *pair) for parent, below in enumerate(self.children) if len(below) > 1 for pair in rule(parent)]


def pair_rows(rows: Sequence[Row], params: Annotate) -> list[dict[str, Any]]:
    """Rows of PAIR_SCHEMA over all trees, by task, parent and rank."""
    pairs = []
    for task_id, tree in trees_of(rows).items():
        rated = _RatedTree.of(tree, params)
        pairs += [
            {
                "task_id": task_id,
                "parent": parent,
                "win": win,
                "lose": lose,
                "margin": rated.q[win] - rated.q[lose],
                "n_win": tree[win]["N"],
                "n_lose": tree[lose]["N"],
                "weight": weight,
            }
            for parent, win, lose, weight in rated.pairs()
        ]
    return pairs
