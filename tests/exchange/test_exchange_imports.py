"""Imported conversations: what is rejected and why, thoughts, missing files, and episodes for RL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from curated_imports import PARAMS, curated, imported, imported_episodes

from stages.agent.chat import Chat
from stages.exchange.episodes import episode_rows
from stages.params import parse_params
from stages.records.episode import read_episodes, read_json, read_tasks
from stages.reporting.sections.data import _curate_domain
from stages.runtime.validation import ParamsError
from stages.training.rl.demonstrations import ExternalEpisodes


def test_rejected_records_are_reported_with_file_line_and_reason(
    source: Path, lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = {task.task_id: task for task in read_tasks(source / "data/curated/search/tasks.parquet")}
    test = next(task for task in tasks.values() if task.split == "test")
    train = next(task for task in tasks.values() if task.split == "train")
    shown = next(
        one for one in read_episodes(source / "data/curated/search/demonstrations.parquet") if one.task_id == train.task_id
    )
    talk = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "answer Nobody"}]
    name = test.spec["start"]

    def changed_messages(*changes: tuple[int, str]) -> list[dict[str, str]]:
        messages = [dict(message) for message in shown.messages]
        for place, text in changes:
            messages[place]["content"] = text
        return messages

    rows: list[dict[str, Any]] = [
        {"messages": talk},
        {"messages": talk},
        {"messages": [{"role": "user", "content": test.prompt}, talk[1]]},
        {"messages": talk, "task_id": "search-train-nowhere"},
        {"messages": [{"role": "user", "content": test.prompt}, talk[1]], "task_id": test.task_id},
        {"messages": changed_messages((2, "Another page.")), "task_id": train.task_id},
        {"messages": [*shown.messages, {"role": "user", "content": "?"}, talk[1]], "task_id": train.task_id},
        {"messages": changed_messages((len(shown.messages) - 1, "answer Nobody")), "task_id": train.task_id},
        {"messages": talk, "domain": "textworld"},
        {"messages": [{"role": "user", "content": "word " * 700}, talk[1]]},
        {"prompt": "Who?", "completion": f"answer {name}"},
        {"prompt": talk[:1], "chosen": "answer Nobody", "rejected": "answer Somebody"},
    ]
    file = tmp_path / "data/raw/mine.jsonl"
    file.parent.mkdir(parents=True)
    answer = '"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "answer Nobody"}]'
    bad = ["{broken", f'{{{answer}, "weight": {"9" * 5000}}}', f'{{{answer}, "deep": {"[" * 5000}{"]" * 5000}}}']
    bad += [answer.join("{}").replace("Nobody", "\\ud83d"), f'{{{answer}, "deep": {"[" * 200}{"]" * 200}}}']
    file.write_text("\n".join([*map(json.dumps, rows), *bad]) + "\n", encoding="utf-8")
    folder = curated(tmp_path, lines, ["data/raw/mine.jsonl"])
    printed = capsys.readouterr().err
    for line, reason in [
        (2, "duplicate: the same as data/raw/mine.jsonl:1"),
        (3, "panel_task: it has the prompt of a task"),
        (4, "unknown_task: task_id search-train-nowhere is not a curated task"),
        (5, f"wrong_split: {test.task_id} is a test task"),
        (6, f"unlike_environment: message 2 of {train.task_id} is 'Another page.'"),
        (7, "unlike_environment: it continues after"),
        (8, "failed: replayed to its end, it does not solve"),
        (10, "too_long: it has 702 words and marks"),
        (13, "malformed: not JSON"),
        (14, "malformed: a number is too long"),
        (15, "malformed: values are nested too deeply"),
        (16, "malformed: text that is not Unicode"),
        (17, "malformed: values are nested too deeply"),
    ]:
        assert f"curate@search: rejected data/raw/mine.jsonl:{line}: {reason}" in printed
    assert "1 imported conversations have names of panel tasks in them (the first: data/raw/mine.jsonl:11)" in printed
    report = read_json(tmp_path / "reports/curate/search.json")
    assert report["imports"]["mention_panel_names"] == 1
    counts = report["imports"]["files"]["data/raw/mine.jsonl"]
    assert {key: counts[key] for key in ("records", "demonstrations", "pairs", "of_other_domains", "of_tasks")} == {
        **{"records": 17, "demonstrations": 2, "pairs": 1, "of_other_domains": 1, "of_tasks": 0}
    }
    assert report["demonstrations"]["kept"]["expert"] == sum(
        one.policy_hash == "expert" for one in read_episodes(folder / "demonstrations.parquet")
    )
    assert report["rejected"]["panel_task"] == 1
    assert "data/raw/mine.jsonl" in str(_curate_domain("search", 0, report))
    free = [one for one in imported_episodes(folder) if one.task_id.startswith("imported/")]
    assert [one.episode_id for one in free] == ["imported/mine-000001", "imported/mine-000011"]


def test_thinking_setting_separates_thoughts_from_actions(source: Path, lines: list[str], tmp_path: Path) -> None:
    """Contract: with `model.thinking`, thoughts are trained on and the environment plays the actions after them; without, they
    are part of the action, which the environment does not know."""
    shown = [one for one in read_episodes(source / "data/curated/search/demonstrations.parquet") if one.policy_hash == "expert"]
    rows = episode_rows(shown, "messages", {})
    for row in rows:
        for message in row["messages"][1::2]:
            message["content"] = f"<think>\nwhich one?\n</think>\n\n{message['content']}"
    free = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<think>hm</think>answer No"}]}
    none = {"expert_demonstrations": 0, "noisy_demonstrations": 0}
    back = imported_episodes(imported(tmp_path / "on", lines, [*rows, free], curate=none, model={"thinking": {}}))
    by_task = {one.task_id: one for one in back if one.task_id in {known.task_id for known in shown}}
    assert len(by_task) == len(shown)
    for known in shown:
        one = by_task[known.task_id]
        assert [turn.action for turn in one.turns] == [turn.action for turn in known.turns]
        assert all(message["content"].startswith("<think>\nwhich one?\n</think>") for message in one.messages[1::2])
        assert (one.reward, one.success) == (1.0, True)
    (talk,) = (one for one in back if one.task_id.startswith("imported/"))
    assert (talk.turns[0].action, talk.messages[1]["content"]) == ("answer No", "<think>hm</think>answer No")
    off = imported_episodes(imported(tmp_path / "off", lines, [*rows, free], curate=none))
    assert [one.turns[0].action for one in off] == ["<think>hm</think>answer No"]


def test_missing_import_file_and_file_outside_data_raw_are_rejected(lines: list[str], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"curate\.imports lists data/raw/none\.jsonl, which does not exist"):
        curated(tmp_path, lines, ["data/raw/none.jsonl"])
    for name in ("data/mine.jsonl", "/tmp/a.jsonl", "data/raw/../a.jsonl", "data/raw/a.csv"):
        with pytest.raises(ParamsError, match=r"'curate\.imports' lists .* below data/raw"):
            parse_params({**PARAMS, "curate": {"imports": [name]}})
    pairs = {"algorithm": "dpo", "preference": {"source": "imported"}}
    with pytest.raises(ParamsError, match=r"curate\.imports is empty"):
        parse_params({**PARAMS, "rl": pairs})


def test_external_source_all_draws_whole_imported_episodes(source: Path, lines: list[str], chat: Chat, tmp_path: Path) -> None:
    """Contract: `rl.external: {source: all}` draws imported episodes of training tasks, and no parts of any."""
    shown = [one for one in read_episodes(source / "data/curated/search/demonstrations.parquet") if one.policy_hash == "expert"]
    rows = [*episode_rows(shown, "messages", {}), *episode_rows(shown, "turns", {})]
    folder = imported(tmp_path, lines, rows, curate={"expert_demonstrations": 0, "noisy_demonstrations": 0})
    tasks = {task.task_id for task in read_tasks(folder / "tasks.parquet", "train")}
    params = parse_params({**PARAMS, "rl": {"external": {"per_group": 4, "source": "all"}}}).rl.external
    external = ExternalEpisodes(imported_episodes(folder), tasks, chat, params, 640)
    assert {task: external.count(task) for task in sorted(tasks)} == {
        task: sum(one.task_id == task for one in shown) for task in sorted(tasks)
    }
