"""Provenance: who wrote a token is a record of its episode, and decides what is trained, exported and reported."""

from __future__ import annotations

import pytest

from stages.algorithms.batch import Written
from stages.annotation.correct_paths import path_episode
from stages.exchange.episodes import token_rows
from stages.records.episode import NODE_SCHEMA, Episode, Owner, TurnRecord
from stages.reporting.inputs import DomainInputs
from stages.reporting.sections.data import owner_table
from stages.training.common.batches import trajectory_batch, turn_boundaries, turn_ends

OWNERS = (Owner.FORCED, Owner.POLICY, Owner.EVIDENCE, Owner.POLICY, Owner.FORCED)


def an_episode(owners: tuple[Owner, ...] = OWNERS) -> Episode:
    """A prompt of 2 tokens, a turn of 5, an observation, and advice."""
    episode = Episode("e", "t", "d", "g", 0, "p", "q", 1.0, 1.0, 0)
    episode.append([1, 2], Owner.PROMPT, -1)
    episode.append([3, 4, 5, 6, 7], owners, 0, [0.0, -0.5, -0.25, -1.0, 0.0])
    episode.append([8], Owner.ENVIRONMENT, 0)
    episode.append([9], Owner.GUIDANCE, 0)
    episode.turns = [TurnRecord("a", "o", True, 1.0, 0.0, "s", "a", 2, 7)]
    episode.reward = 1.0
    return episode


def test_only_tokens_that_the_policy_wrote_for_itself_are_trained():
    batch = trajectory_batch([an_episode()])
    assert batch.mask.int().tolist() == [[0, 0, 0, 1, 0, 1, 0, 0, 0]]
    assert batch.logprobs_old.tolist() == [[0, 0, 0, -0.5, 0, -1.0, 0, 0, 0]]
    written = batch.get(Written)
    assert written is not None
    assert written.owner.tolist() == [[0, 0, 4, 1, 5, 1, 4, 2, 6]]
    # A turn's value is read before its first token that the policy chose, and its credit is on its last one.
    assert (turn_boundaries(batch).tolist(), turn_ends(batch).tolist()) == ([[2]], [[5]])


def test_batches_without_other_owners_have_no_such_record():
    """Contract: nothing is added to batches of episodes that only prompt, policy and environment wrote."""
    episode = an_episode((Owner.POLICY,) * 5)
    episode.owner[-1] = int(Owner.ENVIRONMENT)
    assert trajectory_batch([episode]).get(Written) is None


def test_as_many_owners_as_tokens():
    episode = Episode("e", "t", "d", "g", 0, "p", "q", 1.0, 1.0, 0)
    with pytest.raises(ValueError, match="1 owners of 2 tokens"):
        episode.append([1, 2], [Owner.FORCED], 0)
    assert episode.token_ids == []


def test_export_names_the_owner_of_each_token():
    (row,) = token_rows(an_episode())
    assert row["assistant_masks"] == [0, 0, 0, 1, 0, 1, 0, 0, 0]
    assert row["owners"][2:] == ["forced", "policy", "evidence", "policy", "forced", "environment", "guidance"]


def test_report_shows_owners_only_where_there_are_others():
    rows = [{"owner": an_episode().owner}, {"owner": [0, 1, 2]}]
    table = owner_table("d", DomainInputs(episodes={"rl step 1": rows}))
    assert table is not None
    assert table.header[2:] == ("prompt", "policy", "environment", "forced", "evidence", "guidance")
    assert table.rows == [["rl step 1", "2", "1.5", "1.5", "1.0", "1.0", "0.5", "0.5"]]
    assert owner_table("d", DomainInputs(episodes={"sft rollout": rows[1:]})) is None


def test_trees_keep_who_wrote_an_action():
    known = {"task_id": "t", "context_ids": [1, 2], "state_key": "s", "reward": 0.0, "n_success": 1}
    root = {**dict.fromkeys(NODE_SCHEMA.names), **known}
    end = {"token_ids": [3, 4], "logprob": [0.0, -1.0], "action": "a", "observation": "", "reward": 1.0, "terminal": True}
    tree = [root, {**root, **end, "truncated": False}]
    assert path_episode(tree, [0, 1], "d").owner == [0, 0, 1, 1]
    tree[1]["owner"] = [4, 1]
    assert path_episode(tree, [0, 1], "d").owner == [0, 0, 4, 1]
