"""Generalised advantages along the texts of a team (MARFT, arXiv 2504.16129, which decomposes A(s, a^1..a^n) into a sum over the
agents in their order).

The texts of a play are one sequence, whoever wrote them: planner, solver, planner, solver. Level turn, with V before each text,
its reward r (only the acting member's have one) and the next text's V':

    d = r + gamma V' - V,   A = d + gamma lam A',   and nothing after the play's last text.

Level token: the same from token to token, with gamma within a text `team.token_gamma`; a text's reward is on its last token.
Plays are separate sequences, so that no play's credit depends on what was played before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stages.algorithms.batch import Extra, TrajectoryBatch
from stages.algorithms.parts.advantage import Advantage
from stages.algorithms.parts.gae import check_rewards, gae
from stages.algorithms.parts.team import Team
from stages.records.episode import Episode


@dataclass(frozen=True)
class TeamMoves(Extra):
    """Where a batch's turns are in their plays."""

    play: Tensor
    """[B] int64: number of the row's play."""
    member: Tensor
    """[B] int64: place of the row's role in the team."""
    moves: Tensor
    """[B, U] int64: place of each turn among those of the play; -1 past the end."""


def team_moves(episodes: Sequence[Episode], roles: Sequence[str], turns: int) -> TeamMoves:
    """Of the batch of `episodes` with at most `turns` turns; a team of one has no `play`."""
    names = [episode.play or episode.episode_id for episode in episodes]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    moves = torch.full((len(episodes), turns), -1, dtype=torch.int64)
    for row, episode in enumerate(episodes):
        own = episode.moves or list(range(len(episode.turns)))
        moves[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
    member = torch.tensor([roles.index(episode.role) for episode in episodes])
    return TeamMoves(torch.tensor([numbers[name] for name in names]), member, moves)


@dataclass(frozen=True)
class Text:
    """A turn that the policy wrote something in."""

    move: int
    row: int
    turn: int
    places: list[int]
    """Of its trained tokens."""


def texts_by_play(batch: TrajectoryBatch, moves: TeamMoves) -> list[list[Text]]:
    """The texts of each play in their order. Turns without trained tokens are left out."""
    found: dict[int, list[Text]] = {}
    for row in range(batch.size):
        places = batch.mask[row].nonzero().flatten()
        turns = batch.turn[row, places]
        for turn in range(int(batch.turns[row])):
            own = places[turns == turn].tolist()
            if own:
                found.setdefault(int(moves.play[row]), []).append(Text(int(moves.moves[row, turn]), row, turn, own))
    return [sorted(texts, key=lambda text: text.move) for _, texts in sorted(found.items())]


def sequences(batch: TrajectoryBatch, moves: TeamMoves, team: Team) -> list[list[tuple[Text, float]]]:
    """What is credited together, with each text's reward."""
    plays = [[(text, float(batch.turn_rewards[text.row, text.turn])) for text in texts] for texts in texts_by_play(batch, moves)]
    if team.credit == "chain":
        return plays
    split = []
    for play in plays:
        rows = dict.fromkeys(text.row for text, _ in play)
        for row in rows:
            mine = [place for place, (text, _) in enumerate(play) if text.row == row]
            ends = [*mine[1:], len(play)]
            alone = []
            for place, end in zip(mine, ends, strict=True):
                text, reward = play[place]
                following = sum(given for _, given in play[place:end])
                mixed = 0.5 * reward + 0.5 * following / len(team.members)
                alone.append((text, following if team.credit == "shared_last" else mixed))
            # What was earned before a member spoke for the first time belongs to no text of its own.
            split.append(alone)
    return split


def team_advantage(batch: TrajectoryBatch, params: Advantage, team: Team) -> TrajectoryBatch:
    """`advantages` and the critic's targets `returns` = A + V (both [B, T], 0 off the mask) of a batch with TeamMoves.

    Raises ValueError without a critic's values or TeamMoves, and for a reward on a turn without policy tokens.
    """
    moves = batch.get(TeamMoves)
    if batch.values is None or moves is None:
        raise ValueError("rl.advantage.estimator: team needs a critic's values and a team's plays, and this batch lacks them")
    check_rewards(batch)
    by_token = params.level == "token"
    # Of each sequence, entry by entry: (row, token, reward, discount of what follows).
    entries: list[list[tuple[int, int, float, float]]] = []
    for texts in sequences(batch, moves, team):
        one: list[tuple[int, int, float, float]] = []
        for text, reward in texts:
            inner = text.places[:-1] if by_token else []
            one += [(text.row, place, 0.0, team.token_gamma) for place in inner]
            one.append((text.row, text.places[-1] if by_token else text.places[0], reward, params.gamma))
        entries.append(one)
    shape = (len(entries), max((len(one) for one in entries), default=0))
    valid, (rewards, gammas) = torch.zeros(shape, dtype=torch.bool), torch.zeros(2, *shape)
    rows, places = torch.zeros(2, *shape, dtype=torch.int64)
    for number, one in enumerate(entries):
        for column, values in zip((rows, places, rewards, gammas), zip(*one, strict=True), strict=True):
            column[number, : len(one)] = torch.tensor(values, dtype=column.dtype)
        valid[number, : len(one)] = True
    before = batch.values[rows, places]
    found = gae(rewards, before, valid, gammas, params.lam)
    index = (rows[valid], places[valid])
    advantages = torch.zeros_like(batch.values).index_put(index, found[valid])
    values = torch.zeros_like(batch.values).index_put(index, before[valid])
    if not by_token:
        first = first_tokens(batch)
        advantages, values = (each.gather(1, first) for each in (advantages, values))
    return batch.with_(advantages=advantages * batch.mask, returns=(advantages + values) * batch.mask)


def first_tokens(batch: TrajectoryBatch) -> Tensor:
    """Place of the first trained token of each token's turn, [B, T] int64; 0 off the mask."""
    width, turns = batch.mask.shape[1], max(int(batch.turns.max()), 1)
    places = torch.arange(width).expand_as(batch.mask)
    turn = torch.where(batch.mask, batch.turn, torch.zeros_like(batch.turn)).clamp(min=0)
    first = torch.full((batch.size, turns), width - 1, dtype=torch.int64)
    first = first.scatter_reduce(1, turn, torch.where(batch.mask, places, width - 1), "amin")
    return torch.where(batch.mask, first.gather(1, turn), torch.zeros_like(places))
