"""S2: from logged calls to training, validation and test rows. A pure function of the calls, in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stages.conversion.masking import Masker
from stages.conversion.settings import CurateCalls
from stages.seeding import key64

Call = dict[str, Any]
SHINGLE = 5
PARTS = (("train", 8), ("valid", 9), ("test", 10))
"""Traces by tenths: rows of one trace are never in two parts."""
CONFIRMED = ("llm", "verified")
"""Provenance of answers that may be trained on: the large model's, or a specialist's that a verifier confirmed."""


@dataclass(frozen=True)
class Curated:
    parts: dict[str, list[Call]]
    counts: dict[str, int]
    """Kept rows, and rejected ones by reason."""

    @property
    def rows(self) -> list[Call]:
        return [call for part in self.parts.values() for call in part]


def valid_call(call: Call) -> bool:
    """Whether a call has a conversation that ends with a user message, and an answer."""
    roles = [message.get("role") for message in call["prompt"]]
    return (
        bool(roles)
        and roles == [("user", "assistant")[place % 2] for place in range(len(roles))]
        and bool(call["response"].strip())
    )


def confirmed(call: Call, settings: CurateCalls) -> bool:
    """Whether a call may be trained on."""
    return call["provenance"] in CONFIRMED and (call["outcome"] == 1 or settings.keep_outcome == "all")


def judged(call: Call) -> bool:
    """Whether it is known if the large model's answer to a call is right: its trace's outcome was reported. What a specialist
    answered says nothing about the large model."""
    return call["outcome"] is not None and call["provenance"] in CONFIRMED


def shingles(call: Call) -> frozenset[tuple[str, ...]]:
    words = [*(word for message in call["prompt"] for word in message["content"].split()), "|", *call["response"].split()]
    return frozenset(tuple(words[place : place + SHINGLE]) for place in range(max(1, len(words) - SHINGLE + 1)))


def jaccard(first: frozenset[Any], second: frozenset[Any]) -> float:
    return len(first & second) / len(first | second)


def without_duplicates(calls: Sequence[Call], similarity: float) -> list[Call]:
    """The calls that are not near-duplicates of an earlier one that is kept. Only calls that share a shingle are compared."""
    kept: list[frozenset[tuple[str, ...]]] = []
    by_shingle: dict[tuple[str, ...], list[int]] = {}
    found = []
    for call in calls:
        own = shingles(call)
        others = {number for shingle in own for number in by_shingle.get(shingle, ())}
        if any(jaccard(own, kept[number]) >= similarity for number in others):
            continue
        for shingle in own:
            by_shingle.setdefault(shingle, []).append(len(kept))
        kept.append(own)
        found.append(call)
    return found


def part_of(trace: str, seed: int) -> str:
    tenth = key64(seed, "conversion", trace) % 10
    return next(name for name, below in PARTS if tenth < below)


def curated(calls: Sequence[Call], settings: CurateCalls, masker: Masker, seed: int) -> Curated:
    """Schema check, masking, outcome filter, duplicates, split by trace.

    Training rows are confirmed ones: answers of the large model in traces that succeeded. Failures stay in validation and test,
    so that these are not easier than what will be asked. Calls that a router left to the large model, as no specialist was good
    enough, are taken first where `max_examples` cuts. Raises LeakError if personal data is left.
    """
    counts: Counter[str] = Counter()
    ordered = sorted(calls, key=lambda call: (call["trace"], call["call"]))
    masked = [masker.mask_call(call) for call in ordered if valid_call(call)]
    counts["malformed"] = len(ordered) - len(masked)
    masker.check(masked)
    # Before duplicates, or an unconfirmed call would take confirmed ones like it along.
    usable = [call for call in masked if part_of(call["trace"], seed) != "train" or confirmed(call, settings)]
    counts["unconfirmed"] = len(masked) - len(usable)
    unique = without_duplicates(usable, settings.dedup_jaccard)
    counts["duplicate"] = len(usable) - len(unique)
    parts: dict[str, list[Call]] = {name: [] for name, _ in PARTS}
    # Those of valid and test are no matter of choice: the rates measured on them are to be those of all calls.
    for call in sorted(unique, key=lambda call: part_of(call["trace"], seed) == "train" and not call.get("fallback")):
        part = part_of(call["trace"], seed)
        if len(parts[part]) >= settings.max_examples:
            counts["over max_examples"] += 1
        else:
            parts[part].append(call)
    parts = {name: sorted(rows, key=lambda call: (call["trace"], call["call"])) for name, rows in parts.items()}
    return Curated(
        parts,
        {
            **{f"rejected: {name}": count for name, count in sorted(counts.items()) if count},
            **{name: len(rows) for name, rows in parts.items()},
        },
    )
