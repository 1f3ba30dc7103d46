"""The shop domain: recipes, catalogues, tasks and the expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.environments.protocol import SPLITS, Environment, Split, Task
from stages.environments.search.index import SearchIndex
from stages.environments.shop.catalogue import ATTRIBUTES, KINDS, OPTIONS, Catalogue, Goal, draw_goal, make_catalogue
from stages.environments.shop.environment import Shop, ShopEnvironment
from stages.environments.shop.scoring import can_match
from stages.environments.shop.settings import ShopSettings
from stages.seeding import permutation, stream

TASKS_PER_SHOP = 8
SHARES: dict[Split, int] = {"train": 24, "valid": 3, "test": 25}
"""Shops of each split in every 52, so that 416 tasks make 192 for training, 24 for validation and 200 for testing."""
INSTRUCTIONS = "Each turn, write one action: search <words>, or click <item, option, next, back or buy>.\n"
_FIELDS: dict[str, type] = {
    "task_id": str,
    "split": str,
    "shop": int,
    "kind": str,
    "attributes": list,
    "options": dict,
    "price_upper": int,
}


class ShopDomain:
    """See stages.environments.protocol.Domain."""

    name = "shop"
    Settings = ShopSettings

    def __init__(self, settings: ShopSettings | None = None) -> None:
        self.settings = settings or ShopSettings()
        self._shops: dict[Path, Shop] = {}

    def difficulty_weights(self) -> dict[float, float]:
        """Difficulty (options asked for) -> weight among the tasks that curation takes."""
        return {float(count): weight for count, weight in sorted(self.settings.options.items())}

    def record_difficulty(self, record: Mapping[str, Any]) -> float:
        return float(len(record["options"]))

    def recipe_kinds(self) -> set[str]:
        return {f"options {count}" for count in self._option_plan(0)}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        return {f"options {len(record['options'])}"}

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records, shop by shop; splits take turns in the proportion 192 : 24 : 200 of tasks."""
        made: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        produced = 0
        for number in range(-(-count // TASKS_PER_SHOP)):
            # The split furthest behind its share comes next, so a short file holds all three.
            split = min(SPLITS, key=lambda name: (made[name] / SHARES[name], SPLITS.index(name)))
            made[split] += 1
            for record in self._shop_recipes(split, seed * 1_000_000 + number):
                if produced < count:
                    produced += 1
                    yield record

    def _shop_recipes(self, split: Split, number: int) -> Iterator[dict[str, Any]]:
        """The tasks of one shop, all different."""
        catalogue = make_catalogue(split, number)
        rng = stream("shop.goals", split, number)
        asked: set[str] = set()
        for index, options in enumerate(self._option_plan(number)):
            goal = draw_goal(catalogue, options, rng)
            while goal.text in asked:
                goal = draw_goal(catalogue, options, rng)
            asked.add(goal.text)
            yield {
                "task_id": f"shop-{split}-{number:06d}-{index}",
                "split": split,
                "shop": number,
                "kind": goal.kind,
                "attributes": list(goal.attributes),
                "options": dict(goal.options),
                "price_upper": goal.price_upper,
            }

    def _option_plan(self, number: int) -> list[int]:
        """Options that a shop's tasks ask for: counts by largest remainder of the weights, in an order of its own."""
        total = sum(self.settings.options.values())
        shares = {count: TASKS_PER_SHOP * weight / total for count, weight in sorted(self.settings.options.items())}
        plan = [count for count, share in shares.items() for _ in range(int(share))]
        remainders = sorted(shares, key=lambda count: (int(shares[count]) - shares[count], count))
        plan += remainders[: TASKS_PER_SHOP - len(plan)]
        return permutation(plan, "shop.options", number)

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
        if not 0 <= record["shop"] < 2**63:
            raise ValueError(f"'shop' must be at least 0 and below 2**63, not {record['shop']}")
        if record["kind"] not in KINDS:
            raise ValueError(f"'kind' must be one of {list(KINDS)}, not {record['kind']!r}")
        if not record["attributes"] or any(attribute not in ATTRIBUTES for attribute in record["attributes"]):
            raise ValueError(f"'attributes' must be some of {list(ATTRIBUTES)}, not {record['attributes']}")
        for group, value in record["options"].items():
            if value not in OPTIONS.get(group, ()):
                raise ValueError(f"'options' must hold groups and values of {OPTIONS}, not {group!r}: {value!r}")

    def build(
        self,
        records: Sequence[Mapping[str, Any]],
        folder: Path,
        workers: int,
        *,
        built: Callable[[int], None] | None = None,
    ) -> list[Task]:
        """Write each catalogue once as JSON below `folder`; they are small, so `workers` processes would not pay."""
        catalogues: dict[str, Catalogue] = {}
        tasks = []
        for record in records:
            key = f"{record['split']}-{record['shop']:06d}"
            if key not in catalogues:
                catalogues[key] = make_catalogue(record["split"], record["shop"])
            goal = Goal(
                record["kind"], tuple(record["attributes"]), dict(sorted(record["options"].items())), record["price_upper"]
            )
            if not any(can_match(item, goal) for item in catalogues[key].items):
                raise ValueError(f"record {record['task_id']}: no item of its shop is what it asks for")
            tasks.append(
                Task(
                    task_id=record["task_id"],
                    domain=self.name,
                    split=record["split"],
                    seed=record["shop"],
                    prompt=INSTRUCTIONS + goal.text if self.settings.instructions else goal.text,
                    spec={"shop": key, "goal": {**asdict(goal), "attributes": list(goal.attributes)}},
                    difficulty=float(len(goal.options)),
                    cluster=f"shop-{key}",
                )
            )
            if built:
                built(1)
        folder.mkdir(parents=True, exist_ok=True)
        for key, catalogue in sorted(catalogues.items()):
            (folder / f"{key}.json").write_text(catalogue.to_json(), encoding="utf-8")
        return tasks

    def world_files(self, task: Task) -> list[str]:
        return [f"{task.spec['shop']}.json"]

    def make(self, folder: Path) -> ShopEnvironment:
        settings = self.settings
        return ShopEnvironment(
            lambda shop: self._shop(folder / f"{shop}.json"), settings.results, settings.max_turns, show_goal=settings.show_goal
        )

    def _shop(self, path: Path) -> Shop:
        if path not in self._shops:
            try:
                catalogue = Catalogue.from_json(path.read_text(encoding="utf-8"))
            except FileNotFoundError as error:
                raise FileNotFoundError(f"shop file {path} is missing; run the curate stage of domain shop again") from error
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"shop file {path} is not a catalogue ({error}); run the curate stage again") from error
            self._shops[path] = Shop(catalogue, SearchIndex(catalogue.items))
        return self._shops[path]

    def expert(self, environment: Environment) -> str | None:
        """See `ShopEnvironment.next_action`."""
        return environment.next_action() if isinstance(environment, ShopEnvironment) else None

    def entities(self, task: Task) -> set[str]:
        """Names of all items of the task's shop."""
        return {item.name for item in make_catalogue(task.split, task.seed).items}
