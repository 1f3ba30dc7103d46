"""What every job of stage rl reports of its episodes."""

from __future__ import annotations

import pytest
from exported_episodes import episode

from stages.records.episode import Owner
from stages.training.rl.job import RISE_TOKENS, entropy_rise


def test_rise_in_entropy_behind_observations_by_hand() -> None:
    """Turn k has -log p of 0.5 + k and 0.125, so turns 1 and 2 exceed turn 0 by 0.5 and 1; single turns have no rise."""
    three = episode("t1/0000", [("a", "a", "x", 0.0), ("b", "b", "y", 0.0), ("c", "c", "", 1.0)])
    one = episode("t1/0001", [("a", "a", "", 0.0)])
    assert entropy_rise([three, one]) == pytest.approx(0.75)
    assert entropy_rise([one]) == entropy_rise([]) == 0.0


def test_only_the_first_tokens_of_a_turn_count() -> None:
    made = episode("t1/0000", [("a", "a", "x", 0.0), ("b", "b", "", 1.0)])
    start = made.turns[1].start
    made.token_ids, made.owner, made.logprob, made.turn = (
        column[:start] for column in (made.token_ids, made.owner, made.logprob, made.turn)
    )
    made.append([5] * (RISE_TOKENS + 9), Owner.POLICY, 1, [-1.0] * RISE_TOKENS + [-100.0] * 9)
    made.turns[1].end = start + RISE_TOKENS + 9
    assert entropy_rise([made]) == pytest.approx(1.0 - 0.3125)
