"""The keydoor domain: recipes and tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.environments.base_domain import RecipeDomain, levels_in_turn, parse_record
from stages.environments.keydoor.environment import KeydoorEnvironment
from stages.environments.keydoor.features import KeydoorFeatures
from stages.environments.keydoor.imagined import ImaginedKeydoor
from stages.environments.keydoor.settings import KeydoorSettings, Level, Recipe, WeightedLevel
from stages.environments.keydoor.world import World, make_world
from stages.environments.learnt import NextState
from stages.records.task import SPLITS, Task
from stages.seeding import key64, permutation

INSTRUCTIONS = "Each turn, write one action: go <room>, take <key or thing>, unlock <room>, drop <thing> or look.\n"


class KeydoorDomain(RecipeDomain[KeydoorSettings]):
    name = "keydoor"
    Settings = KeydoorSettings

    def difficulty_weights(self) -> dict[float, float]:
        """Difficulty (length of the shortest solution) -> weight in curation."""
        weights: dict[float, float] = {}
        for level in self.settings.levels:
            weights[float(level.solution_length)] = weights.get(float(level.solution_length), 0.0) + level.weight
        return dict(sorted(weights.items()))

    def record_difficulty(self, record: Mapping[str, Any]) -> float:
        return float(self._recipe(record).solution_length)

    def recipe_kinds(self) -> set[str]:
        return {_kind(level) for level in self.settings.levels}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        return {_kind(self._recipe(record))}

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        levels = self.settings.levels
        weights = {split: [level.weight for level in levels] for split in SPLITS}
        for split, index, place in levels_in_turn(count, weights):
            task_id = f"keydoor-{split}-{index:06d}"
            yield {
                "task_id": task_id,
                "split": split,
                **levels[place].model_dump(include=set(Level.model_fields)),
                "seed": key64("keydoor.recipes", seed, task_id) % 2**31,
            }

    def _recipe(self, record: Mapping[str, Any]) -> Recipe:
        return parse_record(Recipe, record, self.name)

    def check(self, record: Mapping[str, Any]) -> None:
        self._recipe(record)

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        recipe = self._recipe(record)
        world = make_world(recipe.split, recipe, recipe.seed)
        prompt = self._prompt(world, recipe.seed)
        return Task(
            task_id=recipe.task_id,
            domain=self.name,
            split=recipe.split,
            seed=recipe.seed,
            prompt=INSTRUCTIONS + prompt if self.settings.instructions else prompt,
            spec=world.to_spec(),
            difficulty=float(recipe.solution_length),
            cluster=f"keydoor-{recipe.split}-{recipe.seed}",
        )

    def _prompt(self, world: World, seed: int) -> str:
        """The goal; with `clues`, also the room of everything, in random order."""
        goal = f"Bring {world.thing} to {world.start}." if world.deliver else f"Find {world.thing}."
        if not self.settings.clues:
            return goal
        clues = permutation([f"{item} {room}" for item, room in sorted(world.places.items())], "keydoor.clues", seed)
        return f"{goal} {', '.join(clues)}."

    def make(self, folder: Path) -> KeydoorEnvironment:
        return KeydoorEnvironment(self.settings.max_turns, self.settings.progress_reward)

    def features(self, tasks: Sequence[Task]) -> KeydoorFeatures:
        """Of these tasks' worlds, for a learnt model."""
        return KeydoorFeatures.of(tasks, self.settings.max_turns)

    def imagined(self, folder: Path, features: KeydoorFeatures, model: NextState) -> ImaginedKeydoor:
        """An environment that `model` can continue."""
        return ImaginedKeydoor(self.settings.max_turns, self.settings.progress_reward, features, model)

    def entities(self, task: Task) -> set[str]:
        """The names of all rooms."""
        return {task.spec["start"], *task.spec["back"]}


def _kind(level: Level | WeightedLevel) -> str:
    decoys = f" {level.decoys} decoys" if level.decoys else ""
    deliver = " deliver" if level.deliver else ""
    return f"level {level.corridor} corridor {level.doors} doors {level.side_rooms} side rooms{decoys}{deliver}"
