"""The factbook domain: recipes, tasks and worlds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from stages.environments.base_domain import GradedDomain, check_fields, levels_in_turn
from stages.environments.factbook.book import Book
from stages.environments.factbook.environment import FactbookEnvironment
from stages.environments.factbook.facts import canonical
from stages.environments.factbook.profiles import Profile, read_profiles
from stages.environments.factbook.questions import KINDS, POOLS, Question, Reading, prompt, solve
from stages.environments.factbook.settings import FactbookSettings
from stages.environments.pages.index import PageIndex
from stages.environments.pages.world import World
from stages.records.task import SPLITS, Split, Task
from stages.runtime.validation import ParamsError
from stages.seeding import stream

REPOSITORY = Path(__file__).resolve().parents[3]
_FIELDS: dict[str, type] = {
    "task_id": str, "split": str, "kind": str, "subjects": list, "facts": list, "lowest": bool,
}  # fmt: skip
_DRAWS = 2000
"""Attempts to draw a question that is new and has an answer before `recipes` gives up."""


class FactbookDomain(GradedDomain[FactbookSettings]):
    name = "factbook"
    Settings = FactbookSettings
    levels_key = "hops"

    def ready(self) -> None:
        """Raises ParamsError if this Python can't search."""
        try:
            PageIndex(World(()))
        except RuntimeError as error:
            raise ParamsError(f"domain factbook: {error}") from error

    @cached_property
    def _profiles(self) -> list[Profile]:
        return read_profiles(REPOSITORY / self.settings.folder)

    @cached_property
    def _books(self) -> dict[Split, Book]:
        return {split: Book(self._profiles, split) for split in SPLITS}

    @cached_property
    def _synonyms(self) -> dict[str, list[str]]:
        """A country's name in any form -> its other forms, since profiles write "US" as well as "United States"."""
        forms = [(profile.name, *profile.also) for profile in self._profiles]
        return {name: [other for other in names if other != name] for names in forms for name in names}

    def level(self, record: Mapping[str, Any]) -> int:
        return KINDS[record["kind"]].hops

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records. Raises ValueError if the profiles have fewer different questions."""
        levels = list(self.levels())
        rng = stream("factbook.recipes", seed)
        seen: set[tuple[Any, ...]] = set()
        for split, index, place in levels_in_turn(count, {split: [self.weights[level] for level in levels] for split in SPLITS}):
            asked = self._new_question(self._books[split], levels[place], seen, rng)
            fields = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(asked).items()}
            yield {"task_id": f"factbook-{split}-{index:06d}", "split": split, **fields}

    def _new_question(self, book: Book, hops: int, seen: set[tuple[Any, ...]], rng: Random) -> Question:
        """A question with an answer that asks for another fact, or from other pages, than those in `seen`; added to it."""
        kinds = [name for name, kind in KINDS.items() if kind.hops == hops]
        for _ in range(_DRAWS):
            name = rng.choice(kinds)
            asked = KINDS[name].draw(name, book, rng)
            try:
                answer, reading = solve(asked, book)
            except ValueError:
                continue
            # A conversion is the same question in another unit.
            key = (*sorted(hop.page for hop in reading.hops), *asked.facts[-1:], *([] if KINDS[name].facts else [answer]))
            if key not in seen:
                seen.add(key)
                return asked
        raise ValueError(f"factbook: the {book.split} regions have no further question of {hops} hops; ask for fewer records")

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, _FIELDS)
        if record["kind"] not in KINDS:
            raise ValueError(f"'kind' must be one of {list(KINDS)}, not {record['kind']!r}")
        kind, subjects = KINDS[record["kind"]], record["subjects"]
        if len(subjects) != max(1, kind.countries) or not all(isinstance(name, str) for name in subjects):
            raise ValueError(f"'subjects' must be {max(1, kind.countries)} names, not {subjects!r}")
        if len(record["facts"]) != len(kind.facts):
            raise ValueError(f"'facts' must be {len(kind.facts)} names, not {record['facts']!r}")
        for name, pool in zip(record["facts"], kind.facts, strict=True):
            if name not in POOLS[pool]:
                raise ValueError(f"'facts' holds {name!r}; known here are {POOLS[pool]}")
        self._solved(record)

    def _solved(self, record: Mapping[str, Any]) -> tuple[Question, str, Reading]:
        asked = Question(record["kind"], tuple(record["subjects"]), tuple(record["facts"]), record["lowest"])
        return asked, *solve(asked, self._books[record["split"]])

    def task(self, record: Mapping[str, Any], worlds: dict[str, World]) -> Task:
        split = record["split"]
        if split not in worlds:
            worlds[split] = self._books[split].world()
        try:
            asked, answer, reading = self._solved(record)
        except ValueError as error:
            raise ValueError(f"record {record['task_id']}: {error}") from error
        right = [answer, *reading.also]
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=split,
            seed=0,
            prompt=prompt(asked),
            spec={
                "world": split,
                "kind": asked.kind,
                "answer": answer,
                "accepted": list(dict.fromkeys(name for one in right for name in (one, *self._synonyms.get(one, ())))),
                "chain": [asdict(hop) for hop in reading.hops],
                "countries": reading.countries,
            },
            difficulty=float(len(reading.hops)),
            cluster=f"factbook-{split}-{reading.countries[0]}",
        )

    def world_files(self, task: Task) -> list[str]:
        return [f"{task.spec['world']}.json"]

    def make(self, folder: Path) -> FactbookEnvironment:
        return FactbookEnvironment(lambda world: self._index(folder / f"{world}.json"), self.settings)

    def _index(self, path: Path) -> PageIndex:
        return self.load_world(path, "world", lambda text: PageIndex(World.from_json(text)))

    def answer(self, action: str) -> str | None:
        verb, _, text = action.strip().partition(" ")
        return canonical(text) if verb.lower() == "answer" and text.strip() else None

    def topic(self, task: Task) -> str:
        """The page that answers the question."""
        return task.spec["chain"][-1]["page"]

    def entities(self, task: Task) -> set[str]:
        """The countries whose pages answer the question."""
        return set(task.spec["countries"])
