"""Small hand-made trajectory batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from stages.algorithms.batch import ENDED, Costs, StepKeys, TrajectoryBatch, TurnTerms, TurnWords
from stages.algorithms.parts.team_gae import TeamMoves
from stages.records.task import JUDGMENT_TERMS

MakeBatch = Callable[..., TrajectoryBatch]


def build(
    rewards: list[list[float]], lengths: list[int] | None = None, seed: int = 0, turns: list[list[int]] | None = None
) -> TrajectoryBatch:
    """Groups of episodes with these returns. Episode i has one prompt token, then `lengths[i]` policy tokens in one turn; or,
    with `turns`, turns of the given numbers of policy tokens, each followed by one environment token, the return on the last
    turn."""
    flat = torch.tensor([reward for group in rewards for reward in group], dtype=torch.float32)
    count = len(flat)
    group = torch.tensor([index for index, members in enumerate(rewards) for _ in members])
    spans = turns or [[length] for length in (lengths or [3] * count)]
    width = 1 + max(sum(span) + len(span) for span in spans)
    mask = torch.zeros(count, width, dtype=torch.bool)
    turn = torch.full((count, width), -1)
    row_lengths = []
    for row, span in enumerate(spans):
        at = 1
        for index, length in enumerate(span):
            mask[row, at : at + length] = True
            turn[row, at : at + length + 1] = index
            at += length + 1
        row_lengths.append(at)
    generator = torch.Generator().manual_seed(seed)
    most = max(len(span) for span in spans)
    turn_rewards = torch.zeros(count, most)
    for row, span in enumerate(spans):
        turn_rewards[row, len(span) - 1] = flat[row]
    return TrajectoryBatch(
        token_ids=torch.randint(0, 16, (count, width), generator=generator),
        lengths=torch.tensor(row_lengths),
        mask=mask,
        turn=turn,
        logprobs_old=-torch.rand(count, width, generator=generator) * mask,
        group=group,
        rewards=flat,
        turn_rewards=turn_rewards,
        turns=torch.tensor([len(span) for span in spans]),
        truncated=torch.zeros(count, dtype=torch.bool),
        overlong=torch.zeros(count, dtype=torch.bool),
        success=flat >= 1,
        accepted=torch.ones(count, most, dtype=torch.bool),
        tool_calls=torch.zeros(count),
        tools=torch.zeros(count, dtype=torch.int64),
        terms={
            **dict.fromkeys(JUDGMENT_TERMS, torch.zeros(count)),
            "well_formed": torch.ones(count),
            "exact_match": flat,
            "format_graded": torch.ones(count),
        },
    ).with_extra(
        Costs(torch.arange(count) * 10.0),
        distinct_keys([len(span) for span in spans], most),
        TurnTerms((), torch.zeros(count, most, 0)),
        TurnWords(torch.ones(count, most)),
        TeamMoves(torch.arange(count), torch.zeros(count, dtype=torch.int64), torch.tensor([list(range(most)) for _ in spans])),
    )


def distinct_keys(turns: list[int], width: int) -> StepKeys:
    """State, action and draw keys that are all different."""
    states, actions, numbers = torch.full((len(turns), width + 1), -1), torch.full((len(turns), width), -1), itertools.count()
    for row, length in enumerate(turns):
        for turn in range(length):
            states[row, turn] = actions[row, turn] = next(numbers)
        states[row, length] = ENDED
    names = tuple(f"state {number}" for number in range(sum(turns)))
    return StepKeys(states, actions, actions.clone(), names)


@pytest.fixture
def make_batch() -> MakeBatch:
    return build
