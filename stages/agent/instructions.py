"""Instructions: free text around the question in an episode's first message. Light to import.

An instruction is a template with `{question}`, where the task's prompt goes, so that no instruction can lose the question.
PHRASES are instructions that an episode visibly follows or not: demonstrations are labelled by those that they follow, so that
a small model learns what they mean, and a failure is answered by those that it does not follow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from stages.records.task import Task
from stages.runtime.files import atomic_text

QUESTION = "{question}"
FILE = "instruction.json"
"""In a policy's folder: the instruction that it is played with, and the domain."""


class Acted(Protocol):
    """A turn: `stages.records.episode.TurnRecord`, or what a failure keeps of one."""

    @property
    def action_key(self) -> str: ...

    @property
    def accepted(self) -> bool: ...


PHRASES: Mapping[str, Callable[[Sequence[Acted]], bool]] = {
    "Look first.": lambda turns: len(turns) >= 2,
    "Take every step.": lambda turns: len(turns) >= 3,
    "Be brief.": lambda turns: len(turns) <= 2,
    "Never repeat an action.": lambda turns: len({turn.action_key for turn in turns}) == len(turns),
    "Write valid actions.": lambda turns: all(turn.accepted for turn in turns),
}
"""Phrase -> whether an episode's turns follow it."""


def followed(turns: Sequence[Acted]) -> list[str]:
    """The phrases that an episode follows, in the order of PHRASES."""
    return [phrase for phrase, holds in PHRASES.items() if holds(turns)]


def with_phrase(text: str, phrase: str) -> str:
    """An instruction with a phrase before the rest; unchanged if it has it."""
    return text if phrase in text else f"{phrase} {text}"


def without_phrase(text: str, phrase: str) -> str:
    return text.replace(f"{phrase} ", "").replace(phrase, "")


def fault(text: str, max_words: int) -> str | None:
    """Why a text is no instruction: `no_question` (the placeholder must occur once), `too_long` (without it, over `max_words`
    words); None if it is one."""
    if text.count(QUESTION) != 1:
        return "no_question"
    return "too_long" if len(text.replace(QUESTION, " ").split()) > max_words else None


def instructed(task: Task, text: str, task_id: str | None = None) -> Task:
    """The task with the instruction around its prompt, under another id if one is given. The instruction `{question}` changes no
    prompt."""
    return replace(task, prompt=text.replace(QUESTION, task.prompt), task_id=task.task_id if task_id is None else task_id)


def write_instruction(folder: Path, domain: str, text: str) -> None:
    """Store the instruction that the policy in `folder` is played with in `domain`."""
    atomic_text(folder / FILE, json.dumps({"domain": domain, "instruction": text}, sort_keys=True, indent=1) + "\n")


def read_instruction(folder: Path, domain: str) -> str:
    """The instruction that the policy in `folder` is played with in a domain; `{question}` where it has none."""
    path = folder / FILE
    if not path.exists():
        return QUESTION
    stored = json.loads(path.read_text(encoding="utf-8"))
    return str(stored["instruction"]) if stored["domain"] == domain else QUESTION
