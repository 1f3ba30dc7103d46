"""Hints: what a teacher tells the policy in a guided attempt, made from a solution and a failed attempt. Light to import.

Kinds as in Agent-RLVR (arXiv 2506.11425): `plan`, the order of steps; `env_feedback`, what the failed attempt got wrong;
`env_interaction`, where to act next. The texts are ours; none of them names the solution's last action, which submits the result.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from stages.records.actions import action_key
from stages.records.amounts import amounts, sole_amount
from stages.records.episode import TurnRecord

Kind = Literal["plan", "env_feedback", "env_interaction"]
KINDS: tuple[Kind, ...] = ("plan", "env_feedback", "env_interaction")
OPEN, CLOSE = "[hint]", "[/hint]"
WORDS = 12
"""Words of an observation that feedback repeats."""
_ARTICLES = ("a", "an", "the")


def marked(hint: str) -> str:
    """A hint as the first message shows it, after the task: on a line of its own, between the marks."""
    return f"\n{OPEN} {hint} {CLOSE}"


def plan(solution: Sequence[TurnRecord]) -> str:
    """The first words of the solution's actions, in order."""
    return "plan: " + ", ".join(turn.action.split()[0] for turn in solution if turn.action.split())


def env_feedback(solution: Sequence[TurnRecord], failed: Sequence[TurnRecord]) -> str:
    """The failed attempt's first action that is not one of the solution's, and the start of its observation; "" if there is
    none."""
    right = {turn.action_key for turn in solution}
    wrong = next((turn for turn in failed if turn.action_key not in right), None)
    if wrong is None:
        return ""
    seen = " ".join(wrong.observation.split()[:WORDS])
    return f"wrong before: {' '.join(wrong.action.split())}" + (f", which gave: {seen}" if seen else "")


def env_interaction(solution: Sequence[TurnRecord], failed: Sequence[TurnRecord]) -> str:
    """The solution's first action that the failed attempt lacks, but never its last; "" if there is none."""
    tried = {turn.action_key for turn in failed}
    missing = next((turn for turn in solution[:-1] if turn.action_key not in tried), None)
    return "" if missing is None else f"do this: {' '.join(missing.action.split())}"


def hint_of(kind: Kind, solution: Sequence[TurnRecord], failed: Sequence[TurnRecord]) -> str:
    """The hint of one kind, on one line; "" where there is nothing to say."""
    if not solution:
        return ""
    if kind == "plan":
        return plan(solution)
    return env_feedback(solution, failed) if kind == "env_feedback" else env_interaction(solution, failed)


def _words(text: str) -> str:
    words = re.findall(r"[^\W_]+", text.lower())
    return f" {' '.join(words)} "


def _without_articles(words: str) -> str:
    return f" {' '.join(word for word in words.split() if word not in _ARTICLES)} "


_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_FORMS: Sequence[Callable[[str], str]] = (
    _words,
    lambda text: _without_articles(_words(text)),
    lambda text: _without_articles(text.lower().translate(_DROP_PUNCTUATION)),
)
"""What graders take for equal: punctuation separates words or is dropped, articles count or do not."""


def leaks(text: str, *answers: str) -> bool:
    """Whether a text contains one of the answers as words of its own, ignoring case, punctuation, spaces and articles, or, of an
    answer that is a number, that number in another form ("1.284 million" for "1,284,000"). An answer without words can't leak."""
    spoken, numbers = [form(text) for form in _FORMS], amounts(text)
    for answer in answers:
        written = [form(answer) for form in _FORMS]
        if any(words.strip() and words in said for words, said in zip(written, spoken, strict=True)):
            return True
        if (number := sole_amount(answer)) is not None and number in numbers:
            return True
    return False


def accepted_answers(spec: Mapping[str, Any]) -> list[str]:
    """The answers that a task's spec lists: its `answer`, and all of `accepted`."""
    accepted = spec.get("accepted")
    listed = [spec.get("answer"), *(accepted if isinstance(accepted, (list, tuple)) else ())]
    return list(dict.fromkeys(str(answer) for answer in listed if answer not in (None, "")))


def solution_answers(spec: Mapping[str, Any], action: str, stated: str | None = None) -> list[str]:
    """What a hint must not contain: the answers that a task's spec lists, and the one of its solution's last action, `answer
    <text>` or as the domain reads it (`stated`); in domains without answers, that action itself ("": no solution is known)."""
    verb, _, text = action.strip().partition(" ")
    own = [stated or "", text.strip() if verb.lower() == "answer" else ""]
    found = dict.fromkeys([*accepted_answers(spec), *(answer for answer in own if answer)])
    return list(found) or [action]


def shows_marks(texts: Iterable[str]) -> bool:
    """Whether one of the texts has a mark of hints."""
    return any(mark in text.lower() for text in texts for mark in (OPEN, CLOSE))


def mentions(texts: Sequence[str], hint: str, words: Sequence[str]) -> bool:
    """Whether the policy's texts talk about the hint: they contain one of `words`, one of the marks, or the whole hint."""
    text = "\n".join(texts).lower()
    spoken = _words(text)
    return (
        any(_words(word).strip() and _words(word) in spoken for word in words)
        or shows_marks(texts)
        or action_key(hint) in action_key(text)
    )
