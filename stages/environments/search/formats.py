"""Format of an episode with thoughts, searches, results and an answer, told from its record: who wrote what is never found from
text, so a result that quotes an action changes nothing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

PLACEHOLDERS = ("<query>", "<question>", "<source>", "<name>", "your query", "your thoughts", "your answer", "your information")
"""Words of prompts that a policy may copy in place of its own."""
TARGET_THINKS, MAX_THINKS = 2, 8


@dataclass(frozen=True)
class Span:
    """A thought, a query, a result or the answer; `other`: an action that the environment did not understand."""

    kind: Literal["think", "search", "information", "answer", "other"]
    text: str = ""


def _blank(span: Span) -> bool:
    return span.text.strip() in ("", "...")


def _copied(text: str) -> bool:
    return any(phrase in text.lower() for phrase in PLACEHOLDERS)


def _counts(spans: Sequence[Span]) -> Counter[str]:
    return Counter(span.kind for span in spans)


def routed_query(text: str) -> tuple[str, str] | None:
    """Name and question of `<name>: <question>`, as Router-R1 reads it: what follows a second colon is dropped. None without a
    colon, and for an empty last part or a placeholder."""
    name, *rest = (part.strip() for part in text.split(":"))
    return (name, rest[0]) if rest and rest[-1] and rest[0] and not _copied(text) else None


def _bad_route(text: str, names: Collection[str]) -> bool:
    """Whether a query breaks the format: no known name, more than one colon, or a question that repeats the name."""
    read = routed_query(text)
    if read is None or read[0] not in names or text.count(":") != 1:
        return True
    return re.search(rf"\b{re.escape(read[0])}\b", read[1]) is not None


def route_format(spans: Sequence[Span], names: Collection[str], think: bool = True) -> float:
    """Router-R1's format score F (arXiv 2506.09033): 0, or -1 if anything is wrong. names: the pool's; think: False where the
    policy's thoughts are no actions, so that their rules do not apply."""
    count, kinds = _counts(spans), [span.kind for span in spans]
    wrong = (
        count["other"] > 0,
        count["answer"] != 1 or kinds[-1] != "answer",
        count["search"] != count["information"],
        think and (count["think"] == 0 or kinds[0] != "think"),
        any(_blank(span) for span in spans if span.kind == "think"),
        any(_bad_route(span.text, names) for span in spans if span.kind == "search"),
    )
    return -1.0 if any(wrong) else 0.0


def graded_format(
    spans: Sequence[Span], target_thinks: int = TARGET_THINKS, max_thinks: int = MAX_THINKS, think: bool = True
) -> float:
    """SSRL's format score f in [0, 1] (arXiv 2508.10874): 0 if anything is wrong, else
    min(1, n_t / target) min(n_t, n_s + 1) / max(n_t, n_s + 1), n_t thoughts and n_s searches. think: False where the policy's
    thoughts are no actions; then n_t = n_s + 1."""
    count, kinds = _counts(spans), [span.kind for span in spans]
    searches = count["search"]
    thoughts = count["think"] if think else searches + 1
    paired = all(kinds[place + 1 : place + 2] == ["information"] for place, kind in enumerate(kinds) if kind == "search")
    wrong = (
        count["other"] > 0,
        not kinds or kinds[-1] != "answer",
        think and (len(kinds) < 2 or kinds[0] != "think"),
        not paired or searches != count["information"],
        any(_blank(span) or _copied(span.text) for span in spans),
        any("\n" in span.text for span in spans if span.kind == "search"),
        thoughts > max_thinks,
    )
    if any(wrong):
        return 0.0
    return min(1.0, thoughts / target_thinks) * min(thoughts, searches + 1) / max(thoughts, searches + 1)
