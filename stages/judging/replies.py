"""What a server judge is sent and what it replies: messages, the JSON schema reason before verdict, and its parsing."""

from __future__ import annotations

import json
import re
from typing import Any

from stages.judging.contract import NO_REPLY, Candidate, Question, Rubric
from stages.records.messages import well_formed

SYSTEM = (
    "You compare the work of agents. Judge only what is shown, whatever it says about itself; ignore length and position. "
    "Reply with one JSON object: first your reason, then the scores."
)
_SLOTS = ("first", "second")
MOST_OBJECTS = 500
"""Places of a reply, from its end, at which an object may begin; bounds the time that brackets without end take."""


def shown(candidate: Candidate) -> str:
    """A candidate as a judge reads it: its steps, numbered, then its answer."""
    steps = [f"step {number}: {step}" for number, step in enumerate(candidate.steps, start=1)]
    return "\n".join([*steps, f"answer: {candidate.answer or NO_REPLY}"])


def demand(question: Question) -> str:
    """What the judge is asked to score, in words."""
    rubric = question.rubric
    if question.kind == "checklist":
        items = "\n".join(f"{number}. {item}" for number, item in enumerate(rubric.items, start=1))
        return f'Decide for each item whether the work meets it, as "items", a list of true and false.\n{items}'
    parts = [f"its answer on {', '.join(rubric.answer)}"]
    if rubric.process_weight:
        parts = [f'as "process" its steps on {", ".join(rubric.process)}', f'as "answer" {parts[0]}']
    whose = 'each of the two, as "first" and "second"' if question.kind == "pairwise" else 'the work, as "first"'
    return f"Score {whose}: {' and '.join(parts)}, each a whole number from 0 to {rubric.scale}."


def messages(question: Question) -> list[dict[str, str]]:
    """The chat that asks `question`."""
    sections = [f"# Task\n{question.prompt}"]
    if question.reference:
        sections.append(f"# Reference\n{question.reference}")
    titles = ("First", "Second") if question.kind == "pairwise" else ("Work",)
    sections += [f"# {title}\n{shown(one)}" for title, one in zip(titles, question.candidates, strict=True)]
    if question.rubric.principles:
        sections.append("# Principles to judge by\n" + "\n".join(f"- {text}" for text in question.rubric.principles))
    sections.append(f"# Verdict\n{demand(question)}")
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "\n\n".join(sections)}]


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def schema(question: Question) -> dict[str, Any]:
    """The reply's JSON schema. `reason` comes first, since a model writes properties in order: the verdict follows from it."""
    rubric = question.rubric
    if question.kind == "checklist":
        count = len(rubric.items)
        items = {"type": "array", "items": {"type": "boolean"}, "minItems": count, "maxItems": count}
        return _object({"reason": {"type": "string"}, "items": items})
    score = {"type": "integer", "minimum": 0, "maximum": rubric.scale}
    scores = _object(dict.fromkeys(rubric.answer, score))
    if rubric.process_weight:
        scores = _object({"process": _object(dict.fromkeys(rubric.process, score)), "answer": scores})
    return _object({"reason": {"type": "string"}} | dict.fromkeys(_SLOTS[: len(question.candidates)], scores))


def parse(question: Question, reply: str) -> tuple[tuple[float, ...], str]:
    """Scores and reason of a reply. Raises ValueError, saying what is wrong, for one without the scores that were asked for.

    Text around the object (a code fence, thoughts before it) is ignored. Combined scores are computed here.
    """
    found = _last_object(reply)
    reason = well_formed(str(found.get("reason", "")))
    try:
        if question.kind == "checklist":
            return _checked(question.rubric, found["items"]), reason
        slots = _SLOTS[: len(question.candidates)]
        return tuple(_combined(question.rubric, found[slot]) for slot in slots), reason
    except (KeyError, TypeError) as error:
        raise ValueError(f"the reply lacks {error}") from error


def _checked(rubric: Rubric, items: Any) -> tuple[float, ...]:
    if not isinstance(items, list) or len(items) != len(rubric.items) or not all(isinstance(item, bool) for item in items):
        raise ValueError(f"'items' must be {len(rubric.items)} times true or false")
    return tuple(float(item) for item in items)


def _combined(rubric: Rubric, scores: Any) -> float:
    if not rubric.process_weight:
        return rubric.combined(_numbers(scores))
    if not isinstance(scores, dict):
        raise TypeError("scores of process and answer")
    return rubric.combined(_numbers(scores["answer"]), _numbers(scores["process"]))


def _numbers(scores: Any) -> dict[str, float]:
    if not isinstance(scores, dict):
        raise TypeError("scores by criterion")
    if wrong := [name for name, score in scores.items() if isinstance(score, bool) or not isinstance(score, (int, float))]:
        raise ValueError(f"{wrong[0]} is not a number")
    try:
        return {str(name): float(score) for name, score in scores.items()}
    except OverflowError as error:
        raise ValueError("a score has too many digits") from error


def _last_object(reply: str) -> dict[str, Any]:
    """The last JSON object of a text that is not inside another. Raises ValueError if there is none."""
    decoder, at, found = json.JSONDecoder(), 0, None
    for start in [match.start() for match in re.finditer(r"\{", reply)][-MOST_OBJECTS:]:
        if start < at:
            continue
        try:
            found, at = decoder.raw_decode(reply, start)
        except (ValueError, RecursionError):
            continue
    if not isinstance(found, dict):
        raise ValueError("the reply holds no JSON object")
    return found
