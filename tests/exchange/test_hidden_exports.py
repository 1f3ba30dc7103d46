"""Exports say which observations left the context and after which turn, and import restores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hidden_episodes import PROMPT, RESULT, judged

from stages.agent.chat import Chat
from stages.exchange.__main__ import import_trajectories
from stages.exchange.aside import KEY
from stages.exchange.atif import trajectory
from stages.exchange.documents import write_documents
from stages.exchange.episodes import episode_rows
from stages.exchange.foreign import read_items
from stages.exchange.inspect_log import sample_of
from stages.exchange.parsing import Demonstration, parse
from stages.exchange.records import read_records, write_records
from stages.records.episode import Episode, read_episodes
from stages.records.task import Task

AFTER = "left_context_after_turn"


@pytest.fixture
def pair(chat: Chat) -> list[Episode]:
    """One that hid nothing, then one that did."""
    return [judged(chat, hard=False, name="t/1"), judged(chat)]


def test_atif_says_it_at_the_result(pair: list[Episode]) -> None:
    plain, hard = map(trajectory, pair)
    results = [step["observation"]["results"][0] for step in hard["steps"][1:]]
    assert [result["extra"].get(AFTER) for result in results] == [2, None, None, None, None]
    assert results[0]["content"] == RESULT, "the record keeps it"
    assert AFTER not in json.dumps(plain)


def test_inspect_says_it_at_the_message_and_of_the_sample(pair: list[Episode]) -> None:
    plain, hard = (sample_of(episode, 1) for episode in pair)
    said = [
        (message["content"], message["metadata"][AFTER]) for message in hard["messages"] if AFTER in message.get("metadata", {})
    ]
    assert said == [(RESULT, 2)]
    assert hard["metadata"][AFTER] == {"1": 2}
    assert AFTER not in json.dumps(plain)
    assert all("metadata" not in message for message in plain["messages"] if message["role"] == "user")


@pytest.mark.parametrize(
    ("form", "name"), [("atif", "x.jsonl"), ("atif", "folder"), ("inspect", "x.eval"), ("inspect", "x.json")]
)
def test_hidden_observations_come_back(form: str, name: str, pair: list[Episode], tmp_path: Path) -> None:
    """Contract: export, import and the table of episodes; as conversations the texts are whole."""
    write_documents(tmp_path / name, form, pair, "rl")
    import_trajectories(tmp_path / name, tmp_path / "back.parquet")
    assert read_episodes(tmp_path / "back.parquet") == sorted(pair, key=lambda episode: episode.episode_id)
    for item in read_items(tmp_path / name):
        (record,) = item.records()
        assert [message["content"] for message in record["messages"]][:3] == [PROMPT, "search Cormas", RESULT]


@pytest.mark.parametrize("forgotten", [[[0, 9]], [[1, 1]], [[-1, 1]], [[0]], [[0, 1, 2]]])
def test_impossible_ones_are_refused(forgotten: list[list[int]], pair: list[Episode], tmp_path: Path) -> None:
    """Contract: what is read back can be shown and trained on; a turn that does not exist can't have been hidden."""
    document = trajectory(pair[0])
    document["extra"][KEY]["aside"]["forgotten"] = forgotten
    (tmp_path / "x.json").write_text(json.dumps(document), encoding="utf-8")
    (item,) = read_items(tmp_path / "x.json")
    with pytest.raises(
        ValueError, match=r"x\.json: bellwether\.forgotten of t/1 has \[.*it must list pairs \[turn, later turn\]"
    ):
        item.episode()


@pytest.mark.parametrize("form", ["messages", "turns", "tokens", "verl"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_have_a_column_if_an_episode_needs_it(form: str, kind: str, pair: list[Episode], tmp_path: Path) -> None:
    """Contract: all rows have the same columns, whichever comes first; without hidden observations, the rows are as they were."""
    tasks = {"t": Task("t", "search", "train", 0, PROMPT, {}, 1.0)}
    write_records(tmp_path / f"rows.{kind}", episode_rows(pair, form, tasks))
    rows: list[dict[str, Any]] = [row for _, row in read_records(tmp_path / f"rows.{kind}") if isinstance(row, dict)]
    given = {row["episode_id"]: row["left_context"] for row in rows}
    assert given == {"t/1": [], "t/0": [{"turn": 1, "after_turn": 2}]}
    assert all("left_context" not in row for row in episode_rows(pair[:1], form, tasks))
    if form in ("messages", "turns"):
        assert all(isinstance(parse(row), Demonstration) for row in rows), "they can be imported unchanged"
