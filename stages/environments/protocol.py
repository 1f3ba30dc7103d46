"""What an environment is: the contract between a domain and everything that acts in it.

An `Environment` plays one task at a time and can be copied exactly (`snapshot`/`restore`, random state included), so that
tree search may branch from any step. A `Domain` bundles the environment with its task recipes, its expert and its settings.
Both are structural: a class that has these methods is one; nothing has to be inherited. What the domains here share is in
`base_environment` and `base_domain`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, model_validator

from stages.records.task import Task
from stages.runtime.validation import Checked, shortened


@dataclass(frozen=True)
class Observation:
    """What the agent reads. Plain text; the chat template turns it into tokens."""

    text: str


@dataclass(frozen=True)
class Step:
    """What one action brought about.

    `reward` is the reward of this step alone; an episode's return is the sum over its steps, in [0, 1] for success-or-failure
    domains (others tell success by a
    term). `accepted` is False if the environment did not understand the action (its state is then unchanged, apart from
    the turn counter). `terminated`: the task ended by its own rules. `truncated`: the turn limit cut it. `cost` counts tool calls
    or the like.
    """

    observation: Observation
    reward: float
    accepted: bool
    terminated: bool
    truncated: bool
    cost: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, e.g. {"exact_match": 1.0, "f1": 1.0}; reported, not summed. See also `SUCCESS_TERM`."""

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


@runtime_checkable
class Environment(Protocol):
    """One running task."""

    def reset(self, task: Task) -> Observation:
        """Start `task`; what the agent sees beyond `task.prompt` ("" for nothing). The same task always starts the same."""
        ...

    def step(self, action: str) -> Step:
        """Do `action` (free text). Raises RuntimeError if the episode is over or was never reset."""
        ...

    def snapshot(self) -> Any:
        """An opaque, immutable copy of the whole state: counters and random state included."""
        ...

    def restore(self, state: Any) -> None:
        """Go back to a snapshot taken from an environment on the same task."""
        ...

    def state_key(self) -> str:
        """A canonical string of what the agent could know and change: equal states, equal keys. Excludes the turn counter."""
        ...

    def admissible(self) -> Sequence[str]:
        """Actions that would be accepted now, sorted. May be a sample where there are too many; may be empty if unknown."""
        ...

    def close(self) -> None: ...


class DomainSettings(Checked):
    """Base of every domain's settings (params.yaml, per_domain.<name>.environment): unknown keys are refused, and values of other
    types. Lists are taken for tuples, which YAML does not know."""

    model_config = ConfigDict(strict=False)

    of_no_move: ClassVar[tuple[str, ...]] = ()
    """Settings that change neither what players may do nor how it ends: game records made with others are good."""

    max_turns: int = 12

    @model_validator(mode="wrap")
    @classmethod
    def _as_written(cls, values: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """As all of params.yaml, settings take no `true` or "3" for a number. Keys of mappings may be texts, as JSON has them."""
        made = validate(values)
        if (wrong := _other_type(values, made)) is not None:
            raise ValueError(wrong)
        return made


def _other_type(given: Any, made: Any, where: str = "") -> str | None:
    """What `made`, validated from `given`, took for a value of another type; None for nothing."""
    if type(made) in (bool, int, float):
        kind, wanted = (bool, "true or false") if isinstance(made, bool) else ((int, float), "a number")
        fits = isinstance(given, kind) and isinstance(given, bool) == isinstance(made, bool)
        return None if fits else f"{where} must be {wanted}, not {shortened(given)}"
    pairs: list[tuple[Any, Any, Any]] = []
    if isinstance(given, Mapping) and isinstance(made, BaseModel):
        names = {field.alias or name: name for name, field in type(made).model_fields.items()}
        pairs = [(key, held, getattr(made, str(names.get(key, key)), None)) for key, held in given.items()]
    elif isinstance(given, Mapping) and isinstance(made, Mapping) and len(given) == len(made):
        pairs = list(zip(given, given.values(), made.values(), strict=True))
        if strange := [key for key, name in zip(given, made, strict=True) if str(key) != str(name)]:
            return f"{where} must not have the key {shortened(strange[0])}"
    elif isinstance(given, (list, tuple)) and isinstance(made, (list, tuple)):
        pairs = [(place, *pair) for place, pair in enumerate(zip(given, made, strict=False))]
    found = (_other_type(held, become, f"{where}.{key}" if where else str(key)) for key, held, become in pairs)
    return next((wrong for wrong in found if wrong is not None), None)


@runtime_checkable
class Domain(Protocol):
    """A family of tasks. Found by name through the entry-point group `bellwether.domains`."""

    name: str
    settings: Any
    """An instance of the domain's settings class (a subclass of `DomainSettings`)."""

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records for `count` tasks: the JSON lines that `data/raw/<name>.jsonl` holds."""
        ...

    def build(self, records: Sequence[Mapping[str, Any]], folder: Path, workers: int) -> list[Task]:
        """Turn checked raw records into tasks; writes what the environment needs (compiled games, ...) below `folder`.

        Split and ids are already in the records ("split", "task_id"). Deterministic: the same records give the same bytes.
        Raises ValueError naming the record for one that can't be built.
        """
        ...

    def check(self, record: Mapping[str, Any]) -> None:
        """Raise ValueError, saying what is wrong, if a raw record is not well formed."""
        ...

    def make(self, folder: Path) -> Environment:
        """A new environment that finds what `build` wrote below `folder`."""
        ...

    def expert(self, environment: Environment) -> str | None:
        """The best next action from the environment's present state, or None if there is none; asked anew every turn."""
        ...

    def entities(self, task: Task) -> set[str]:
        """Names that identify the task's world; train and test must not share any."""
        ...

    # Optional, used by evaluation where a domain has them:
    # - `answer(action) -> str | None` (what an episode's last action gives for an answer, so normalised that equal answers are
    #   equal; None if it gives none), for maj@k;
    # - `solution(task, actions) -> str` (the same for the actions of all successes that solved the task in the same way):
    #   different solutions are counted by it, without it by the actions as they are.
    # Optional, used by methods that learn off-policy: `known_actions(task) -> Sequence[tuple[str, float]]` (single actions that
    # end an episode of the task, each with the return that it is known to bring; nobody has to play them).
    # Optional: `ready() -> None`, called by each stage that plays the domain, in its own process and before it loads a model:
    # looks for what the domain needs of the machine (a sandbox, say) and says on standard error what it found. Raises
    # ParamsError where that is missing, since trying again cannot help. Without this method the domain needs nothing.
    # Optional, where returns do not lie in [0, 1]: `returns() -> tuple[float, float]` (the smallest and the largest), which the
    # critic's head must have room for.
    # Optional, used by curation where a domain has them:
    # - `record_difficulty(record) -> float` (a raw record's difficulty before it is built) and `difficulty_weights() ->
    #   dict[float, float]` (the mix of difficulties that curation takes);
    # - `record_kinds(record) -> set[str]` (what a raw record shows of the settings it was made with, "2 hops" say) and
    #   `recipe_kinds() -> set[str]` (all of these that `recipes` gives with the present settings): curation warns if they differ;
    # - `world_files(task) -> list[str]` (files that the task is played in, relative to the `folder` of `build`): the panel's hash
    #   covers those of its tasks; without this method it covers every file below `folder`;
    # - `players() -> dict[str, float]` (name -> weight) and `player_action(player, environment, rng) -> str` (that player's next
    #   action, refused ones included): `python -m stages.curation games` writes records of their games;
    # - a keyword parameter `built: Callable[[int], None] | None = None` of `build`, called with the number of records that were
    #   finished since the last call: curation shows a progress bar.
