"""Base class and helpers for domains that draw tasks from JSON recipes by seed, so that a subclass writes only its own part."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from stages.environments.base_environment import ValueEnvironment
from stages.environments.protocol import DomainSettings, Environment
from stages.records.task import SPLITS, Split, Task
from stages.runtime.files import atomic_files
from stages.runtime.validation import watched
from stages.seeding import key64, permutation

SHARES: dict[Split, int] = {"train": 24, "valid": 3, "test": 25}
"""Tasks (or worlds, in domains that have them) of each split in every 52; in 416: 192 train, 24 valid, 200 test."""


class World(Protocol):
    """Data that tasks share and that is too large for their specs, written to a file."""

    def to_json(self) -> str: ...


W = TypeVar("W")
T = TypeVar("T", bound=DomainSettings)


class RecipeDomain(Generic[T]):
    """See stages.environments.protocol.Domain. A subclass writes `recipes`, `check`, `task`, `make` and `entities`, and
    `world_files` if its tasks have worlds."""

    name: ClassVar[str]
    Settings: ClassVar[type[DomainSettings]]
    settings: T

    def __init__(self, settings: T | None = None) -> None:
        self.settings = settings or self.Settings()  # type: ignore[assignment]
        self._worlds: dict[Path, Any] = {}

    @abstractmethod
    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]: ...

    @abstractmethod
    def check(self, record: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        """The task of a checked record. `worlds` (name -> world) is shared by all records; each world in it is written as JSON
        once."""

    @abstractmethod
    def make(self, folder: Path) -> Environment: ...

    def build(
        self,
        records: Sequence[Mapping[str, Any]],
        folder: Path,
        workers: int,
        *,
        built: Callable[[int], None] | None = None,
    ) -> list[Task]:
        """Tasks, and their worlds as JSON below `folder`. Too quick to need `workers` processes."""
        worlds: dict[str, World] = {}
        tasks = []
        for record in records:
            tasks.append(self.task(record, worlds))
            if built:
                built(1)
        with atomic_files(folder) as partial:
            for name, world in sorted(worlds.items()):
                (partial / f"{name}.json").write_text(world.to_json(), encoding="utf-8")
        return tasks

    def world_files(self, task: Task) -> list[str]:
        return []

    def expert(self, environment: Environment) -> str | None:
        """The environment's own `next_action`."""
        if isinstance(environment, ValueEnvironment) and environment.name == self.name:
            return environment.next_action()
        return None

    def load_world(self, path: Path, kind: str, read: Callable[[str], W]) -> W:
        """`read` applied to a world's file, cached. Raises FileNotFoundError, or ValueError where `read` raises ValueError,
        KeyError or TypeError; `kind` names the world in messages."""
        if path not in self._worlds:
            try:
                self._worlds[path] = read(path.read_text(encoding="utf-8"))
            except FileNotFoundError as error:
                raise FileNotFoundError(
                    f"{kind} file {path} is missing; run the curate stage of domain {self.name} again"
                ) from error
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a {kind} ({error}); run the curate stage again") from error
        return self._worlds[path]


class GradedDomain(RecipeDomain[T]):
    """A domain whose settings weight tasks by level, and whose tasks' level is their difficulty."""

    levels_key: ClassVar[str]
    """Field of the settings: level -> weight."""

    @abstractmethod
    def level(self, record: Mapping[str, Any]) -> int: ...

    @property
    def weights(self) -> dict[int, float]:
        return dict(sorted(getattr(self.settings, self.levels_key).items()))

    def difficulty_weights(self) -> dict[float, float]:
        """Difficulty -> weight among the tasks that curation takes."""
        return {float(level): weight for level, weight in self.weights.items()}

    def record_difficulty(self, record: Mapping[str, Any]) -> float:
        """The difficulty of the record's task."""
        return float(self.level(record))

    def levels(self) -> Iterable[int]:
        """Levels that `recipes` draws."""
        return (level for level, weight in self.weights.items() if weight > 0)

    def recipe_kinds(self) -> set[str]:
        return {f"{self.levels_key} {level}" for level in self.levels()}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        return {f"{self.levels_key} {self.level(record)}"}


def splits_in_turn(count: int) -> Iterator[tuple[Split, int]]:
    """(split, number within it) of `count` tasks or worlds. The split furthest behind its share comes next, so that even a short
    file has all three."""
    made: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    for _ in range(count):
        split = min(SPLITS, key=lambda name: (made[name] / SHARES[name], SPLITS.index(name)))
        yield split, made[split]
        made[split] += 1


