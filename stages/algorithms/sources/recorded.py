"""Episodes that outside agents have played already, as `python -m stages.serving.episodes` writes them: rl plays none.

They were drawn by the policy that the run starts from. A step's tasks are drawn without replacement until all had their turn. The
policy moves away from the one that drew them, and losses with importance ratios correct for that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from stages.algorithms.task_source import SourceInputs, TaskSource
from stages.records.episode import joined, read_episodes
from stages.records.task import Task
from stages.runtime.validation import Section, watched
from stages.seeding import permutation

if TYPE_CHECKING:
    from stages.records.episode import Episode


class RecordedSettings(Section):
    """Keys of rl.tasks.settings."""

    files: Annotated[list[str], Field(min_length=1)]
    """Tables of episodes below data/raw, where DVC tracks changes."""

    @field_validator("files")
    @classmethod
    def _tracked(cls, files: list[str]) -> list[str]:
        for name in files:
            if not watched(name):
                raise ValueError(f"lists {name}; put the table below data/raw, where DVC tracks changes")
        return files


class Recorded(TaskSource):
    """See the module. Raises ValueError for episodes of another policy or with other sampling settings than the run's, for too
    long ones, and if there are too few tasks for a step."""

    Settings = RecordedSettings
    recorded = True

    def __init__(self, inputs: SourceInputs) -> None:
        super().__init__(inputs)
        settings: RecordedSettings = inputs.rl.tasks.settings
        groups: dict[str, list[Episode]] = {}
        seen = set[str]()
        for name in settings.files:
            if not (inputs.root / name).exists():
                raise ValueError(f"rl.tasks.settings.files: {name} does not exist; python -m stages.serving.episodes makes it")
            for episode in joined(read_episodes(inputs.root / name)):
                self._check(episode, name)
                if episode.episode_id in seen:
                    raise ValueError(f"{name}: episode {episode.episode_id} is in two files; make one table of all recordings")
                seen.add(episode.episode_id)
                groups.setdefault(episode.task_id, []).append(episode)
        # A baseline over a group needs others to compare with.
        least = 2 if inputs.rl.group_size > 1 else 1
        self.groups = {task: found for task, found in sorted(groups.items()) if len(found) >= least}
        self.alone = len(groups) - len(self.groups)
        if len(self.groups) < inputs.rl.tasks_per_step:
            raise ValueError(
                f"rl.tasks_per_step is {inputs.rl.tasks_per_step}, but {', '.join(settings.files)} have only {len(self.groups)} "
                f"tasks with {least} recorded plays or more ({self.alone} have fewer); lower it, or let agents name the task of "
                f"each trace (metadata.task) and play it several times"
            )
        self.left: list[str] = []
        """Tasks that were not drawn yet in this pass."""
        self.passes = 0

    def _check(self, episode: Episode, name: str) -> None:
        wanted, rl = self.inputs.policy_hash, self.inputs.rl
        if episode.policy_hash != wanted:
            raise ValueError(
                f"{name}: episode {episode.episode_id} was drawn by policy {episode.policy_hash}, and the policy to be trained "
                f"is {wanted}; record anew with python -m stages.serving --model sft --record FILE"
            )
        drawn = (episode.temperature, episode.top_p, episode.top_k)
        if drawn != (rl.sampling.temperature, rl.sampling.top_p, rl.sampling.top_k):
            raise ValueError(
                f"{name}: episode {episode.episode_id} was drawn with temperature, top_p, top_k {drawn}; set rl.sampling to "
                f"these, or let agents request those of rl.sampling, the defaults of --record"
            )
        for one in (episode, *episode.forks):
            if len(one.token_ids) > self.inputs.max_length:
                raise ValueError(
                    f"{name}: episode {one.episode_id} has {len(one.token_ids)} tokens, over model.max_length "
                    f"({self.inputs.max_length}); raise model.max_length"
                )

    def draw(self, *key: object, count: int | None = None, without: Collection[str] = ()) -> list[Task]:
        """The next tasks of this pass over the recording, and of the next one where these do not suffice."""
        drawn: list[str] = []
        while len(drawn) < (self.inputs.rl.tasks_per_step if count is None else count):
            allowed = [name for name in self.left if name not in without and name not in drawn]
            if allowed:
                drawn.append(allowed[0])
                self.left.remove(allowed[0])
            elif len({*self.groups} - {*without, *drawn}):
                self.passes += 1
                self.left = permutation(list(self.groups), "recorded", *self.inputs.key, self.passes)
            else:
                break
        return [self._task(name) for name in sorted(drawn)]

    def _task(self, name: str) -> Task:
        first = self.groups[name][0]
        prompt = first.messages[0]["content"] if first.messages else ""
        return Task(name, first.domain, "train", 0, prompt, {}, 0.0)

    def episodes(self, task_ids: Sequence[str]) -> list[Episode]:
        found = [episode for name in task_ids for episode in self.groups[name]]
        return sorted(found, key=lambda episode: episode.episode_id)

    def report(self) -> dict[str, Any]:
        plays = [episode for found in self.groups.values() for episode in found]
        counts = {"plays": len(plays), "conversations": sum(1 + len(episode.forks) for episode in plays)}
        return {"recorded": {"tasks": len(self.groups), **counts, "tasks_played_once": self.alone, "passes": self.passes}}

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.passes = state["left"], state["passes"]


SOURCE = Recorded
