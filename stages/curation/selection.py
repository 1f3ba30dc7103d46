"""Orders raw records by the target mix of difficulties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stages.curation.raw import RawRecord
from stages.environments.protocol import Domain


def order_by_mix(records: Sequence[RawRecord], domain: Domain) -> list[RawRecord]:
    """`records` in an order in which every prefix has about the difficulty mix of the domain's settings: its optional methods
    `record_difficulty(record) -> float` and `difficulty_weights() -> {difficulty: weight}`. Levels of weight 0 are left out.
    Without these methods the order is unchanged."""
    difficulty = getattr(domain, "record_difficulty", None)
    if difficulty is None:
        return list(records)
    weights = {level: weight for level, weight in domain.difficulty_weights().items() if weight > 0}  # type: ignore[attr-defined]
    waiting: dict[float, list[RawRecord]] = defaultdict(list)
    for record in records:
        waiting[difficulty(record.record)].append(record)
    queues = {level: waiting[level][::-1] for level in sorted(weights)}
    taken = dict.fromkeys(queues, 0)
    ordered = []
    while any(queues.values()):
        # The level furthest behind its weight comes next.
        level = min((level for level in queues if queues[level]), key=lambda item: ((taken[item] + 1) / weights[item], item))
        taken[level] += 1
        ordered.append(queues[level].pop())
    return ordered