def world_by_world(
    count: int, per_world: int, seed: int, of_world: Callable[[Split, int], Iterable[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """`count` records, grouped by world; `of_world(split, number)` yields the `per_world` records of one world."""
    worlds = enumerate(splits_in_turn(-(-count // per_world)))
    return islice(chain.from_iterable(of_world(split, seed * 1_000_000 + number) for number, (split, _) in worlds), count)


class Mix:
    """A sequence of indices into `weights` in which every prefix keeps the proportions: the index furthest behind comes next."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = weights
        self._taken = [0] * len(weights)

    def next(self) -> int:
        place = min(range(len(self._weights)), key=lambda place: ((self._taken[place] + 1) / self._weights[place], place))
        self._taken[place] += 1
        return place


def levels_in_turn(count: int, weights: Mapping[Split, Sequence[float]]) -> Iterator[tuple[Split, int, int]]:
    """(split, number within it, index of its level) of `count` tasks; within a split, levels in proportion to its weights."""
    mixes = {split: Mix(weights[split]) for split in SPLITS}
    for split, number in splits_in_turn(count):
        yield split, number, mixes[split].next()


def hashed_split(shares: Mapping[Split, int], *key: object) -> Split:
    """The split that `key` is hashed to, in proportion to `shares`."""
    place = key64(*key) % sum(shares.values())
    ends = accumulate(shares[split] for split in SPLITS)
    return next(split for split, end in zip(SPLITS, ends, strict=True) if place < end)


def apportioned(total: int, weights: Mapping[int, float], *key: object) -> list[int]:
    """`total` levels in proportion to `weights` (largest remainder), in a random order that depends on `key`."""
    shares = {level: total * weight / sum(weights.values()) for level, weight in sorted(weights.items())}
    plan = [level for level, share in shares.items() for _ in range(int(share))]
    remainders = sorted(shares, key=lambda level: (int(shares[level]) - shares[level], level))
    return permutation([*plan, *remainders[: total - len(plan)]], *key)


def some_weight(key: str, example: str) -> Callable[[dict[Any, float]], dict[Any, float]]:
    """A pydantic validator of weights: at least one is above 0."""

    def check(weights: dict[Any, float]) -> dict[Any, float]:
        if sum(weights.values()) <= 0:
            raise ValueError(f"{key} needs at least one weight above 0, e.g. {example}")
        return weights

    return check


def below_raw(folder: str) -> str:
    """A pydantic validator of a folder's name: it is below data/raw."""
    if not watched(folder):
        raise ValueError(f"is {folder}; choose a folder below data/raw, where DVC tracks changes")
    return folder


def check_fields(record: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Raise ValueError unless a raw record has exactly these keys with values of these types, a valid split and a task id."""
    for key, kind in fields.items():
        if key not in record:
            raise ValueError(f"'{key}' is missing")
        if type(record[key]) is not kind:
            raise ValueError(f"'{key}' must be {kind.__name__}, not {record[key]!r}")
    unknown = sorted(set(record) - set(fields))
    if unknown:
        raise ValueError(f"unknown keys {unknown}; known are {list(fields)}")
    if record["split"] not in SPLITS:
        raise ValueError(f"'split' must be one of {list(SPLITS)}, not {record['split']!r}")
    if not record["task_id"]:
        raise ValueError("'task_id' is empty")


def check_world_number(record: Mapping[str, Any], key: str) -> None:
    """Raise ValueError unless `record[key]` is a valid world number."""
    if not 0 <= record[key] < 2**63:
        raise ValueError(f"'{key}' must be at least 0 and below 2**63, not {record[key]}")


R = TypeVar("R", bound=BaseModel)


def parse_record(model: type[R], record: Mapping[str, Any], domain: str) -> R:
    """A validated raw record. Raises ValueError naming each wrong key, what is wrong and the value."""
    try:
        return model.model_validate(dict(record))
    except ValidationError as error:
        mistakes = []
        for item in error.errors():
            key = ".".join(str(part) for part in item["loc"])
            given = "" if isinstance(item["input"], dict) else f" (given: {item['input']!r})"
            mistakes.append(f"{f'{key}: ' if key else ''}{item['msg'].removeprefix('Value error, ')}{given}")
        raise ValueError(f"{domain} record {record.get('task_id', 'without task_id')}: {'; '.join(mistakes)}") from error
