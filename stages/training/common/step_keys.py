"""Turns' states, actions and draws as numbers that are equal where the turns share them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stages.algorithms.batch import CUT, ENDED, INVALID, StepKeys
from stages.records.episode import Episode


def _padded(rows: Iterable[Sequence[int]], width: int) -> Tensor:
    return torch.tensor([[*row, *[-1] * (width - len(row))] for row in rows])


def draw_of(episode: Episode, turn: int, by_id: Mapping[str, Episode]) -> tuple[str, int]:
    """(id of the episode that drew the turn, turn): the episode itself or the ancestor it was branched from."""
    while turn < episode.inherited:
        if episode.parent not in by_id:
            return episode.parent, turn
        episode = by_id[episode.parent]
    return episode.episode_id, turn


def step_keys(episodes: Sequence[Episode], width: int) -> StepKeys:
    """The StepKeys of a batch of these episodes, of at most `width` turns.

    The state after the last turn only says whether the episode ended or was truncated.
    """
    states: dict[str, int] = {}
    actions: dict[str, int] = {}
    draws: dict[Hashable, int] = {}
    by_id = {episode.episode_id: episode for episode in episodes}
    numbered: dict[str, list[list[int]]] = {"states": [], "actions": [], "draws": []}
    for episode in episodes:
        passed = [states.setdefault(turn.state_key, len(states)) for turn in episode.turns]
        numbered["states"].append([*passed, CUT if episode.truncated else ENDED])
        numbered["actions"].append(
            [actions.setdefault(turn.action_key, len(actions)) if turn.accepted else INVALID for turn in episode.turns]
        )
        numbered["draws"].append(
            [draws.setdefault(draw_of(episode, turn, by_id), len(draws)) for turn in range(len(episode.turns))]
        )
    return StepKeys(
        states=_padded(numbered["states"], width + 1),
        actions=_padded(numbered["actions"], width),
        draws=_padded(numbered["draws"], width),
        state_names=tuple(states),
    )
