"""From episodes to padded tensors, and from rows to micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stages.algorithms.batch import Costs, Observed, TrajectoryBatch, TurnTerms, TurnWords, Written
from stages.records.episode import Episode, Owner
from stages.records.tools import CALLS, has_prices, number_of_calls, spent, tools_called
from stages.training.common.hidden import with_spans
from stages.training.common.kept import with_kept
from stages.training.common.step_keys import step_keys

OVERLONG = ("context", "length", "thinking")
"""Stop reasons of episodes that ran out of tokens."""


def padded(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype, width: int | None = None) -> Tensor:
    """Rows of unequal length as one tensor [len(rows), width], padded on the right with `fill`; default width: the longest
    row."""
    width = max((len(row) for row in rows), default=0) if width is None else width
    result = torch.full((len(rows), width), fill, dtype=dtype)
    for index, row in enumerate(rows):
        result[index, : len(row)] = torch.as_tensor(row, dtype=dtype)
    return result


def trajectory_batch(episodes: Sequence[Episode], evidence: bool = False) -> TrajectoryBatch:
    """Episodes, in order, as a batch [B, T] padded on the right; groups are numbered by first appearance. evidence: train on
    results that the policy wrote for its own searches like on its other tokens.

    Raises ValueError for an empty list, and for an episode whose lists differ in length or whose reward is not the sum of its
    turns' rewards.
    """
    if not episodes:
        raise ValueError("no episodes to train on")
    for episode in episodes:
        lengths = {len(episode.token_ids), len(episode.owner), len(episode.logprob), len(episode.turn)}
        if len(lengths) != 1:
            raise ValueError(
                f"episode {episode.episode_id}: token_ids, owner, logprob and turn differ in length: {sorted(lengths)}"
            )
        total = sum(turn.reward for turn in episode.turns)
        if abs(total - episode.reward) > 1e-6:
            raise ValueError(
                f"episode {episode.episode_id}: reward {episode.reward} is not the sum of its turns' rewards, {total}"
            )
    groups = {name: index for index, name in enumerate(dict.fromkeys(episode.group_id for episode in episodes))}
    owner = padded([episode.owner for episode in episodes], int(Owner.PROMPT), torch.int64)
    if evidence:
        owner = owner.where(owner != int(Owner.EVIDENCE), int(Owner.POLICY))
    external = owner == int(Owner.EXTERNAL)
    mask = (owner == int(Owner.POLICY)) | external
    turn_rewards = [[turn.reward for turn in episode.turns] for episode in episodes]
    width = max(1, *(len(row) for row in turn_rewards))
    terms = sorted({name for episode in episodes for name in episode.reward_terms})
    batch = TrajectoryBatch(
        token_ids=padded([episode.token_ids for episode in episodes], 0, torch.int64),
        lengths=torch.tensor([len(episode.token_ids) for episode in episodes]),
        mask=mask,
        turn=padded([episode.turn for episode in episodes], -1, torch.int64),
        logprobs_old=padded([episode.logprob for episode in episodes], 0.0, torch.float32) * mask,
        group=torch.tensor([groups[episode.group_id] for episode in episodes]),
        rewards=torch.tensor([episode.reward for episode in episodes], dtype=torch.float32),
        turn_rewards=padded(turn_rewards, 0.0, torch.float32, width),
        turns=torch.tensor([len(row) for row in turn_rewards]),
        truncated=torch.tensor([episode.truncated for episode in episodes]),
        task_ids=tuple(episode.task_id for episode in episodes),
        external=external if bool(external.any()) else None,
        overlong=torch.tensor([episode.stop_reason in OVERLONG for episode in episodes]),
        success=torch.tensor([episode.success for episode in episodes]),
        accepted=padded([[turn.accepted for turn in episode.turns] for episode in episodes], True, torch.bool, width),
        tool_calls=torch.tensor([sum(map(number_of_calls, episode.turns)) for episode in episodes], dtype=torch.float32),
        terms={name: torch.tensor([float(episode.reward_terms.get(name, 0.0)) for episode in episodes]) for name in terms},
        tools=torch.tensor([tools_called(episode) for episode in episodes]),
    )
    if has_prices(episodes):
        batch = with_prices(batch, episodes)
    observed = Observed(owner == int(Owner.ENVIRONMENT))
    words = [[len(turn.action.split()) for turn in episode.turns] for episode in episodes]
    batch = batch.with_extra(
        *(step_keys(episodes, width), observed, turn_terms(episodes, width)), TurnWords(padded(words, 0, torch.float32, width))
    )
    if bool((owner > int(Owner.EXTERNAL)).any()):
        batch = batch.with_extra(Written(owner))
    return with_spans(with_kept(batch, episodes), episodes)


def with_prices(batch: TrajectoryBatch, episodes: Sequence[Episode]) -> TrajectoryBatch:
    """The batch with what its episodes spent on priced tools, and metrics per episode: `spent`, and `calls_<tool>`."""
    costs = torch.tensor([spent(episode) for episode in episodes], dtype=torch.float32)
    tools = [name.removeprefix(CALLS) for name in batch.terms if name.startswith(CALLS)]
    calls = {f"calls_{tool}": float(batch.terms[CALLS + tool].mean()) for tool in tools}
    return batch.with_extra(Costs(costs)).with_metrics(spent=float(costs.mean()), **calls)


def turn_terms(episodes: Sequence[Episode], width: int) -> TurnTerms:
    """The terms of the episodes' turns, padded to `width` turns."""
    names = tuple(sorted({name for episode in episodes for turn in episode.turns for name in turn.terms}))
    values = torch.zeros(len(episodes), width, len(names))
    for row, episode in enumerate(episodes):
        for place, turn in enumerate(episode.turns):
            for name, value in turn.terms.items():
                values[row, place, names.index(name)] = value
    return TurnTerms(names, values)


