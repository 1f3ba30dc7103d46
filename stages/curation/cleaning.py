"""Cleaning: duplicates, overlap between splits, and length. Rules return the accepted items and the rejections."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from stages.curation.raw import RawRecord, Rejection
from stages.environments.protocol import Domain
from stages.records.episode import Episode
from stages.records.task import Task

_PIECE = re.compile(r"\w+|[^\w\s]")


def pieces(text: str) -> list[str]:
    """Words and punctuation marks in lower case: in practice a lower bound on the number of tokens."""
    return _PIECE.findall(text.lower())


def drop_duplicate_records(records: Sequence[RawRecord]) -> tuple[list[RawRecord], list[Rejection]]:
    """The first record of each task_id and of each content (all keys but task_id)."""
    kept, rejections = [], []
    ids: dict[str, RawRecord] = {}
    contents: dict[str, RawRecord] = {}
    for record in records:
        if record.task_id in ids:
            detail = f"task_id '{record.task_id}' is already that of line {ids[record.task_id].line}"
            rejections.append(Rejection.of(record, "duplicate_id", detail))
        elif record.content in contents:
            detail = f"the same as '{contents[record.content].task_id}' of line {contents[record.content].line}"
            rejections.append(Rejection.of(record, "duplicate", detail))
        else:
            ids[record.task_id] = contents[record.content] = record
            kept.append(record)
    return kept, rejections


def _signature(task: Task) -> str:
    return " ".join(pieces(f"{task.prompt}\n{json.dumps(task.spec, sort_keys=True)}"))


def task_faults(tasks: Sequence[Task], domain: Domain, max_length: int) -> dict[str, tuple[str, str]]:
    """task_id -> (reason, detail) of the tasks to reject, checking test, then valid, then train, so that training data never
    affects the test split.

    "split_overlap": its world (cluster) is used by an earlier split, or it shares entities with a test task. "near_duplicate":
    prompt and spec equal an earlier task's except for case, spaces and punctuation. "too_long": the prompt alone has more words
    and marks than the model's `max_length`. "empty": no prompt.
    """
    faults: dict[str, tuple[str, str]] = {}
    owner: dict[str, str] = {}
    signatures: dict[str, str] = {}
    test_entities: dict[str, str] = {}
    for split in ("test", "valid", "train"):
        for task in (task for task in tasks if task.split == split):
            entities = domain.entities(task)
            shared = sorted(entities & test_entities.keys()) if split != "test" else []
            signature = _signature(task)
            length = len(pieces(task.prompt))
            if task.cluster and owner.get(task.cluster, split) != split:
                faults[task.task_id] = "split_overlap", f"its world '{task.cluster}' also serves the {owner[task.cluster]} split"
            elif shared:
                detail = f"shares {shared[:3]} with test task '{test_entities[shared[0]]}'"
                faults[task.task_id] = "split_overlap", detail
            elif signature in signatures:
                faults[task.task_id] = "near_duplicate", f"reads like '{signatures[signature]}'"
            elif length == 0:
                faults[task.task_id] = "empty", "the prompt has no words"
            elif length > max_length:
                faults[task.task_id] = "too_long", f"the prompt has {length} words and marks, model.max_length is {max_length}"
            else:
                signatures[signature] = task.task_id
                if task.cluster:
                    owner[task.cluster] = split
                if split == "test":
                    test_entities.update(dict.fromkeys(sorted(entities - test_entities.keys()), task.task_id))
    return faults


def reject_faulty(
    tasks: Sequence[Task], faults: Mapping[str, tuple[str, str]], sources: Mapping[str, RawRecord]
) -> tuple[list[Task], list[Rejection]]:
    """Split `tasks` by `faults` (of `task_faults`); `sources` gives the raw record of each task_id."""
    rejections = [Rejection.of(sources[task.task_id], *faults[task.task_id]) for task in tasks if task.task_id in faults]
    return [task for task in tasks if task.task_id not in faults], rejections


def transcript(episode: Episode) -> list[str]:
    """Words and marks of all messages after the prompt."""
    return [piece for message in episode.messages[1:] for piece in pieces(message["content"])]


def similarity(a: Sequence[str], b: Sequence[str]) -> float:
    """Ratcliff-Obershelp similarity, from 0 to 1 for equal sequences."""
    return SequenceMatcher(None, a, b, autojunk=False).ratio()


def is_near_duplicate(episode: Episode, kept: Sequence[Episode], threshold: float) -> bool:
    """Whether `episode` is at least `threshold` similar to one of `kept` (demonstrations of the same task)."""
    words = transcript(episode)
    return any(similarity(words, transcript(other)) >= threshold for other in kept)


def episode_length(episode: Episode) -> int:
    """Words and marks of all messages."""
    return sum(len(pieces(message["content"])) for message in episode.messages)
