"""Preference pairs as tokens, on a hand-made tree."""

from __future__ import annotations

from typing import Any

import pytest

from stages.annotation.continuations import Continuation, pair_tokens
from stages.records.episode import Owner


def node(
    number: int, parent: int, reward: float = 0.0, terminal: bool = False, success: int = 0, rollouts: int = 1
) -> dict[str, Any]:
    """Node n has action tokens (10 n, 10 n + 1) and context (10 n + 5); the root the prompt (1, 2)."""
    return {
        "task_id": "t",
        "node": number,
        "parent": parent,
        "token_ids": [] if number == 0 else [10 * number, 10 * number + 1],
        "context_ids": [1, 2] if number == 0 else [10 * number + 5],
        "reward": reward,
        "terminal": terminal,
        "truncated": False,
        "n_success": success,
        "n_rollouts": rollouts,
    }


TREE = [
    node(0, -1, success=1),
    node(1, 0, success=1),
    node(2, 1, success=1, rollouts=4),
    node(3, 1),
    node(4, 2, 0.0, True),
    node(5, 2, 1.0, True, success=1),
    node(6, 3, 0.0, True),
]
"""0 - 1 - (2 - (4 failure, 5 success), 3 - 6 failure)."""
PAIRS = [{"task_id": "t", "parent": 1, "win": 2, "lose": 3, "weight": 0.5}]


def test_step_pairs_contain_only_the_two_actions() -> None:
    (pair,) = pair_tokens(TREE, PAIRS, "step")
    assert pair.history == (1, 2, 10, 11, 15)
    assert pair.win == Continuation((20, 21), (True, True), 0.25)
    assert pair.lose == Continuation((30, 31), (True, True), 0.0)
    assert pair.weight == 0.5


def test_trajectory_pairs_continue_to_nearest_success_and_failure() -> None:
    """Environment tokens between the actions are not the policy's."""
    (pair,) = pair_tokens(TREE, PAIRS, "trajectory")
    assert pair.win == Continuation((20, 21, 25, 50, 51), (True, True, False, True, True), 1.0)
    assert pair.lose == Continuation((30, 31, 35, 60, 61), (True, True, False, True, True), 0.0)


def test_pair_without_a_tree_is_rejected() -> None:
    with pytest.raises(ValueError, match="run annotate again"):
        pair_tokens(TREE, [{**PAIRS[0], "task_id": "other"}], "step")


def test_only_tokens_that_the_policy_wrote_are_learnt() -> None:
    """Contract: tokens that a constraint forced, and evidence, are no policy tokens of a pair; a pair of which a side has none is
    left out."""
    owners = {2: [Owner.FORCED, Owner.POLICY], 3: [Owner.POLICY, Owner.EVIDENCE], 5: None}
    tree = [{**row, "owner": owners.get(row["node"])} for row in TREE]
    (step,), (whole,) = (pair_tokens(tree, PAIRS, level) for level in ("step", "trajectory"))
    assert (step.win.policy, step.lose.policy) == ((False, True), (True, False))
    assert whole.win.policy == (False, True, False, True, True)
    tree[3]["owner"] = [Owner.EVIDENCE, Owner.EVIDENCE]
    assert pair_tokens(tree, PAIRS, "step") == []
    (whole,) = pair_tokens(tree, PAIRS, "trajectory")
    assert whole.lose.policy == (False, False, False, True, True)
