"""Imported records that contain a task of the frozen panel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stages.curation.imports import Importer
from stages.curation.leakage import PanelPrompts
from stages.environments.search import SearchDomain
from stages.records.task import Task

Message = dict[str, str]


@pytest.fixture
def prompt(tasks: list[Task]) -> str:
    return next(task.prompt for task in tasks if task.split == "test")


def agent(text: str) -> Message:
    return {"role": "assistant", "content": text}


def user(text: str, role: str = "user") -> Message:
    return {"role": role, "content": text}


def rejection_reasons(domain: SearchDomain, tasks: list[Task], folder: Path, record: dict[str, Any]) -> list[str]:
    """Reasons for which the record is rejected."""
    path = folder / "data/raw/a.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n", encoding="utf-8")
    imports = Importer(domain, tasks, folder / "worlds", 640).read(folder, ["data/raw/a.jsonl"])
    return [rejection.reason for rejection in imports.rejections]


def test_panel_task_is_found_anywhere_in_a_conversation(
    domain: SearchDomain, tasks: list[Task], prompt: str, tmp_path: Path
) -> None:
    """Contract: no record of `curate.imports` that contains a panel task enters training, whatever precedes it."""
    answer = [agent("answer Nobody")]
    spaced = prompt.replace(" ", "  \n\t").replace("?", " ?")
    talks: list[list[Message]] = [
        [user(prompt), *answer],
        [user("You are helpful.", "system"), user(prompt), *answer],
        [user(f"You are helpful.\n{prompt}", "system"), user("Well?"), *answer],
        [user(f"You are helpful.\n\n{prompt}"), *answer],
        [user(f"You are helpful. {prompt}\nThink first."), *answer],
        [user(f"  \n{prompt}"), *answer],
        [user(spaced), *answer],
        [user(prompt.upper()), *answer],
        [user(prompt.replace("W", "\uff37")), *answer],
        [user("Hello."), agent("Yes?"), user(prompt), *answer],
        [user("the rest stands below", "system"), user("Be brief", "developer"), user(prompt.lower()), *answer],
    ]
    records: list[dict[str, Any]] = [{"messages": talk} for talk in talks]
    records += [{"prompt": talk[:-1], "completion": talk[-1:]} for talk in talks]
    records += [{"prompt": talk[:-1], "chosen": answer, "rejected": [agent("answer Somebody")]} for talk in talks]
    last = [agent("look"), user(prompt), *answer]
    records += [
        {"prompt": prompt.upper(), "completion": "answer Nobody"},
        {"prompt": "Hello.", "completion": last},
        {"prompt": "Hello.", "chosen": last, "rejected": "answer Somebody"},
        {"prompt": "Hello.", "chosen": "answer Somebody", "rejected": last},
        {"chosen": [user("Hello."), *last], "rejected": [user("Hello."), *answer]},
    ]
    for record in records:
        assert rejection_reasons(domain, tasks, tmp_path, record) == ["panel_task"], record


def test_other_conversations_are_kept(domain: SearchDomain, tasks: list[Task], prompt: str, tmp_path: Path) -> None:
    train = next(task.prompt for task in tasks if task.split == "train")
    for first in (train, f"Be brief.\n{train.upper()}", prompt.rpartition(" ")[0], "Who are you?"):
        assert rejection_reasons(domain, tasks, tmp_path, {"prompt": first, "completion": "answer Nobody"}) == []
    record = {"prompt": "Who are you?", "completion": [agent(prompt)]}
    assert rejection_reasons(domain, tasks, tmp_path, record) == [], "an assistant message is not a task"


def test_short_prompts_match_only_whole_lines() -> None:
    """Contract: a short prompt that is part of another task's is no match."""
    prompts = PanelPrompts(["what is 3+4?", "take the key", "open  the door"], ["Open the door"])
    for text in ("what is 3 + 4?", "Be brief.\nWhat is 3+4 ?\nThink.", "TAKE\nTHE KEY", "x\n\n  take the key  "):
        assert prompts.find(text) is not None, text
    for text in ("what is 13+4?", "what is 3+4*5?", "what is 3+4? + 1", "now take the key", "take the keys", "open the door", ""):
        assert prompts.find(text) is None, text
    assert PanelPrompts(["", " \n"], []).find("") is None
