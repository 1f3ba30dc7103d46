"""The contract of what scores episodes by their text while rl trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from stages.algorithms.parts.reward import EpisodeRewards
from stages.environments.protocol import Domain
from stages.records.episode import Episode
from stages.records.task import Task


class EpisodeScorer(Protocol):
    """Scores a step's episodes, group by group."""

    stops: bool
    """Whether the training should end."""

    def score(self, episodes: Sequence[Episode], greedy: Sequence[Episode], step: int) -> EpisodeRewards:
        """Rewards of the episodes, in order; called again when further groups join the step. `greedy`: an episode per task, where
        the algorithm plays them."""
        ...

    def observe(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Metrics of the step's episodes, for the history; once per step, after `score`."""
        ...

    def report(self) -> dict[str, Any]:
        """Part of reports/rl/<domain>.json."""
        ...

    def save(self, folder: Path) -> None:
        """Write tables to the stage's data folder."""
        ...

    def close(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def gold_quality(domain: Domain, task: Task, episode: Episode) -> float:
    """The domain's hidden quality of an episode; without one, its return."""
    if not hasattr(domain, "quality"):
        return episode.reward
    return float(domain.quality(task, [turn.action for turn in episode.turns]))
