"""The search domain: settings, recipes, tasks and worlds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from stages.environments.base_domain import (
    GradedDomain,
    apportioned,
    check_fields,
    check_world_number,
    some_weight,
    world_by_world,
)
from stages.environments.pool import Pool
from stages.environments.protocol import DomainSettings
from stages.environments.search.environment import ClosedBookEnvironment, SearchEnvironment
from stages.environments.search.formats import MAX_THINKS, TARGET_THINKS
from stages.environments.search.index import SearchIndex
from stages.environments.search.judged import JudgedSearchEnvironment, JudgeSettings
from stages.environments.search.known import Known, check_known, known_recipes, known_world
from stages.environments.search.proposals import read, scripted
from stages.environments.search.routed import RoutedSearchEnvironment, RouteSettings
from stages.environments.search.scoring import stated_answer
from stages.environments.search.self_search import SelfSearchEnvironment, ToolMode
from stages.environments.search.world import RELATIONS, Page, World, draw_chain, make_world, question, split_of
from stages.records.task import Split, Task
from stages.seeding import stream

MAX_HOPS = 3
TASKS_PER_WORLD = 8
INSTRUCTIONS = "Find the answer in the encyclopaedia. Each turn, write one action: search <query> or answer <name>.\n"
RESULT_INSTRUCTIONS = "When asked for the result of a search, write what the encyclopaedia says.\n"
JUDGE_INSTRUCTIONS = "After each search, write judge yes if the result helps, else judge no, and then search again.\n"
_FIELDS: dict[str, type] = {"task_id": str, "split": str, "world": int, "hops": int, "start": str, "relations": list}


class SearchSettings(DomainSettings):
    """Settings of the search domain (per_domain.search.environment)."""

    max_turns: Annotated[int, Field(ge=1, le=64)] = 6
    """Turns of an episode, at most."""
    results: Annotated[int, Field(ge=1, le=10)] = 1
    """Pages that a search returns."""
    reward: Literal["exact_match", "f1"] = "exact_match"
    hops: dict[Annotated[int, Field(ge=1, le=MAX_HOPS)], Annotated[float, Field(ge=0.0)]] = Field(
        default_factory=lambda: {1: 1.0, 2: 2.0, 3: 1.0}
    )
    """Weights of 1-, 2- and 3-hop questions, in recipes and in curation."""
    echo_query: bool = False
    """Repeat the query after the results, so that a small model need not look back for it."""
    instructions: bool = False
    """Begin the prompt with the available actions; for models that were not trained on this domain."""
    # Excluded where absent: the hash of a panel without what follows must not depend on it.
    closed_book: Annotated[bool, Field(exclude_if=lambda closed: not closed)] = False
    """No tools, whatever the protocol: the agent has to answer from memory in its first turn."""
    judge: Annotated[JudgeSettings | None, Field(exclude_if=lambda judge: judge is None)] = None
    """The agent judges each result, `judge yes` or `judge no`, before it goes on: for `rl.algorithm: reseek`."""
    route: Annotated[RouteSettings | None, Field(exclude_if=lambda route: route is None)] = None
    """Searches go to members of a pool of priced tools, `search <name>: <question>`: for `rl.algorithm: router_r1`."""

    tool_mode: Annotated[ToolMode | None, Field(exclude_if=lambda mode: mode is None)] = None
    """Who writes the results of searches, for `rl.algorithm: ssrl`: the policy (`self`), the tool (`real`), or the tool where a
    query is less certain than the one before (`entropy_gated`); `none`: there are no searches. null: the tool, without thoughts
    and format scores."""
    think: Annotated[bool, Field(exclude_if=lambda think: think)] = True
    """tool_mode: `think <why>` is an action, which the format score counts; false for reasoning models."""
    target_thinks: Annotated[int, Field(ge=1, le=64, exclude_if=lambda count: count == TARGET_THINKS)] = TARGET_THINKS
    """tool_mode: thoughts from which on the format score does not ask for more."""
    max_thinks: Annotated[int, Field(ge=1, le=64, exclude_if=lambda count: count == MAX_THINKS)] = MAX_THINKS
    """tool_mode: with more thoughts the format score is 0."""
    first_always_real: Annotated[bool, Field(exclude_if=lambda first: first)] = True
    """tool_mode entropy_gated: the tool answers an episode's first search; false: the policy does, as no query came before."""
    known: Annotated[Known | None, Field(exclude_if=lambda known: known is None)] = None
    """Ask about one encyclopaedia that the policy may know from its demonstrations; needs curate.seeds for all splits."""

    _some_weight = field_validator("hops")(some_weight("hops", "{1: 1, 2: 2, 3: 1}"))

    @model_validator(mode="after")
    def _one_protocol(self) -> SearchSettings:
        given = [key for key in ("judge", "route", "tool_mode") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are {len(given)} protocols of search; set all but one to null")
        if not self.think and self.tool_mode is None:
            raise ValueError("think has an effect with tool_mode only; remove it, or set route.think")
        if self.constraint is not None and self.judge is not None and self.judge.context == "hard":
            raise ValueError(
                "judge.context: hard counts steps, of which a turn under a constraint may have several; set it to soft"
            )
        changed = (self.target_thinks, self.max_thinks, self.first_always_real) != (TARGET_THINKS, MAX_THINKS, True)
        if changed and self.tool_mode is None:
            raise ValueError("target_thinks, max_thinks and first_always_real have an effect with tool_mode only; remove them")
        if self.target_thinks > self.max_thinks:
            raise ValueError(f"target_thinks is {self.target_thinks}, above max_thinks {self.max_thinks}; lower it")
        if self.route is not None and self.results != 1:
            raise ValueError(
                f"results is {self.results}, and each member of route.pool has its own: set retriever.results there, and it to 1"
            )
        if self.tool_mode is not None and self.results != 1:
            raise ValueError(f"tool_mode shows one page as a result; set results to 1, not {self.results}")
        return self


class SearchDomain(GradedDomain[SearchSettings]):
    name = "search"
    Settings = SearchSettings
    levels_key = "hops"

    def level(self, record: Mapping[str, Any]) -> int:
        return record["hops"]

    def levels(self) -> list[int]:
        return self._hop_plan(0)  # all worlds have the same counts

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records, grouped by world."""
        if self.settings.known is not None:
            return known_recipes(self.settings.known, self.settings.hops, count, seed)
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
        """Hops of a world's questions, in proportion to the weights."""
        return apportioned(TASKS_PER_WORLD, self.settings.hops, "search.hops", number)

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, _FIELDS)
        check_world_number(record, "world")
        if not 1 <= record["hops"] <= MAX_HOPS or record["hops"] != len(record["relations"]):
            raise ValueError(f"'hops' must be 1 to {MAX_HOPS} and equal the number of relations, not {record['hops']}")
        bad = [relation for relation in record["relations"] if relation not in RELATIONS]
        if bad:
            raise ValueError(f"'relations' holds {bad}; known are {list(RELATIONS)}")
        if self.settings.known is not None:
            check_known(self.settings.known, record)
        elif split_of(record["start"]) != record["split"]:
            raise ValueError(f"'start' {record['start']!r} is not a name of {record['split']} worlds")

    def task(self, record: Mapping[str, Any], worlds: dict[str, World]) -> Task:
        known = self.settings.known is not None
        key = f"{'known' if known else record['split']}-{record['world']:06d}"
        if key not in worlds:
            worlds[key] = known_world(record["world"]) if known else make_world(record["split"], record["world"])
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
            prompt=self._instructions(record["split"]) + prompt,
            spec={
                "world": key,
                "start": record["start"],
                "relations": list(record["relations"]),
                "answer": chain[-1].value,
                "chain": [asdict(hop) for hop in chain],
            },
            difficulty=float(record["hops"]),
            cluster=record["task_id"] if known else f"search-{key}",
        )

    def _instructions(self, split: Split) -> str:
        """What stands before the question: the actions, with `instructions`, and the pool's members."""
        route = self.settings.route
        if route is not None:
            return (route.directions if self.settings.instructions else "") + route.text(split)
        if not self.settings.instructions:
            return ""
        if self.settings.tool_mode is not None:
            thoughts = ["think <why>"] if self.settings.think else []
            searches = ["search <query>"] if self.settings.tool_mode != "none" else []
            actions = " or ".join([*thoughts, *searches, "answer <name>"])
            return f"Each turn, write one action: {actions}.\n" + (RESULT_INSTRUCTIONS if self.writes_evidence() else "")
        return INSTRUCTIONS + (JUDGE_INSTRUCTIONS if self.settings.judge is not None else "")

    def writes_evidence(self) -> bool:
        """Whether some of the policy's turns stand for observations."""
        return self.settings.tool_mode in ("self", "entropy_gated")

    def forgets(self) -> bool:
        """Whether rejected results are hidden from later turns."""
        judge = self.settings.judge
        return judge is not None and judge.context == "hard" and not self.settings.closed_book

    def tools(self) -> list[str]:
        """Names of the priced tools."""
        route = None if self.settings.closed_book else self.settings.route
        return [] if route is None else [member.name for member in route.pool]

    def world_files(self, task: Task) -> list[str]:
        return [f"{task.spec['world']}.json"]

    def make(self, folder: Path) -> SearchEnvironment:
        settings, turns = self.settings, self.settings.max_turns
        make: Callable[..., SearchEnvironment] = SearchEnvironment
        if settings.judge is not None:
            make = partial(JudgedSearchEnvironment, judge=settings.judge)
        if settings.route is not None:
            pool = Pool(settings.route.pool, settings.route.max_reply_tokens)
            make = partial(RoutedSearchEnvironment, route=settings.route, pool=pool)
        if settings.tool_mode is not None:
            how: dict[str, Any] = {"mode": settings.tool_mode, "think": settings.think, "known": settings.known}
            how |= {"thinks": (settings.target_thinks, settings.max_thinks), "first_real": settings.first_always_real}
            make = partial(SelfSearchEnvironment, **how)
        if settings.closed_book:
            make, turns = ClosedBookEnvironment, 1
        return make(
            lambda world: self._index(folder / f"{world}.json"),
            settings.results,
            settings.reward,
            turns,
            echo_query=settings.echo_query,
        )

    def _index(self, path: Path) -> SearchIndex[Page]:
        return self.load_world(path, "world", lambda text: SearchIndex(World.from_json(text).pages))

    def answer(self, action: str) -> str | None:
        return stated_answer(action)

    def asked(self, question: str) -> str:
        return self._instructions("train") + question

    def read(self, question: str, evidence: str) -> str | None:
        return read(question, evidence)

    def proposal(self, task: Task) -> Sequence[str]:
        """From the answer back to the start; with few `results`, a search by relation and value often misses the page."""
        return scripted(task.spec)

    def entities(self, task: Task) -> set[str]:
        """The names along the question's chain, the answer included; the question itself where splits share an encyclopaedia."""
        if self.settings.known is not None:
            return {" ".join((task.spec["world"], task.spec["start"], *task.spec["relations"]))}
        return {task.spec["start"], *(hop["value"] for hop in task.spec["chain"])}
