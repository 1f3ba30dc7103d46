"""What pages, traces and the evaluation's table are given about observations that left the context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hidden_episodes import RESULT, judged, judged_row
from tiny import make_tiny_tokenizer

from stages.agent.chat import Chat
from stages.agent.forgetting import with_hidden
from stages.evaluation.stored_episodes import PLAYED_SCHEMA, packed, played_groups, unpacked, write_played
from stages.records.episode import episode_row, read_rows
from stages.reporting.episodes import browser_data
from stages.reporting.hidden import hidden_observations, load_chat
from stages.reporting.viewer.groups import Group
from stages.reporting.viewer.pack import pack_group
from stages.tracking.episodes import trace_of


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tiny_tokenizer())


def packed_episodes(rows: list[dict[str, Any]], chat: Chat) -> list[Any]:
    text = pack_group(Group("search", "rl step 1", "training", rows), lambda: chat)
    return json.loads(text.removeprefix('viewer.arrived("search.rl-20step-201", ').removesuffix(");\n"))["episodes"]


def test_places_are_those_that_training_hid(chat: Chat) -> None:
    """Contract: the result of turn 0, hidden by turn 1, and of its tokens the text alone."""
    row = judged_row(chat)
    ((turn, by, start, stop),) = hidden_observations(row, lambda: chat)
    assert (turn, by) == (0, 1)
    assert chat.tokenizer.decode(row["token_ids"][start:stop]) == RESULT
    ((first, last, since),) = with_hidden(chat, judged(chat)).hidden
    assert (start, stop, row["turns"][by]["end"]) == (first, last, since)
    assert hidden_observations(row) == [[0, 1]], "without a chat format the turns are known, the tokens are not"
    assert hidden_observations({**row, "token_ids": []}, lambda: chat) == [[0, 1]]
    assert hidden_observations({**row, "forgotten": [[0, 1], [2, 3], [0, 3]]}) == [[0, 1], [2, 3]], "the first time counts"


def test_without_hidden_observations_nothing_is_loaded(chat: Chat) -> None:
    def never() -> Chat:
        raise AssertionError

    for row in (judged_row(chat, hard=False), episode_row(judged(chat, hard=False))):
        assert hidden_observations(row, never) == []
        text = pack_group(Group("search", "rl step 1", "training", [row]), never)
        assert text == pack_group(Group("search", "rl step 1", "training", [judged_row(chat, hard=False)]))


def test_viewer_files_have_hidden_observations_at_their_end(chat: Chat) -> None:
    """Contract: an episode's list is as long as it needs to be; absent parts before the last one are null."""
    given = hidden_observations(judged_row(chat), lambda: chat)
    rows = [judged_row(chat), judged_row(chat, hard=False, name="t/1")]
    rows += [{**judged_row(chat, name="t/2"), "credit": [0.25] * 5, "moves": [0, 1, 2, 3, 4]}]
    rows += [{**judged_row(chat, hard=False, name="t/3"), "credit": [0.25] * 5}]
    further = [episode[5:] for episode in packed_episodes(rows, chat)]
    assert further == [[None, None, given], [], [[0.25] * 5, [0, 1, 2, 3, 4], given], [[0.25] * 5]]


def test_sample_episodes_have_them_too(chat: Chat) -> None:
    rows = [judged_row(chat), judged_row(chat, hard=False, name="t/1")]
    found = browser_data({"search": {"rl step 1": rows}}, 2, None, 0, chat=lambda: chat).data["episodes"]
    assert {one["id"]: one.get("hidden") for one in found} == {
        "t/0": hidden_observations(rows[0], lambda: chat),
        "t/1": None,
    }
    assert all("hidden" not in one for one in found if one["id"] == "t/1")


def test_traces_say_after_which_turn_an_observation_left(chat: Chat) -> None:
    told = [turn.get("left_context_after_turn") for turn in trace_of(judged_row(chat), "rl step 1")["turns"]]
    assert told == [2, None, None, None, None]
    assert trace_of(judged_row(chat, hard=False), "a") == trace_of(episode_row(judged(chat, hard=False)), "a")


def test_the_evaluations_episodes_keep_what_was_hidden(chat: Chat, tmp_path: Path) -> None:
    """Contract: the table has the column only if an episode of it hides something; then every row has it."""
    plain = [{"attempt": 0, **judged_row(chat, hard=False)}]
    hard = [{"attempt": 0, **judged_row(chat)}]
    assert [episode.forgotten for episode in unpacked(packed(hard))] == [[[0, 1]]]
    assert unpacked(packed(hard))[0] == judged(chat)
    write_played(tmp_path / "both", iter([("a", packed(plain)), ("b", packed(hard))]))
    found = {model: rows[0] for model, rows in played_groups(tmp_path / "both", "search", ["a", "b"])}
    assert (found["a"]["forgotten"], found["b"]["forgotten"]) == ([], [[0, 1]])
    write_played(tmp_path / "none", iter([("a", packed([{**plain[0], "forgotten": []}]))]))
    write_played(tmp_path / "old", iter([("a", packed(plain))]))
    assert (tmp_path / "none").read_bytes() == (tmp_path / "old").read_bytes()
    assert list(read_rows(tmp_path / "none")[0]) == PLAYED_SCHEMA.names


def test_the_chat_format_comes_from_the_policys_folder(tiny_policy: Path, tmp_path: Path, chat: Chat) -> None:
    found = load_chat(tiny_policy, None)
    assert found is not None
    assert found.observation_tokens(RESULT) == chat.observation_tokens(RESULT)
    assert load_chat(tmp_path, None) is None
