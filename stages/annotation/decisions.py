"""Training data of Q-models: a history and alternative actions after it. Pure functions of the stored nodes and pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stages.annotation.continuations import Continuation, continuation, history_of, pair_tokens, path_tokens
from stages.annotation.labels import hard, node_q
from stages.annotation.nodes import Row, children_of, ended, path_to, trees_of
from stages.annotation.settings import Annotate


@dataclass(frozen=True)
class Decision:
    """A alternative actions after a history (a pair's winner first), their `q` [A] and `weight` [A] in the loss."""

    task_id: str
    history: tuple[int, ...]
    actions: tuple[tuple[int, ...], ...]
    policy: tuple[tuple[bool, ...], ...]
    """Which of an action's tokens the policy wrote."""
    q: tuple[float, ...]
    weight: tuple[float, ...]

    @property
    def rows(self) -> int:
        return len(self.actions)

    @property
    def width(self) -> int:
        return len(self.history) + max(len(action) for action in self.actions)

    @property
    def total(self) -> float:
        return sum(self.weight)


def _decision(
    task_id: str,
    history: tuple[int, ...],
    sides: Sequence[Continuation],
    weight: Sequence[float],
    q: Sequence[float] | None = None,
) -> Decision:
    actions, policy = tuple(side.token_ids for side in sides), tuple(side.policy for side in sides)
    return Decision(task_id, history, actions, policy, tuple(q or (side.value for side in sides)), tuple(weight))


def step_pairs(rows: Sequence[Row], pairs: Sequence[Mapping[str, Any]]) -> list[Decision]:
    """The preference pairs (rows of PAIR_SCHEMA) of trees (rows of NODE_SCHEMA); each side has half its pair's weight."""
    found = pair_tokens(rows, pairs, "step")
    return [_decision(pair.task_id, pair.history, (pair.win, pair.lose), [pair.weight / 2] * 2) for pair in found]


def trajectory_pairs(rows: Sequence[Row], params: Annotate) -> list[Decision]:
    """Pairs of full episodes of one task: each of its first `pairs.top` successes with each of its first `pairs.bottom`
    failures, in the order they were found; a task's pairs have a total weight of 1."""
    found = []
    for task_id, tree in trees_of(rows).items():
        ends = [row["node"] for row in tree if ended(row)]
        right = [node for node in ends if hard(tree[node])][: params.pairs.top]
        wrong = [node for node in ends if not hard(tree[node])][: params.pairs.bottom]
        history = history_of(tree, 0)
        for win in right:
            for lose in wrong:
                sides = [_episode(tree, node) for node in (win, lose)]
                found.append(_decision(task_id, history, sides, [0.5 / (len(right) * len(wrong))] * 2))
    return found


def _episode(tree: Sequence[Row], end: int) -> Continuation:
    """All turns from the task's start to `end`."""
    return Continuation(*path_tokens(tree, path_to(tree, end)[1:]), float(hard(tree[end])))


def sibling_decisions(rows: Sequence[Row], params: Annotate) -> list[Decision]:
    """Every node's children with the Q that `annotate.labels.q` names, weighted by their rollouts (rollout, hard) or visits."""
    found = []
    column = "n_rollouts" if params.labels.q in ("rollout", "hard") else "N"
    for task_id, tree in trees_of(rows).items():
        q = node_q(tree, params)
        for parent, below in enumerate(children_of(tree)):
            children = [child for child in below if tree[child][column] > 0]
            if children:
                sides = [continuation(tree, child, None) for child in children]
                weights = [float(tree[child][column]) for child in children]
                found.append(_decision(task_id, history_of(tree, parent), sides, weights, [q[child] for child in children]))
    return found


@dataclass(frozen=True)
class Rows:
    """Decisions' actions as R rows, each after its history, padded on the right to T tokens."""

    token_ids: Tensor
    """[R, T] int64."""
    mask: Tensor
    """[R, T] bool: the action's tokens that the policy wrote."""
    last: Tensor
    """[R] int64: the action's last token."""

    @classmethod
    def of(cls, decisions: Sequence[Decision]) -> Rows:
        width = max(decision.width for decision in decisions)
        count = sum(decision.rows for decision in decisions)
        token_ids, mask = torch.zeros(count, width, dtype=torch.int64), torch.zeros(count, width, dtype=torch.bool)
        last, row = torch.zeros(count, dtype=torch.int64), 0
        for decision in decisions:
            start = len(decision.history)
            for action, policy in zip(decision.actions, decision.policy, strict=True):
                token_ids[row, :start] = torch.tensor(decision.history)
                token_ids[row, start : start + len(action)] = torch.tensor(action)
                mask[row, start : start + len(action)] = torch.tensor(policy)
                last[row] = start + len(action) - 1
                row += 1
        return cls(token_ids, mask, last)
