"""The shop domain: recipes, catalogues, tasks and the expert."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.environments.base_domain import RecipeDomain, allotted, check_fields, check_world_number, world_by_world
from stages.environments.search.index import SearchIndex
from stages.environments.shop.catalogue import ATTRIBUTES, KINDS, OPTIONS, Catalogue, Goal, draw_goal, make_catalogue
from stages.environments.shop.environment import Shop, ShopEnvironment
from stages.environments.shop.scoring import can_match
from stages.environments.shop.settings import ShopSettings
from stages.records.task import Split, Task
from stages.seeding import stream

TASKS_PER_SHOP = 8
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


class ShopDomain(RecipeDomain[ShopSettings]):
    """See stages.environments.protocol.Domain."""

    name = "shop"
    Settings = ShopSettings

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
        return world_by_world(count, TASKS_PER_SHOP, seed, self._shop_recipes)

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
        return allotted(TASKS_PER_SHOP, self.settings.options, "shop.options", number)

    def check(self, record: Mapping[str, Any]) -> None:
        check_fields(record, _FIELDS)
        check_world_number(record, "shop")
        if record["kind"] not in KINDS:
            raise ValueError(f"'kind' must be one of {list(KINDS)}, not {record['kind']!r}")
        if not record["attributes"] or any(attribute not in ATTRIBUTES for attribute in record["attributes"]):
            raise ValueError(f"'attributes' must be some of {list(ATTRIBUTES)}, not {record['attributes']}")
        for group, value in record["options"].items():
            if value not in OPTIONS.get(group, ()):
                raise ValueError(f"'options' must hold groups and values of {OPTIONS}, not {group!r}: {value!r}")

    def task(self, record: Mapping[str, Any], worlds: dict[str, Catalogue]) -> Task:
        key = f"{record['split']}-{record['shop']:06d}"
        if key not in worlds:
            worlds[key] = make_catalogue(record["split"], record["shop"])
        goal = Goal(record["kind"], tuple(record["attributes"]), dict(sorted(record["options"].items())), record["price_upper"])
        if not any(can_match(item, goal) for item in worlds[key].items):
            raise ValueError(f"record {record['task_id']}: no item of its shop is what it asks for")
        return Task(
            task_id=record["task_id"],
            domain=self.name,
            split=record["split"],
            seed=record["shop"],
            prompt=INSTRUCTIONS + goal.text if self.settings.instructions else goal.text,
            spec={"shop": key, "goal": {**asdict(goal), "attributes": list(goal.attributes)}},
            difficulty=float(len(goal.options)),
            cluster=f"shop-{key}",
        )

    def world_files(self, task: Task) -> list[str]:
        return [f"{task.spec['shop']}.json"]

    def make(self, folder: Path) -> ShopEnvironment:
        settings = self.settings
        return ShopEnvironment(
            lambda shop: self._shop(folder / f"{shop}.json"), settings.results, settings.max_turns, show_goal=settings.show_goal
        )

    def _shop(self, path: Path) -> Shop:
        def read(text: str) -> Shop:
            catalogue = Catalogue.from_json(text)
            return Shop(catalogue, SearchIndex(catalogue.items))

        return self.load_world(path, "shop", read)

    def entities(self, task: Task) -> set[str]:
        """Names of all items of the task's shop."""
        return {item.name for item in make_catalogue(task.split, task.seed).items}