def turn_boundaries(batch: TrajectoryBatch) -> Tensor:
    """Index of the last token before each turn's first policy token, [B, U] int64; -1 past the last turn."""
    result = torch.full_like(batch.turn_rewards, -1, dtype=torch.int64)
    for turn in range(result.shape[1]):
        tokens = batch.mask & (batch.turn == turn) & (turn < batch.turns)[:, None]
        result[:, turn] = torch.where(tokens.any(1), tokens.int().argmax(1) - 1, -1)
    return result


def turn_starts(batch: TrajectoryBatch) -> Tensor:
    """Whether each token is its turn's first policy token, [B, T] bool."""
    before = turn_boundaries(batch)
    found = torch.zeros_like(batch.mask)
    row, turn = (before >= 0).nonzero(as_tuple=True)
    found[row, before[row, turn] + 1] = True
    return found


def turn_ends(batch: TrajectoryBatch) -> Tensor:
    """Index of each turn's last policy token, [B, U] int64; -1 past the last turn."""
    result = torch.full_like(batch.turn_rewards, -1, dtype=torch.int64)
    positions = torch.arange(batch.mask.shape[1], device=batch.mask.device)[None, :]
    for turn in range(result.shape[1]):
        tokens = batch.mask & (batch.turn == turn) & (turn < batch.turns)[:, None]
        result[:, turn] = torch.where(tokens, positions, -1).amax(1)
    return result


def plan_whole_groups(group: Tensor, rows: Sequence[int], plan: Callable[[Sequence[int]], list[list[int]]]) -> list[list[int]]:
    """`rows` in micro-batches of whole groups: as many groups in each as `plan` puts into one micro-batch (a larger group is on
    its own)."""
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(int(group[row]), []).append(row)
    result: list[list[int]] = []
    for members in groups.values():
        if result and len(plan([*result[-1], *members])) == 1:
            result[-1] = [*result[-1], *members]
        else:
            result.append(members)
    return result


def trained_lengths(mask: Tensor) -> Tensor:
    """Tokens of each row up to its last policy token, [B] int64; later tokens do not affect the loss."""
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * positions).amax(1)


def plan_micro_batches(lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Row indices in micro-batches of similar length, of at most `tokens_per_batch` padded tokens (a longer row is on its own).

    Longest first, ties in order, so that the plan depends on the lengths alone.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    plan: list[list[int]] = []
    room = 0
    for row in order:
        if room == 0:
            plan.append([])
            room = max(1, tokens_per_batch // max(lengths[row], 1))
        plan[-1].append(row)
        room -= 1
    return plan


def take(batch: TrajectoryBatch, rows: Sequence[int] | Tensor, device: torch.device | str = "cpu") -> TrajectoryBatch:
    """The rows of a batch, cut to their longest trained length, on `device`."""
    picked = batch.rows(torch.as_tensor(rows, dtype=torch.int64))
    return picked.cut(int(trained_lengths(picked.mask).max()), device)


def minibatches(group: Tensor, count: int, order: Sequence[int]) -> list[list[int]]:
    """Rows split into `count` minibatches of whole groups, in `order`; sizes differ by at most one group."""
    rows: dict[int, list[int]] = {}
    for row, number in enumerate(group.tolist()):
        rows.setdefault(number, []).append(row)
    parts: list[list[int]] = [[] for _ in range(count)]
    for place, number in enumerate(order):
        parts[place * count // len(order)].extend(rows[number])
    return [sorted(part) for part in parts if part]
