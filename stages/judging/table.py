"""The table of judgments: who judged what, in which order, with which scores and reason, at what cost. One row per judgment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.judging.contract import Judge, Judgment, Question
from stages.records.episode import write_table

JUDGMENT_SCHEMA = pa.schema(
    [
        ("judgment_id", pa.string()),
        ("judge", pa.string()),
        ("judge_version", pa.string()),
        ("kind", pa.string()),
        ("task_id", pa.string()),
        ("candidates", pa.list_(pa.string())),
        ("answers", pa.list_(pa.string())),
        ("principles", pa.list_(pa.string())),
        ("repeat", pa.int32()),
        ("scores", pa.list_(pa.float64())),
        ("reason", pa.string()),
        ("status", pa.string()),
        ("calls", pa.int32()),
        ("tokens_in", pa.int64()),
        ("tokens_out", pa.int64()),
        ("money", pa.float64()),
        ("step", pa.int32()),
    ]
)
"""`candidates`: the episodes' ids in the order in which they were shown, so that a pair and its swap are two rows; `answers`:
what they answered; `principles`: those that the judge read. `judgment_id` identifies the question by all that it read. `scores`
is empty unless `status` is "ok". `step`: of training, from 1; 0 elsewhere."""


def judgment_row(judge: Judge, question: Question, judgment: Judgment, step: int = 0) -> dict[str, Any]:
    """A row of JUDGMENT_SCHEMA."""
    cost = judgment.cost
    return {
        "judgment_id": question.key,
        "judge": judge.name,
        "judge_version": judge.version,
        "kind": question.kind,
        "task_id": question.task_id,
        "candidates": [candidate.name for candidate in question.candidates],
        "answers": [candidate.answer for candidate in question.candidates],
        "principles": list(question.rubric.principles),
        "repeat": question.repeat,
        "scores": list(judgment.scores),
        "reason": judgment.reason,
        "status": judgment.status.value,
        "calls": cost.calls,
        "tokens_in": cost.tokens_in,
        "tokens_out": cost.tokens_out,
        "money": cost.money,
        "step": step,
    }


def write_judgments(path: Path | str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows in an order that does not depend on how they were asked: by step, task, question, candidates."""
    key = ("step", "task_id", "judgment_id", "candidates", "repeat")
    write_table(path, JUDGMENT_SCHEMA, sorted(rows, key=lambda row: tuple(row[name] for name in key)))
