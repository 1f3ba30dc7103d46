"""Preference pairs between actions taken from the same history: a pure function of the stored nodes (NODE_SCHEMA).

As in rStar-Math (2501.04519): below one parent, winners are the `top` children of highest Q with a correct end below, losers the
`bottom` of lowest Q with a wrong end below; a pair needs Q(win) - Q(lose) >= min_margin (and > 0), min_visits on both sides and
different actions. A parent's pairs weigh 1 / (winners x losers) each, counting those that are in a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from stages.annotation.labels import node_q, steps_to
from stages.annotation.tree import Row, children_of, trees_of
from stages.params import Annotate, Pairs

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
"""`parent`, `win` and `lose` are nodes of the task's tree; the winning and losing actions' tokens are theirs."""


def _normal(action: str) -> str:
    return " ".join(action.lower().split())


def sibling_pairs(
    tree: Sequence[Row], siblings: Sequence[int], q: Sequence[float], right: Sequence[bool], wrong: Sequence[bool], rule: Pairs
) -> list[tuple[int, int]]:
    """(win, lose) among the children of one parent, best winner first. `right`, `wrong`: a correct, a wrong end is below."""
    seen = [node for node in siblings if tree[node]["N"] >= rule.min_visits]
    winners = sorted((node for node in seen if right[node]), key=lambda node: (-q[node], node))[: rule.top]
    losers = sorted((node for node in seen if wrong[node]), key=lambda node: (q[node], node))[: rule.bottom]
    return [
        (win, lose)
        for win in winners
        for lose in losers
        if q[win] > q[lose]
        and q[win] - q[lose] >= rule.min_margin
        and _normal(tree[win]["action"]) != _normal(tree[lose]["action"])
    ]


def pair_rows(rows: Sequence[Row], params: Annotate) -> list[dict[str, Any]]:
    """Rows of PAIR_SCHEMA over all trees, by task, parent and rank."""
    pairs = []
    for task_id, tree in trees_of(rows).items():
        q = node_q(tree, params)
        right, wrong = ([steps is not None for steps in steps_to(tree, success)] for success in (True, False))
        for parent, siblings in enumerate(children_of(tree)):
            found = sibling_pairs(tree, siblings, q, right, wrong, params.pairs) if len(siblings) > 1 else []
            weight = 1.0 / (len({win for win, _ in found}) * len({lose for _, lose in found})) if found else 0.0
            pairs += [
                {
                    "task_id": task_id,
                    "parent": parent,
                    "win": win,
                    "lose": lose,
                    "margin": q[win] - q[lose],
                    "n_win": tree[win]["N"],
                    "n_lose": tree[lose]["N"],
                    "weight": weight,
                }
                for win, lose in found
            ]
    return pairs
