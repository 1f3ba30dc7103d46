"""Imported demonstrations and preference pairs (curate.imports): checked, replayed if they name a task, and kept free of panel
tasks. `stages.exchange.parsing` defines the shapes of a record.

A record with a `task_id` is replayed in its environment: it is accepted if the observations match and, if the episode ends, the
task is solved. Other records are plain conversations, whose form alone can be checked; those with a panel task's prompt in a
system or user message are rejected. Records of another `domain` are skipped.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.constraints.conformance import first_violation
from stages.constraints.settings import Constraint
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
from stages.records.thinking import Thinking, parse_turn


class _RejectedError(ValueError):
    """A rejected record: a short `reason`, which is counted, and the details."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass
class Imports:
    """The imported records. `counts`: file -> outcome -> number of records."""

    episodes: list[Episode] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    """Rows of PREFERENCE_SCHEMA."""
    rejections: list[Rejection] = field(default_factory=list)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    mentions: list[str] = field(default_factory=list)
    """Conversations without a task that mention names from panel tasks, as file:line."""

    def warnings(self) -> list[str]:
        """Lines to print: rejected records with reasons, and possible leaks."""
        lines = [f"rejected {rejection}" for rejection in self.rejections]
        if self.mentions:
            lines.append(
                f"{len(self.mentions)} imported conversations have names of panel tasks in them (the first: {self.mentions[0]}); "
                "they may leak information about the panel"
            )
        return lines

    def report(self) -> dict[str, Any]:
        """Outcomes of the records per file, for JSON."""
        return {
            "files": {file: dict(sorted(counts.items())) for file, counts in self.counts.items()},
            "mention_panel_names": len(self.mentions),
        }


