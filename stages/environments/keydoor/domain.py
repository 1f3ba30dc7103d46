"""The keydoor domain: recipes, tasks and the expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.environments.keydoor.environment import KeydoorEnvironment
from stages.environments.keydoor.settings import KeydoorSettings, Level, WeightedLevel, parse_recipe
from stages.environments.keydoor.world import World, make_world
from stages.environments.protocol import SPLITS, Environment, Split, Task
from stages.seeding import key64, permutation

SHARES: dict[Split, int] = {"train": 24, "valid": 3, "test": 25}
"""Tasks of each split in every 52: 192 for training, 24 for validation and 200 for testing in 416."""
INSTRUCTIONS = "Each turn, write one action: go <room>, take <key or thing>, unlock <room>, drop <thing> or look.\n"


class KeydoorDomain:
    """See stages.environments.protocol.Domain."""

    name = "keydoor"
    Settings = KeydoorSettings

    def __init__(self, settings: KeydoorSettings | None = None) -> None:
        self.settings = settings or KeydoorSettings()

    def difficulty_weights(self) -> dict[float, float]:
        """Difficulty (length of the shortest solution) -> weight among the tasks that curation takes."""
        weights: dict[float, float] = {}
        for level in self.settings.levels:
            weights[float(level.solution_length)] = weights.get(float(level.solution_length), 0.0) + level.weight
        return dict(sorted(weights.items()))

    def record_difficulty(self, record: Mapping[str, Any]) -> float:
        return float(parse_recipe(record).solution_length)

    def recipe_kinds(self) -> set[str]:
        return {_kind(level) for level in self.settings.levels}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        return {_kind(parse_recipe(record))}

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records; splits take turns in the proportion 192 : 24 : 200, and levels within each by weight."""
        levels = self.settings.levels
        made: dict[Split, int] = dict.fromkeys(SPLITS, 0)
        taken = {split: [0] * len(levels) for split in SPLITS}
        for _ in range(count):
            # The split furthest behind its share comes next, and in it the level furthest behind its weight.
            split = min(SPLITS, key=lambda name: (made[name] / SHARES[name], SPLITS.index(name)))
            counts = taken[split]
            index = min(range(len(levels)), key=lambda place: ((counts[place] + 1) / levels[place].weight, place))
            task_id = f"keydoor-{split}-{made[split]:06d}"
            yield {
                "task_id": task_id,
                "split": split,
                **levels[index].model_dump(include=set(Level.model_fields)),
                "seed": key64("keydoor.recipes", seed, task_id) % 2**31,
            }
            made[split] += 1
            counts[index] += 1

    def check(self, record: Mapping[str, Any]) -> None:
        parse_recipe(record)

    def build(
        self,
        records: Sequence[Mapping[str, Any]],
        folder: Path,
        workers: int,
        *,
        built: Callable[[int], None] | None = None,
    ) -> list[Task]:
        """Tasks hold all there is: nothing is written below `folder`."""
        tasks = []
        for record in records:
            recipe = parse_recipe(record)
            world = make_world(recipe.split, recipe, recipe.seed)
            prompt = self._prompt(world, recipe.seed)
            tasks.append(
                Task(
                    task_id=recipe.task_id,
                    domain=self.name,
                    split=recipe.split,
                    seed=recipe.seed,
                    prompt=INSTRUCTIONS + prompt if self.settings.instructions else prompt,
                    spec=world.to_spec(),
                    difficulty=float(recipe.solution_length),
                    cluster=f"keydoor-{recipe.split}-{recipe.seed}",
                )
            )
            if built:
                built(1)
        folder.mkdir(parents=True, exist_ok=True)
        return tasks

    def _prompt(self, world: World, seed: int) -> str:
        """The goal; with `clues`, also where everything is, in an order that tells nothing."""
        goal = f"Bring {world.thing} to {world.start}." if world.deliver else f"Find {world.thing}."
        if not self.settings.clues:
            return goal
        clues = permutation([f"{item} {room}" for item, room in sorted(world.places.items())], "keydoor.clues", seed)
        return f"{goal} {', '.join(clues)}."

    def world_files(self, task: Task) -> list[str]:
        return []

    def make(self, folder: Path) -> KeydoorEnvironment:
        return KeydoorEnvironment(self.settings.max_turns, self.settings.progress_reward)

    def expert(self, environment: Environment) -> str | None:
        """The next action of the shortest solution."""
        return environment.next_action() if isinstance(environment, KeydoorEnvironment) else None

    def entities(self, task: Task) -> set[str]:
        """All rooms, keys and things."""
        world = World.from_spec(task.spec)
        return {world.start, *world.back, *world.contents.values()}


def _kind(level: Level | WeightedLevel) -> str:
    decoys = f" {level.decoys} decoys" if level.decoys else ""
    deliver = " deliver" if level.deliver else ""
    return f"level {level.corridor} corridor {level.doors} doors {level.side_rooms} side rooms{decoys}{deliver}"
