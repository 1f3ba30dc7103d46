"""The search domain: its settings, recipes, worlds and expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from stages.environments.base_domain import (
    RecipeDomain,
    allotted,
    check_fields,
    check_world_number,
    some_weight,
    world_by_world,
)
from stages.environments.protocol import DomainSettings
from stages.environments.search.environment import SearchEnvironment
from stages.environments.search.index import SearchIndex
from stages.environments.search.scoring import stated_answer
from stages.environments.search.world import RELATIONS, Page, World, draw_chain, make_world, question, split_of
from stages.records.task import Split, Task
from stages.seeding import stream

MAX_HOPS = 3
TASKS_PER_WORLD = 8
INSTRUCTIONS = "Find the answer in the encyclopaedia. Each turn, write one action: search <query> or answer <name>.\n"
_FIELDS: dict[str, type] = {"task_id": str, "split": str, "world": int, "hops": int, "start": str, "relations": list}


class SearchSettings(DomainSettings):
    """Settings of the search domain (per_domain.search.environment)."""

    max_turns: Annotated[int, Field(ge=1, le=64)] = 6
    results: Annotated[int, Field(ge=1, le=10)] = 1
    """Pages that a search returns."""
    reward: Literal["exact_match", "f1"] = "exact_match"
    hops: dict[Annotated[int, Field(ge=1, le=MAX_HOPS)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {1: 1.0, 2: 2.0, 3: 1.0}
    )
    """Weights of 1-, 2- and 3-hop questions, in recipes and among the tasks that curation takes."""
    echo_query: bool = False
    """End what a search shows with the query, so that it is the last thing the agent reads. Small models find what they were just
    asked for; to look for what was asked before the text they read is another skill, and a rarer one."""
    instructions: bool = False
    """Put the available actions before the question; for models that were not trained on this domain."""

    _some_weight = field_validator("hops")(some_weight("hops", "{1: 1, 2: 2, 3: 1}"))


class SearchDomain(RecipeDomain[SearchSettings]):
    """See stages.environments.protocol.Domain."""

    name = "search"
    Settings = SearchSettings

    def difficulty_weights(self) -> dict[float, float]:
        """Difficulty (hops) -> weight among the tasks that curation takes."""
        return {float(hops): weight for hops, weight in sorted(self.settings.hops.items())}

    def record_difficulty(self, record: Mapping[str, Any]) -> float:
        """The difficulty that the record's task will have."""
        return float(record["hops"])

    def recipe_kinds(self) -> set[str]:
        """The hops of a world's questions, which are the same for every world."""
        return {f"hops {hops}" for hops in self._hop_plan(0)}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        return {f"hops {record['hops']}"}

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records, world by world; splits take turns in the proportion 192 : 24 : 200 of tasks."""
        return world_by_world(count, TASKS_PER_WORLD, seed, self._world_recipes)

    def _world_recipes(self, split: Split, number: int) -> Iterator[dict[str, Any]]:
        world = make_world(split, number)
        rng = stream("search.questions", split, number)
        asked: set[tuple[str, ...]] = set()
        for index, hops in enumerate(self._hop_plan(number)):
            chain = draw_chain(world, hops, rng)
            while (chain[0].name, *(hop.relation for hop in chain)) in asked:
                chain = draw_chain(world, hops, rng)
            relations = [hop.relation for hop in chain]
            asked.add((chain[0].name, *relations))
            yield {
                "task_id": f"search-{split}-{number:06d}-{index}",
                "split": split,
                "world": number,
                "hops": hops,
                "start": chain[0].name,
                "relations": relations,
            }

    def _hop_plan(self, number: int) -> list[int]:
        """Hops of a world's questions: counts by largest remainder of the weights, in an order of its own."""
        return allotted(TASKS_PER_WORLD, self.settings.hops, "search.hops", number)

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, _FIELDS)
        check_world_number(record, "world")
        if not 1 <= record["hops"] <= MAX_HOPS or record["hops"] != len(record["relations"]):
            raise ValueError(f"'hops' must be 1 to {MAX_HOPS} and the number of relations, not {record['hops']}")
        bad = [relation for relation in record["relations"] if relation not in RELATIONS]
        if bad:
            raise ValueError(f"'relations' holds {bad}; known are {list(RELATIONS)}")
        if split_of(record["start"]) != record["split"]:
            raise ValueError(f"'start' {record['start']!r} is not a name of {record['split']} worlds")

    def task(self, record: Mapping[str, Any], worlds: dict[str, World]) -> Task:
        key = f"{record['split']}-{record['world']:06d}"
        if key not in worlds:
            worlds[key] = make_world(record["split"], record["world"])
        try:
            chain = worlds[key].chain(record["start"], record["relations"])
        except ValueError as error:
            raise ValueError(f"record {record['task_id']}: {error}") from error
        prompt = question(record["start"], record["relations"])
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=record["world"],
            prompt=INSTRUCTIONS + prompt if self.settings.instructions else prompt,
            spec={
                "world": key,
                "start": record["start"],
                "relations": list(record["relations"]),
                "answer": chain[-1].value,
                "chain": [asdict(hop) for hop in chain],
            },
            difficulty=float(record["hops"]),
            cluster=f"search-{key}",
        )

    def world_files(self, task: Task) -> list[str]:
        return [f"{task.spec['world']}.json"]

    def make(self, folder: Path) -> SearchEnvironment:
        settings = self.settings
        return SearchEnvironment(
            lambda world: self._index(folder / f"{world}.json"),
            settings.results,
            settings.reward,
            settings.max_turns,
            echo_query=settings.echo_query,
        )

    def _index(self, path: Path) -> SearchIndex[Page]:
        return self.load_world(path, "world", lambda text: SearchIndex(World.from_json(text).pages))

    def answer(self, action: str) -> str | None:
        """The normalised text of `answer <text>`; None for any other action."""
        return stated_answer(action)

    def entities(self, task: Task) -> set[str]:
        """Names that the question's chain goes through, the answer included."""
        return {task.spec["start"], *(hop["value"] for hop in task.spec["chain"])}
