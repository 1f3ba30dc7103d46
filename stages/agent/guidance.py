"""Hints: what a teacher tells the policy in a guided attempt, made from a solution and a failed attempt. Light to import.

Kinds as in Agent-RLVR (arXiv 2506.11425): `plan`, the order of steps; `env_feedback`, what the failed attempt got wrong;
`env_interaction`, where to act next. The texts are ours; none of them names the solution's last action, which submits the result.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from stages.records.actions import action_key
from stages.records.episode import TurnRecord

Kind = Literal["plan", "env_feedback", "env_interaction"]
KINDS: tuple[Kind, ...] = ("plan", "env_feedback", "env_interaction")
OPEN, CLOSE = "[hint]", "[/hint]"
WORDS = 12
"""Words of an observation that feedback repeats."""


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


def leaks(hint: str, answer: str) -> bool:
    """Whether a hint contains the answer, ignoring case, punctuation and spaces; an answer without words can't leak."""
    return bool(_words(answer).strip()) and _words(answer) in _words(hint)


def mentions(actions: Sequence[str], hint: str, words: Sequence[str]) -> bool:
    """Whether actions talk about the hint: they contain one of `words`, one of the marks, or the whole hint."""
    text = "\n".join(actions).lower()
    spoken = _words(text)
    return (
        any(_words(word).strip() and _words(word) in spoken for word in words)
        or OPEN in text
        or CLOSE in text
        or action_key(hint) in action_key(text)
    )
