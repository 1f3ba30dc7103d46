"""The contract of what scores episodes by their text while rl trains."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from stages.algorithms.parts.reward import EpisodeRewards
from stages.environments.protocol import Domain
from stages.records.episode import Episode, read_episodes
from stages.records.task import Task

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


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


class ReferenceTexts:
    """Good answers to tasks: the domain's `references`, or else the last actions of the training demonstrations."""

    def __init__(self, context: StageContext, domain: Domain) -> None:
        self.context, self.domain = context, domain

    @cached_property
    def _demonstrated(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for episode in read_episodes(self.context.data / "curated" / str(self.context.domain) / "demonstrations.parquet"):
            if episode.turns:
                found.setdefault(episode.task_id, []).append(episode.turns[-1].action)
        return found

    def find(self, task: Task) -> list[str]:
        """The task's references; [] if there are none."""
        if hasattr(self.domain, "references"):
            return list(self.domain.references(task))
        return self._demonstrated.get(task.task_id, [])

    def of(self, task: Task, kind: str) -> list[str]:
        """The task's references. Raises ValueError, which names the `rl.reward.kind` that needs them, if there are none."""
        if not (texts := self.find(task)):
            raise ValueError(
                f"rl.reward.kind: {kind}: task {task.task_id} has no references: domain {self.context.domain} defines none, and "
                f"curate wrote no demonstration of it; set curate.expert_demonstrations"
            )
        return texts
