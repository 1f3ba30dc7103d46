"""The shop domain: recipes, tasks and catalogues."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stages.environments.base_domain import GradedDomain, apportioned, check_fields, check_world_number, world_by_world
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


class ShopDomain(GradedDomain[ShopSettings]):
    name = "shop"
    Settings = ShopSettings
    levels_key = "options"

    def level(self, record: Mapping[str, Any]) -> int:
        return len(record["options"])

    def levels(self) -> list[int]:
        return self._option_plan(0)  # all shops have the same counts

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records, grouped by shop."""
        return world_by_world(count, TASKS_PER_SHOP, seed, self._shop_recipes)

    def _shop_recipes(self, split: Split, number: int) -> Iterator[dict[str, Any]]:
        """Distinct tasks of one shop."""
        catalogue = make_catalogue(split, number)
        rng = stream("shop.goals", split, number)
        drawn: set[str] = set()
        for index, options in enumerate(self._option_plan(number)):
            goal = draw_goal(catalogue, options, rng)
            while goal.text in drawn:
                goal = draw_goal(catalogue, options, rng)
            drawn.add(goal.text)
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
        """Numbers of options of a shop's tasks, in proportion to the weights."""
        return apportioned(TASKS_PER_SHOP, self.settings.options, "shop.options", number)

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
            raise ValueError(f"record {record['task_id']}: no item of its shop matches it")
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
        """The names of the shop's items."""
        return {item.name for item in make_catalogue(task.split, task.seed).items}
