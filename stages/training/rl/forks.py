"""Rows of a batch for plays that held several conversations (stages/agent/conversations.py): each conversation is trained on, and
the play's return is compared with other plays' once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import Plays
from stages.records.episode import Episode, forks_of


def with_plays(batch: TrajectoryBatch, episodes: Sequence[Episode]) -> TrajectoryBatch:
    """The batch of `episodes`, which say by their `play` what belongs together, with Plays and the metric `forks` if some of them
    are forks. A play's first row is the one that is compared."""
    forks = len(forks_of(episodes))
    if not forks:
        return batch
    names = [episode.play or episode.episode_id for episode in episodes]
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    leads = [names.index(name) == row for row, name in enumerate(names)]
    return batch.with_extra(Plays(torch.tensor([numbers[name] for name in names]), torch.tensor(leads))).with_metrics(
        forks=float(forks)
    )


def check_scored(played: Sequence[Episode]) -> None:
    """Raise ValueError if a reward that scores texts meets a play of several conversations, whose outcome they share."""
    if forks := forks_of(played):
        raise ValueError(
            f"episode {forks[0].episode_id} is a further conversation of a play, and rl.reward.kind scores each text on its own; "
            "set rl.reward.kind to environment"
        )
