"""The contract of task sources: where the tasks of rl come from (`rl.tasks.source`).

A source is a module of stages/algorithms/sources with a `SOURCE`, a subclass of `TaskSource`, or an entry point of the group
`bellwether.task_sources`, which names such a class or its module. Light to import: params.yaml is checked by it.

In each step, rl calls

    source.begin(step)                                 # it may play episodes of its own, and change what it draws from
    tasks = source.draw(*key)                          # and again with `count` and `without` if further groups are needed
    source.observe(step, episodes)                     # all episodes of the drawn tasks
    source.role_episodes()                             # episodes of other roles that the step trains on, too
    source.metrics()                                   # columns of the history

Every process makes the same calls with the same arguments and must reach the same state, so random draws go through
`stages.seeding`, keyed by what `inputs` and the calls give.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from stages.algorithms import sources
from stages.runtime.entry_points import Group, place
from stages.runtime.validation import ParamsError, Section, explain

if TYPE_CHECKING:
    from stages.agent.active_episode import EpisodeRequest
    from stages.algorithms.batch import TrajectoryBatch
    from stages.algorithms.settings import Rl
    from stages.engine.engine import Sampling
    from stages.environments.protocol import Domain, Environment
    from stages.records.episode import Episode
    from stages.records.task import Task

Play = Callable[["Sequence[EpisodeRequest]", "Sampling | None"], "list[Episode]"]
GROUP = Group("bellwether.task_sources", "rl.tasks.source", sources, "SOURCE")


class NoSettings(Section):
    """Settings of a source that has none."""


@dataclass(frozen=True)
class SourceInputs:
    """What a source may use."""

    rl: Rl
    """The resolved section; `rl.tasks.settings` is an instance of the source's `Settings`."""
    domain: Domain
    tasks: Mapping[str, Task]
    """Training tasks that curate wrote, by id."""
    worlds: Path
    """The folder of what the tasks are played in (`Domain.build`)."""
    weights: Mapping[str, float]
    """Curated task that may be drawn (`rl.selection`) -> factor on its weight."""
    measured: Mapping[str, float]
    """Curated task -> its success rate as rollout measured it, in [0, 1] (or what `rl.curriculum.kind: value` predicts)."""
    key: tuple[object, ...]
    """Of the run's random draws."""
    play: Play
    """Plays requests with the current weights; None: with `rl.sampling`. Processes share the work, and each gets all episodes,
    sorted by id. A request's task, attempt and role must not occur twice in a run, since they determine the random draws."""
    root: Path = Path()
    """The repository, which folders named in settings are relative to."""
    policy_hash: str = ""
    """Of the policy that the run starts from."""
    max_length: int = 0
    """model.max_length."""


class TaskSource:
    """Base class. A subclass writes `draw`, and what it needs of the other methods."""

    Settings: ClassVar[type[Section]] = NoSettings
    """Keys of `rl.tasks.settings`."""
    roles: ClassVar[tuple[str, ...]] = ()
    """Roles of `role_episodes`, each with settings in `rl.roles`."""
    role_parts: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Role -> what its section `rl` is by default, by dotted key; a method's `roles` and `rl.roles` override it."""
    main_role: ClassVar[str] = ""
    """Role of the episodes of the tasks that it draws; "" if there are no roles."""
    curated: ClassVar[bool] = False
    """Whether it draws tasks that curate wrote: then rl.selection, and parts that look a task up in what earlier stages wrote
    about it (demonstrations, trees) apply."""

    recorded: ClassVar[bool] = False
    """Whether the episodes of its tasks exist already (`episodes`), drawn by the policy that the run starts from: rl plays none,
    and importance ratios are to their log-probabilities."""

    def __init__(self, inputs: SourceInputs) -> None:
        self.inputs = inputs

    @classmethod
    def fits(cls, domain: Domain, rl: Rl) -> None:
        """Raise ParamsError for a domain that the source has no tasks in; `rl` is resolved. By default all fit."""

    @classmethod
    def weighted(cls, rl: Rl) -> bool:
        """Whether it draws by rl.curriculum, which is refused otherwise; by default if it draws tasks that curate wrote."""
        return cls.curated

    @staticmethod
    def make(domain: Domain, worlds: Path) -> Environment:
        """An environment that plays the source's tasks; by default the domain's. May run in another process."""
        return domain.make(worlds)

    def begin(self, step: int) -> None:
        """Prepare step `step`, from 0; nothing by default."""

    def draw(self, *key: object, count: int | None = None, without: Collection[str] = ()) -> list[Task]:
        """A step's tasks, sorted by id, each once; a function of `key` and the state alone.

        count: default `rl.tasks_per_step`; without: ids to leave out, so there may be fewer.
        """
        raise NotImplementedError

    def episodes(self, task_ids: Sequence[str]) -> list[Episode]:
        """The episodes of drawn tasks, sorted by id, of a source that is `recorded`."""
        raise NotImplementedError

    def observe(self, step: int, episodes: Sequence[Episode]) -> None:
        """Learn from the episodes of a step's tasks; nothing by default."""

    @property
    def roles_first(self) -> bool:
        """Whether a step's updates on `role_episodes` come before those on the drawn tasks' episodes."""
        return True

    @property
    def combined(self) -> bool:
        """Whether the optimiser's steps are on the sum of the losses of all roles that learn in a step, not on one after the
        other's; the same in all steps."""
        return False

    def learns(self, role: str, step: int) -> bool:
        """Whether step `step` trains on the episodes of `role`, one of `roles` or the main role."""
        return True

    def role_episodes(self) -> Mapping[str, Sequence[Episode]]:
        """Role of `roles` -> its episodes of this step, after `observe`; rl credits and trains them by `rl.roles`."""
        return {}

    def credited(self, role: str, batch: TrajectoryBatch) -> TrajectoryBatch:
        """The prepared batch of a role's episodes, in the order of `role_episodes`, as it is trained on; by default as it is."""
        return batch

    def metrics(self) -> dict[str, float]:
        """Columns of the step's row of the history, after `observe`."""
        return {}

    def report(self) -> dict[str, Any]:
        """Part of reports/rl/<domain>.json."""
        return {}

    def save(self, folder: Path) -> None:
        """Write what playing the trained policy needs beside its weights to its folder; nothing by default."""

    def state_dict(self) -> dict[str, Any]:
        """What it remembers between steps, of tensors and JSON values; part of checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""


def names() -> list[str]:
    """All known sources, sorted, without importing."""
    return GROUP.names()


def source_class(name: str) -> type[TaskSource]:
    """The source `name`. Raises ParamsError for an unknown name, and for what is no source."""
    found = GROUP.load(name)
    if not (isinstance(found, type) and issubclass(found, TaskSource)):
        raise ParamsError(
            f"rl.tasks.source '{name}': {place(found)} has no SOURCE; set it to a subclass of stages.plugins.TaskSource"
        )
    return found


def source_settings(name: str, given: Any) -> Section:
    """The checked settings of source `name`. Raises ParamsError."""
    model = source_class(name).Settings
    if isinstance(given, model):
        return given
    try:
        return model.model_validate(given)
    except ValidationError as error:
        raise ParamsError(explain(error, model, f"task source {name}", "rl.tasks.settings.")) from error