class Importer:
    """Reads the records of one domain. `tasks`: all its curated tasks; `folder`: the output of `Domain.build`; `max_length`: most
    words and marks of a record (model.max_length); `thinking`: delimiters of thoughts (model.thinking)."""

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
        """All records of `files`, paths below `root`. Raises FileNotFoundError for a missing file."""
        found = Imports()
        for file in files:
            if not (root / file).is_file():
                raise FileNotFoundError(
                    f"curate.imports lists {file}, which does not exist; add the file ('dvc pull' if DVC has it), or remove it "
                    "from the list"
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
            self._check_duplicate(record, f"{file}:{line}")
            self._check_panel(record)
            if isinstance(record, Demonstration):
                found.episodes.append(self._episode(record, name))
                counts["demonstrations"] += 1
            else:
                found.pairs.append(self._pair(record, name))
                counts["pairs"] += 1
            counts["of_tasks"] += record.task_id is not None
            if record.task_id is None and self._mentions(record):
                found.mentions.append(f"{file}:{line}")
        except _RejectedError as error:
            found.rejections.append(Rejection(error.reason, str(error), file, line))
        except ValueError as error:
            found.rejections.append(Rejection("malformed", str(error), file, line))
        else:
            return
        counts[f"rejected: {found.rejections[-1].reason}"] += 1

    def _check_duplicate(self, record: Demonstration | Preference, where: str) -> None:
        first = self._seen.setdefault(repr(record), where)
        if first != where:
            raise _RejectedError("duplicate", f"the same as {first}")

    # ---- demonstrations -----------------------------------------------------------------------------------------------------

    def _episode(self, record: Demonstration, name: str) -> Episode:
        if record.task_id is None:
            episode = self._conversation(record, name)
        else:
            episode = self._replayed(record.task_id, record.messages, name)
            if (episode.terminated or episode.truncated) and not episode.success:
                raise _RejectedError("failed", f"replayed to its end, it does not solve {record.task_id}; leave failures out")
        self._check_constraint(episode)
        episode.inherited = record.given
        self._check_length(episode_length(episode))
        return episode

    def _check_constraint(self, episode: Episode) -> None:
        constraint: Constraint | None = getattr(self.domain.settings, "constraint", None)
        if constraint is None or "curate" not in constraint.apply:
            return
        turns = [message["content"] for message in episode.messages if message["role"] == "assistant"]
        if found := first_violation(constraint.rules, turns):
            raise _RejectedError("violates_constraint", f"turn {found[0] + 1} violates the domain's constraint: {found[1]}")

    def _check_length(self, length: int) -> None:
        if length > self.max_length:
            raise _RejectedError("too_long", f"it has {length} words and marks, model.max_length is {self.max_length}")

    def _conversation(self, record: Demonstration, name: str) -> Episode:
        """The episode of a conversation without a task."""
        imported = f"{IMPORTED}/{name}"
        episode = Episode(imported, imported, self.domain.name, imported, 0, IMPORTED, "", 0.0, 1.0, 0, stop_reason=IMPORTED)
        texts = [message["content"] for message in record.messages]
        for text, observation in zip(texts[1::2], [*texts[2::2], ""], strict=False):
            action = self._action(text)
            key = " ".join(action.lower().split())
            episode.turns.append(TurnRecord(action, observation, True, 0.0, 0.0, "", key, 0, 0))
        episode.messages = record.messages[: len(record.messages) // 2 * 2]
        return episode

    def _replayed(self, task_id: str, messages: Messages, name: str, splits: Sequence[str] = ("train", "valid")) -> Episode:
        """The episode of a record's actions in its task's environment."""
        task = self.tasks.get(task_id)
        if task is None:
            detail = f"task_id {task_id} is not a curated task; leave task_id out for a conversation without a task"
            raise _RejectedError("unknown_task", detail)
        if task.split not in splits:
            raise _RejectedError("wrong_split", f"{task_id} is a {task.split} task; only {' and '.join(splits)} are allowed")
        texts = [message["content"] for message in messages[1::2]]
        left = iter([self._action(text) for text in texts])
        episode = play_out(self.environment, task, f"{IMPORTED}-{name}", IMPORTED, lambda: next(left, None), complete=False)
        assert episode is not None
        if next(left, None) is not None:
            raise _RejectedError("unlike_environment", f"it continues after {len(episode.turns)} turns, which end {task_id}")
        for message, text in zip(episode.messages[1::2], texts, strict=False):
            message["content"] = text  # with its thought, which is learnt, too
        replayed = conversation(episode)
        for place, message in enumerate(messages):
            expected = replayed[place]["content"] if place < len(replayed) else ""
            if message["content"] != expected:
                raise _RejectedError(
                    "unlike_environment",
                    f"message {place} of {task_id} is {message['content']!r}; with the current settings it is {expected!r}",
                )
        episode.messages = episode.messages[: len(episode.messages) // 2 * 2]
        return episode

    def _action(self, text: str) -> str:
        """The action in an assistant's message, without thoughts."""
        return text if self.thinking is None else parse_turn(text, self.thinking).action

    # ---- pairs --------------------------------------------------------------------------------------------------------------

    def _pair(self, record: Preference, name: str) -> dict[str, Any]:
        sides = (record.chosen, record.rejected)
        self._check_length(max(sum(len(pieces(message["content"])) for message in [*record.prompt, *side]) for side in sides))
        if record.task_id is not None:
            self._replayed(record.task_id, record.prompt, name, ("train",))
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

    def _check_panel(self, record: Demonstration | Preference) -> None:
        """Raise _RejectedError if the original or normalised messages have a panel task's prompt in them."""
        if record.task_id is not None and isinstance(record, Demonstration):
            return  # its task is known, and its observations are checked by replaying
        users = [message["content"] for part in _parts(record) for message in part if message["role"] == "user"]
        for text in dict.fromkeys((*record.inputs, *users)):
            if (prompt := self._panel_prompts.find(text)) is not None:
                raise _RejectedError("panel_task", f"it has the prompt of a task of the frozen panel: {prompt!r}")

    def _mentions(self, record: Demonstration | Preference) -> bool:
        names = self._panel_names
        return names is not None and any(names.search(message["content"]) for part in _parts(record) for message in part)


def _parts(record: Demonstration | Preference) -> tuple[Messages, ...]:
    return (record.messages,) if isinstance(record, Demonstration) else (record.prompt, record.chosen, record.rejected)
