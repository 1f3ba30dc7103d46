"""How many transcripts obey a constraint, and why others do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stages.constraints.grammar import GrammarRules
from stages.constraints.monitor import Position
from stages.constraints.transcript import Transcripts
from stages.records.episode import Owner

WRITTEN = (Owner.POLICY, Owner.FORCED)
"""Owners of the tokens of the policy's turns."""


def first_violation(rules: Transcripts | GrammarRules, turns: Sequence[str]) -> tuple[int, str] | None:
    """The number of the first turn that violates the constraint, from 0, and why; None if all obey."""
    position: Position | None = rules.start
    for number, text in enumerate(turns):
        reading = rules.read(position, text)
        if reading.violation:
            return number, reading.violation
        position = rules.next_turn(reading.position)
    return None


def conformance(rules: Transcripts | GrammarRules, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of episodes (rows of EPISODE_SCHEMA): the share that obeys, the share of their turns' tokens that were forced, and how
    often each reason for a violation occurs."""
    reasons: Counter[str] = Counter()
    written = forced = 0
    for row in rows:
        found = first_violation(rules, [message["content"] for message in row["messages"] if message["role"] == "assistant"])
        if found is not None:
            reasons[found[1]] += 1
        written += sum(owner in WRITTEN for owner in row["owner"])
        forced += sum(owner == Owner.FORCED for owner in row["owner"])
    obeying = len(rows) - sum(reasons.values())
    return {
        "episodes": len(rows),
        "conforming": obeying,
        "conformance": obeying / max(len(rows), 1),
        "tokens": written,
        "forced_share": forced / max(written, 1),
        "violations": dict(reasons.most_common()),
    }
