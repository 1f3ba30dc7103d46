"""The search domain: its settings, recipes, worlds and expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from stages.environments.protocol import SPLITS, DomainSettings, Environment, Split, Task
from stages.environments.search.environment import SearchEnvironment
from stages.environments.search.index import SearchIndex
from stages.environments.search.scoring import stated_answer
from stages.environments.search.world import RELATIONS, Page, World, draw_chain, make_world, question, split_of
from stages.seeding import permutation, stream

MAX_HOPS = 3
TASKS_PER_WORLD = 8
WORLD_SHARES: dict[Split, int] = {"train": 24, "valid": 3, "test": 25}
"""Worlds of each split in every 52, so that 416 tasks make 192 for training, 24 for validation and 200 for testing."""
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

    @field_validator("hops")
    @classmethod
    def _some_weight(cls, hops: dict[int, float]) -> dict[int, float]:
        if sum(hops.values()) <= 0:
            raise ValueError("hops needs at least one weight above 0, e.g. {1: 1, 2: 2, 3: 1}")
        return hops


class SearchDomain:
    """See stages.environments.protocol.Domain."""

    name = "search"
    Settings = SearchSettings

    def __init__(self, settings: SearchSettings | None = None) -> None:
        self.settings = settings or SearchSettings()
        self._indexes: dict[Path, SearchIndex[Page]] = {}

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
        made: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        produced = 0
        for number in range(-(-count // TASKS_PER_WORLD)):
            # The split furthest behind its share comes next, so a short file holds all three.
            split = min(SPLITS, key=lambda name: (made[name] / WORLD_SHARES[name], SPLITS.index(name)))
            made[split] += 1
            for record in self._world_recipes(split, seed * 1_000_000 + number):
                if produced < count:
                    produced += 1
                    yield record

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
        total = sum(self.settings.hops.values())
        shares = {hops: TASKS_PER_WORLD * weight / total for hops, weight in sorted(self.settings.hops.items())}
        plan = [hops for hops, share in shares.items() for _ in range(int(share))]
        remainders = sorted(shares, key=lambda hops: (int(shares[hops]) - shares[hops], hops))
        plan += remainders[: TASKS_PER_WORLD - len(plan)]
        return permutation(plan, "search.hops", number)

    def check(self, record: Mapping[str, Any]) -> None:
        for key, kind in _FIELDS.items():
            if key not in record:
                raise ValueError(f"'{key}' is missing")
            if type(record[key]) is not kind:
                raise ValueError(f"'{key}' must be {kind.__name__}, not {record[key]!r}")
        unknown = sorted(set(record) - set(_FIELDS))
        if unknown:
            raise ValueError(f"unknown keys {unknown}; known are {list(_FIELDS)}")
        if record["split"] not in SPLITS:
            raise ValueError(f"'split' must be one of {list(SPLITS)}, not {record['split']!r}")
        if not record["task_id"]:
            raise ValueError("'task_id' is empty")
        if not 0 <= record["world"] < 2**63:
            raise ValueError(f"'world' must be at least 0 and below 2**63, not {record['world']}")
        if not 1 <= record["hops"] <= MAX_HOPS or record["hops"] != len(record["relations"]):
            raise ValueError(f"'hops' must be 1 to {MAX_HOPS} and the number of relations, not {record['hops']}")
        bad = [relation for relation in record["relations"] if relation not in RELATIONS]
        if bad:
            raise ValueError(f"'relations' holds {bad}; known are {list(RELATIONS)}")
        if split_of(record["start"]) != record["split"]:
            raise ValueError(f"'start' {record['start']!r} is not a name of {record['split']} worlds")

    def build(
        self,
        records: Sequence[Mapping[str, Any]],
        folder: Path,
        workers: int,
        *,
        built: Callable[[int], None] | None = None,
    ) -> list[Task]:
        """Write each world once as JSON below `folder`; worlds are small, so `workers` processes would not pay."""
        worlds: dict[str, World] = {}
        tasks = []
        for record in records:
            key = f"{record['split']}-{record['world']:06d}"
            if key not in worlds:
                worlds[key] = make_world(record["split"], record["world"])
            try:
                chain = worlds[key].chain(record["start"], record["relations"])
            except ValueError as error:
                raise ValueError(f"record {record['task_id']}: {error}") from error
            prompt = question(record["start"], record["relations"])
            spec = {
                "world": key,
                "start": record["start"],
                "relations": list(record["relations"]),
                "answer": chain[-1].value,
                "chain": [asdict(hop) for hop in chain],
            }
            tasks.append(
                Task(
                    task_id=record["task_id"],
                    domain=self.name,
                    split=record["split"],
                    seed=record["world"],
                    prompt=INSTRUCTIONS + prompt if self.settings.instructions else prompt,
                    spec=spec,
                    difficulty=float(record["hops"]),
                    cluster=f"search-{key}",
                )
            )
            if built:
                built(1)
        folder.mkdir(parents=True, exist_ok=True)
        for key, world in sorted(worlds.items()):
            (folder / f"{key}.json").write_text(world.to_json(), encoding="utf-8")
        return tasks

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
        if path not in self._indexes:
            try:
                world = World.from_json(path.read_text(encoding="utf-8"))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"world file {path} is missing; run the curate stage of domain search again") from error
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"world file {path} is not a world ({error}); run the curate stage again") from error
            self._indexes[path] = SearchIndex(world.pages)
        return self._indexes[path]

    def answer(self, action: str) -> str | None:
        """The normalised text of `answer <text>`; None for any other action."""
        return stated_answer(action)

    def expert(self, environment: Environment) -> str | None:
        """Search the first hop whose page was not seen yet, by name and relation; with all pages seen, answer."""
        if not isinstance(environment, SearchEnvironment) or not environment.admissible():
            return None
        seen = environment.seen_pages()
        for hop in environment.task.spec["chain"]:
            if hop["page"] not in seen:
                return f"search {hop['name']} {hop['relation']}"
        return f"answer {environment.task.spec['answer']}"

    def entities(self, task: Task) -> set[str]:
        """Names that the question's chain goes through, the answer included."""
        return {task.spec["start"], *(hop["value"] for hop in task.spec["chain"])}
