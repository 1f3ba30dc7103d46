"""Demonstrations and preference pairs from elsewhere (curate.imports): checked, played again where they name a task, and kept
apart from the panel. `stages.exchange.parsing` has the shapes of a record.

A record that names a task (`task_id`) is played in its environment: it stays if that answers as the record says and, where the
record goes to the end of the episode, the task is solved. Others are conversations like any, of which nothing but the form can be
checked; those that tell a panel's task in what the user or a system message says are left out. A record of another `domain` is
left to that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.curation.cleaning import episode_length, pieces
from stages.curation.demonstrations import play_out
from stages.curation.leakage import PanelPrompts
from stages.curation.raw import Rejection
from stages.environments.protocol import Domain, Environment
from stages.exchange.episodes import conversation
from stages.exchange.parsing import Demonstration, Preference, parse
from stages.exchange.records import read_records
from stages.records.episode import IMPORTED, Episode, TurnRecord
from stages.records.messages import Messages
from stages.records.task import Task
from stages.records.thinking import Thinking, take_apart


class _RefusedError(ValueError):
    """A record can't stay: a short reason that is counted, and what exactly was wrong."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class Imports:
    """What came in. `counts`: file -> what its records became."""

    episodes: list[Episode] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    """Rows of PREFERENCE_SCHEMA."""
    rejections: list[Rejection] = field(default_factory=list)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    mentions: list[str] = field(default_factory=list)
    """Where conversations of no task have names of panel tasks in them."""

    def told(self) -> list[str]:
        """Lines to print: what was left out and why, and what to look at."""
        lines = [f"rejected {rejection}" for rejection in self.rejections]
        if self.mentions:
            lines.append(
                f"{len(self.mentions)} imported conversations have names of panel tasks in them, {self.mentions[0]} first: what "
                "they tell of those may make the panel easier"
            )
        return lines

    def report(self) -> dict[str, Any]:
        """Plain JSON: per file what was kept, checked by playing it, and left out for which reason."""
        return {
            "files": {file: dict(sorted(counts.items())) for file, counts in self.counts.items()},
            "mention_panel_names": len(self.mentions),
        }


