"""stages.engine.passes: grouping of sessions in a prefill pass."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch

from stages.engine.cache import SlotCache
from stages.engine.passes import GROUP_COST, LENGTH_STEP, QUERY_STEP, PassBuilder
from stages.engine.slots import Session, round_up
from stages.seeding import stream


def make_sessions(name: int, count: int) -> tuple[list[Session], dict[int, int]]:
    rng = stream("grouped", name)
    sessions = [Session(number, [1] * 400, None, rng.randrange(380)) for number in range(count)]
    for session, slot in zip(sessions, rng.sample(range(16), count), strict=True):
        session.slot = slot
    return sessions, {session.id: 1 + rng.randrange(20 if name % 2 else 150) for session in sessions}


def cost(group: list[Session], sizes: dict[int, int]) -> int:
    width = max(round_up(sizes[session.id], QUERY_STEP) for session in group)
    return len(group) * width * max(round_up(session.cached + sizes[session.id], LENGTH_STEP) for session in group) + GROUP_COST


@pytest.mark.parametrize("name", range(8))
def test_prefill_groups_have_minimal_cost(name):
    """Contract: every session is in one group, and no other partition of the sorted sessions costs less."""
    sessions, sizes = make_sessions(name, 7)
    builder = PassBuilder(SlotCache(1, 16, 1, 416, 4, torch.float32, torch.device("cpu")), torch.float32)
    groups = builder.groups(sessions, sizes)
    assert sorted(session.id for group in groups for session in group) == list(range(7))
    assert all(first.slot < second.slot for group in groups for first, second in pairwise(group))

    def size(session: Session) -> tuple[int, int, int]:
        width, length = round_up(sizes[session.id], QUERY_STEP), session.cached + sizes[session.id]
        return -width, -round_up(length, LENGTH_STEP), session.id

    ordered = sorted(sessions, key=size)
    divisions = [
        [ordered[first:last] for first, last in pairwise((0, *cuts, 7))]
        for number in range(7)
        for cuts in combinations(range(1, 7), number)
    ]
    costs = [sum(cost(group, sizes) for group in division) for division in divisions]
    assert sum(cost(group, sizes) for group in groups) == min(costs) < costs[0]
