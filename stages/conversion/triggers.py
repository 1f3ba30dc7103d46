"""S6: whether a further round starts. Pure functions of the log, but for `due`, which routes the new calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.conversion.curate_calls import Call, judged
from stages.conversion.masking import Masker
from stages.conversion.router import CallRouter, Routed, RouterError
from stages.conversion.settings import Conversion
from stages.conversion.specialise import Answer
from stages.records.sections import params_hash

NOT_CONVERTIBLE, CONVERTED, NOTHING_NEW = "not convertible", "converted", "nothing new"
"""What came of a round."""


def same_answer(call: Call, answer: Answer) -> bool:
    """Whether an answer is the logged one, up to white space."""
    return call["response"].split() == answer.text.split()


def rights(calls: Sequence[Call], routed: Sequence[Routed]) -> list[bool]:
    """Of the calls that specialists take and for which this is known: whether their answers are right, which they are if a trace
    with that answer succeeded."""
    found = []
    for call, one in zip(calls, routed, strict=True):
        if one.answer is not None and call["outcome"] is not None:
            same = same_answer(call, one.answer)
            if same or judged(call):  # an earlier specialist's other answer says nothing about this one
                found.append(call["outcome"] == 1 and same)
    return found


def fallback_rate(routed: Sequence[Routed]) -> float:
    """The share of calls that no specialist was good enough for; the calls of clusters that stay with the large model do not
    fall back."""
    return sum(one.fallback != "" for one in routed) / max(len(routed), 1)


def drift(calls: Sequence[Call], routed: Sequence[Routed], quality: float | None, settings: Conversion) -> str:
    """Why calls since the last round are a reason for another; "": they are not. `quality`: share of right answers of the
    specialists in the last round."""
    iterate, least = settings.iterate, settings.router.min_calls
    rate = fallback_rate(routed)
    if len(routed) >= least and rate > iterate.fallback_rate_above:
        return f"fallback rate {rate:.0%} of {len(routed)} new calls"
    right = rights(calls, routed)
    if quality is None or len(right) < least:
        return ""
    share = sum(right) / len(right)
    fell = share < quality - iterate.quality_drop_above - 1e-12
    return f"specialists are right in {share:.0%} of {len(right)} new calls, {quality:.0%} in the last round" if fell else ""


def key_of(call: Call, masker: Masker) -> tuple[str, int]:
    """A call's trace, masked, and number."""
    return masker.trace(str(call["trace"])), int(call["call"])


def due(settings: Conversion, calls: Sequence[Call], masker: Masker, root: Path, state: dict[str, Any] | None) -> str:
    """Why a round starts; "": nothing is new."""
    iterate, out = settings.iterate, root / settings.out
    if state is None or state["settings"] != params_hash(settings):
        return "first round" if state is None else "settings changed"
    seen = {(trace, number) for trace, number in state["seen"]}
    new = [call for call in calls if key_of(call, masker) not in seen]
    # Rounds that had too few calls do not count, or a log that grows slowly would never be converted.
    if not new or sum(one["status"] == CONVERTED for one in state["history"]) >= iterate.max_rounds:
        return ""
    if len(new) >= iterate.every_n_calls:
        return f"{len(new)} new calls"
    if not (out / "router.json").exists():
        return ""
    masked = [masker.mask_call(call) for call in new]
    try:
        return drift(masked, CallRouter.load(out).route(masked), state["quality"], settings)
    except RouterError:
        return "the last round did not finish"