class Importer:
    """Reads the records of one domain. `tasks`: all of its curated ones; `folder`: what `Domain.build` wrote.

    max_length: words and marks that a record may have, the model's tokens at least (model.max_length); thinking: what encloses
    the thoughts in it (model.thinking).
    """

    def __init__(
        self, domain: Domain, tasks: Sequence[Task], folder: Path, max_length: int, thinking: Thinking | None = None
    ) -> None:
        self.domain, self.max_length, self.thinking = domain, max_length, thinking
        self.environment: Environment = domain.make(folder)
        self.tasks = {task.task_id: task for task in tasks}
        test = [task for task in tasks if task.split == "test"]
        own = (task.prompt for task in tasks if task.split != "test")
        self._panel_prompts = PanelPrompts((task.prompt for task in test), own)
        names = sorted({name for task in test for name in domain.entities(task) if name})
        self._panel_names = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b") if names else None
        self._seen: dict[Any, str] = {}

    def read(self, root: Path, files: Iterable[str]) -> Imports:
        """All records of `files`, paths below `root`. Raises FileNotFoundError for one that is not there."""
        found = Imports()
        for file in files:
            if not (root / file).is_file():
                raise FileNotFoundError(
                    f"curate.imports names {file}, which does not exist; put it there ('dvc pull' if DVC has it), or take it out"
                )
            counts = found.counts[file] = Counter()
            for line, values in read_records(root / file):
                self._take(found, counts, file, line, values)
        self.environment.close()
        return found

    def _take(self, found: Imports, counts: Counter[str], file: str, line: int, values: dict[str, Any] | ValueError) -> None:
        counts["records"] += 1
        try:
            if isinstance(values, ValueError):
                raise values
            if values.get("domain") not in (None, self.domain.name):
                counts["of_other_domains"] += 1
                return
            record = parse(values)
            name = f"{Path(file).stem}-{line:06d}"
            self._once(record, f"{file}:{line}")
            self._keep_off_the_panel(record)
            if isinstance(record, Demonstration):
                found.episodes.append(self._episode(record, name))
                counts["demonstrations"] += 1
            else:
                found.pairs.append(self._pair(record, name))
                counts["pairs"] += 1
            counts["of_tasks"] += record.task_id is not None
            if record.task_id is None and self._mentions(record):
                found.mentions.append(f"{file}:{line}")
        except _RefusedError as error:
            found.rejections.append(Rejection(error.reason, str(error), file, line))
        except ValueError as error:
            found.rejections.append(Rejection("malformed", str(error), file, line))
        else:
            return
        counts[f"rejected: {found.rejections[-1].reason}"] += 1

    def _once(self, record: Demonstration | Preference, where: str) -> None:
        first = self._seen.setdefault(repr(record), where)
        if first != where:
            raise _RefusedError("duplicate", f"the same as {first}")

    # ---- demonstrations -----------------------------------------------------------------------------------------------------

    def _episode(self, record: Demonstration, name: str) -> Episode:
        episode = self._spoken(record, name) if record.task_id is None else self._played(record.task_id, record.messages, name)
        if record.task_id is not None and (episode.terminated or episode.truncated) and not episode.success:
            raise _RefusedError("failed", f"played to its end it does not solve {record.task_id}; leave failures out")
        episode.inherited = record.given
        if (length := episode_length(episode)) > self.max_length:
            raise _RefusedError("too_long", f"it has {length} words and marks, model.max_length is {self.max_length}")
        return episode

    def _spoken(self, record: Demonstration, name: str) -> Episode:
        """The episode of a conversation of no task."""
        episode = _empty(f"{IMPORTED}/{name}", f"{IMPORTED}/{name}", self.domain.name)
        said = [message["content"] for message in record.messages]
        for text, observation in zip(said[1::2], [*said[2::2], ""], strict=False):
            action = self._action(text)
            key = " ".join(action.lower().split())
            episode.turns.append(TurnRecord(action, observation, True, 0.0, 0.0, "", key, 0, 0))
        episode.messages = record.messages[: len(record.messages) // 2 * 2]
        return episode

    def _played(self, task_id: str, messages: Messages, name: str, splits: Sequence[str] = ("train", "valid")) -> Episode:
        """The episode of a record's actions in its task's environment."""
        task = self.tasks.get(task_id)
        if task is None:
            detail = f"task_id {task_id} names none of the curated tasks; leave task_id out for a conversation of no task"
            raise _RefusedError("unknown_task", detail)
        if task.split not in splits:
            raise _RefusedError("wrong_split", f"{task_id} is a {task.split} task; only {' and '.join(splits)} may be shown")
        said = [message["content"] for message in messages[1::2]]
        left = iter([self._action(text) for text in said])
        episode = play_out(self.environment, task, f"{IMPORTED}-{name}", IMPORTED, lambda: next(left, None), whole=False)
        assert episode is not None
        if next(left, None) is not None:
            raise _RefusedError("unlike_environment", f"it goes on after {len(episode.turns)} turns, which end {task_id}")
        for message, text in zip(episode.messages[1::2], said, strict=False):
            message["content"] = text  # with its thought, which is learnt, too
        answered = conversation(episode)
        for place, message in enumerate(messages):
            answer = answered[place]["content"] if place < len(answered) else ""
            if message["content"] != answer:
                detail = (
                    f"message {place} of {task_id} is {message['content']!r}, and with the present settings the environment says "
                    f"{answer!r}"
                )
                raise _RefusedError("unlike_environment", detail)
        episode.messages = episode.messages[: len(episode.messages) // 2 * 2]
        return episode

    def _action(self, text: str) -> str:
        """What the environment gets of an assistant's message."""
        return text if self.thinking is None else take_apart(text, self.thinking).action

    # ---- pairs --------------------------------------------------------------------------------------------------------------

    def _pair(self, record: Preference, name: str) -> dict[str, Any]:
        sides = (record.chosen, record.rejected)
        length = max(sum(len(pieces(message["content"])) for message in [*record.prompt, *side]) for side in sides)
        if length > self.max_length:
            raise _RefusedError("too_long", f"it has {length} words and marks, model.max_length is {self.max_length}")
        if record.task_id is not None:
            self._played(record.task_id, record.prompt, name, ("train",))
        return {
            "pair_id": f"{IMPORTED}/{name}",
            "task_id": record.task_id or "",
            "prompt": record.prompt,
            "chosen": record.chosen,
            "rejected": record.rejected,
            "chosen_value": record.values[0],
            "rejected_value": record.values[1],
            "weight": record.weight,
        }

    # ---- the panel ----------------------------------------------------------------------------------------------------------

    def _keep_off_the_panel(self, record: Demonstration | Preference) -> None:
        """Raise _RefusedError where a panel's task is told, be it before the messages were put in order or after."""
        if record.task_id is not None and isinstance(record, Demonstration):
            return  # its task is known, and that the environment says what it says is checked
        users = [message["content"] for part in _parts(record) for message in part if message["role"] == "user"]
        for text in dict.fromkeys((*record.asked, *users)):
            if (prompt := self._panel_prompts.told(text)) is not None:
                raise _RefusedError("panel_task", f"it tells a task of the frozen panel: {prompt!r}")

    def _mentions(self, record: Demonstration | Preference) -> bool:
        names = self._panel_names
        return names is not None and any(names.search(message["content"]) for part in _parts(record) for message in part)


def _parts(record: Demonstration | Preference) -> tuple[Messages, ...]:
    return (record.messages,) if isinstance(record, Demonstration) else (record.prompt, record.chosen, record.rejected)


def _empty(episode_id: str, task_id: str, domain: str) -> Episode:
    return Episode(episode_id, task_id, domain, task_id, 0, IMPORTED, "", 0.0, 1.0, 0, stop_reason=IMPORTED)
