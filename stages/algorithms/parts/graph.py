"""Step advantages from the graph of a group's episodes: equal steps get the mean advantage of the episodes that took them.

Nodes are the environment's states, edges its actions (SALT, arXiv 2510.20022). All steps of a group with equal keys form an edge
E:

    A_E = mean over the episodes that took E of their own advantage at it,

and a step that no other episode took keeps its advantage, bit for bit. Nothing propagates along the graph, so loops need no
order. Turns that branches of a rollout share are merged the same way (ARPO's hard attribution): their key is the draw they stem
from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stages.algorithms.batch import StepKeys, TrajectoryBatch

if TYPE_CHECKING:
    from stages.algorithms.parts.credit import Credit

_ROUNDING = 1e-6
"""A mean below this share of the group's largest |A| is rounding error: advantages that cancel give exactly 0."""
_WORD = re.compile(r"\w+")


def step_keys(batch: TrajectoryBatch, kind: str) -> StepKeys:
    """The batch's StepKeys. Raises ValueError if it has none."""
    keys = batch.get(StepKeys)
    if keys is None:
        raise ValueError(f"rl.credit.kind: {kind} needs the states and actions of the turns (StepKeys), and this batch has none")
    return keys


def turn_advantages(batch: TrajectoryBatch) -> Tensor:
    """The advantage of each turn, [B, U] float32, 0 where it has no policy token.

    Raises ValueError if the batch has none yet, or if tokens of one turn differ in theirs.
    """
    if batch.advantages is None:
        raise ValueError("step credit modifies advantages, and the batch has none yet")
    result = torch.zeros(batch.turn_rewards.shape)
    rows = torch.arange(batch.size)
    for turn in range(result.shape[1]):
        tokens = batch.mask & (batch.turn == turn)
        result[:, turn] = torch.where(tokens.any(1), batch.advantages[rows, tokens.int().argmax(1)], torch.zeros(()))
    if not torch.equal(result.gather(1, batch.turn.clamp(min=0)) * batch.mask, batch.advantages * batch.mask):
        raise ValueError("tokens of one turn differ in their advantage; rl.credit.kind graph and branches merge whole turns")
    return result


def similar_states(names: Sequence[str], threshold: float) -> dict[str, str]:
    """Each name's representative: the first one, in alphabetical order, whose word counts have at least this cosine similarity;
    itself if there is none."""
    found: dict[str, str] = {}
    leaders: list[tuple[str, Counter[str], float]] = []
    for name in sorted(set(names)):
        words = Counter(_WORD.findall(name.lower()))
        length = sum(count * count for count in words.values()) ** 0.5
        for leader, theirs, their_length in leaders:
            product = sum(count * theirs[word] for word, count in words.items())
            if product >= threshold * length * their_length > 0:
                found[name] = leader
                break
        else:
            found[name] = name
            leaders.append((name, words, length))
    return found


def _states(batch: TrajectoryBatch, keys: StepKeys, params: Credit) -> list[list[Hashable]]:
    """State keys of each row, U + 1 of them; similar states are equal where `match` is cosine."""
    numbers = keys.states.tolist()
    if params.match != "cosine":
        return numbers
    result: list[list[Hashable]] = [list(row) for row in numbers]
    for group in batch.group.unique().tolist():
        rows = torch.nonzero(batch.group == group).flatten().tolist()
        # Ends have no text, and numbers below 0; they stay distinct.
        used = [keys.state_names[number] for row in rows for number in numbers[row] if number >= 0]
        leaders = similar_states(used, params.threshold)
        for row in rows:
            result[row] = [leaders[keys.state_names[number]] if number >= 0 else number for number in numbers[row]]
    return result


def edges(batch: TrajectoryBatch, params: Credit) -> Tensor:
    """[B, U] int64: steps of one group have the same number if they are one edge of its graph; -1 past an episode's end.

    A key is (s, a, s') or (s, a), as `key` says, and those of the `history` steps before it. match: scrambled, the control, gives
    every step a key of its own. Raises ValueError without StepKeys.
    """
    keys = step_keys(batch, "graph")
    states, actions = _states(batch, keys, params), keys.actions.tolist()
    numbers: dict[Hashable, int] = {}
    result = torch.full(batch.turn_rewards.shape, -1, dtype=torch.int64)
    for row, (group, turns) in enumerate(zip(batch.group.tolist(), batch.turns.tolist(), strict=True)):
        steps: list[Hashable] = []
        for turn in range(turns):
            after = (states[row][turn + 1],) if params.key != "state_action" else ()
            steps.append((states[row][turn], actions[row][turn], *after))
            key: Hashable = (group, *steps[max(0, turn - params.history) :])
            if params.match == "scrambled":
                key = (row, turn)
            result[row, turn] = numbers.setdefault(key, len(numbers))
    return result


def merge(advantages: Tensor, edge: Tensor, group: Tensor, each: bool = False) -> tuple[Tensor, Tensor]:
    """Advantages [B, U] with those of one edge [B, U] replaced by their mean over episodes, and which steps at least two
    episodes took, [B, U] bool; steps of edge -1 and steps that no other episode took are unchanged.

    An episode that takes an edge several times has one vote, its mean there; `each`: one vote each time.
    """
    members: dict[int, dict[int, list[float]]] = {}
    for row, (numbers, values) in enumerate(zip(edge.tolist(), advantages.double().tolist(), strict=True)):
        for number, value in zip(numbers, values, strict=True):
            if number >= 0:
                members.setdefault(number, {}).setdefault(row, []).append(value)
    largest: dict[int, float] = {}
    for number, most in zip(group.tolist(), advantages.double().abs().amax(1).tolist(), strict=True):
        largest[number] = max(largest.get(number, 0.0), most)
    merged, shared = advantages.clone(), torch.zeros(edge.shape, dtype=torch.bool)
    for number, by_row in members.items():
        if len(by_row) < 2:
            continue
        # Sorted, so that the order of episodes does not change the last bit.
        votes = sorted(value for values in by_row.values() for value in (values if each else [sum(values) / len(values)]))
        mean = sum(votes) / len(votes)
        if abs(mean) <= _ROUNDING * largest[int(group[next(iter(by_row))])]:
            mean = 0.0
        where = edge == number
        merged[where], shared[where] = mean, True
    return merged, shared


def restore_spread(merged: Tensor, before: Tensor, real: Tensor, group: Tensor) -> Tensor:
    """`merged` [B, U] times one factor per group, so that the mean square over its real steps [B, U] is that of `before`."""
    result = merged.clone()
    for number in group.unique():
        rows = real & (group == number)[:, None]
        now, then = (values[rows].double().square().sum() for values in (merged, before))
        if now > 0:
            result[rows] = (merged[rows].double() * (then / now).sqrt()).float()
    return result


def merge_steps(batch: TrajectoryBatch, edge: Tensor, params: Credit) -> TrajectoryBatch:
    """The batch with the advantages of steps of one edge [B, U] merged; metric `merged_steps`: the share of steps that merge."""
    before = turn_advantages(batch)
    after, shared = merge(before, edge, batch.group, each=params.repeats == "each")
    real = edge >= 0
    share = float(shared.sum() / real.sum().clamp(min=1))
    if params.renormalise == "group_std":
        after, shared = restore_spread(after, before, real, batch.group), real
    turn = batch.turn.clamp(min=0)
    assert batch.advantages is not None
    advantages = torch.where(shared.gather(1, turn) & batch.mask, after.gather(1, turn), batch.advantages)
    return batch.with_(advantages=advantages).with_metrics(merged_steps=share)
