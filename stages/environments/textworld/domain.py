"""The TextWorld domain: recipes, compiled games, environments and the expert."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.environments.textworld.settings import Level, Recipe, TextWorldSettings, parse_recipe
from stages.records.task import SPLITS, Split, Task
from stages.runtime.workers import worker_pool
from stages.seeding import key64

if TYPE_CHECKING:
    from stages.environments.textworld.environment import TextWorldEnvironment
    from stages.environments.textworld.stories import Stories

SHARES: dict[Split, int] = {"train": 384, "valid": 24, "test": 200}
"""Proportions of the splits."""
_SHORTEST = 2
"""Shortest solution of a task; one-command tasks teach nothing."""


class TextWorldDomain:
    """Household text games. Imports the textworld library only on use."""

    name = "textworld"
    Settings = TextWorldSettings

    def __init__(self, settings: TextWorldSettings) -> None:
        self.settings = settings
        self._stories: Stories | None = None

    def recipes(self, count: int, seed: int, splits: Collection[Split] = SPLITS) -> Iterator[dict[str, Any]]:
        """Those of `count` raw records that are of `splits`. Every prefix of all keeps the proportions of the splits, and a game
        belongs to one."""
        made = dict.fromkeys(SHARES, 0)
        games = dict.fromkeys(SHARES, 0)
        levels, goals = self.settings.levels, self.settings.goals
        while sum(made.values()) < count:
            split = max(SHARES, key=lambda name: SHARES[name] * (sum(made.values()) + 1) - made[name] * sum(SHARES.values()))
            index = games[split]
            games[split] += 1
            level = levels[index % len(levels)]
            goal = goals[index // len(levels) % len(goals)]
            values = {"split": split, **level.model_dump(), "goal": goal, "instructions": self.settings.instructions}
            tasks = min(self._tasks(level.rooms), count - sum(made.values()))
            made[split] += tasks
            if split in splits:
                yield from self._game_records(values, f"textworld-{split}-{index:04d}", seed)[:tasks]

    def _tasks(self, rooms: int) -> int:
        """Tasks of one game."""
        return 1 if self.settings.instructions == "full" else min(self.settings.starts, rooms)

    def _game_records(self, values: Mapping[str, Any], name: str, seed: int) -> list[dict[str, Any]]:
        """The tasks of one game, from the first of a sequence of seeds whose game has enough useful starts."""
        wanted = self._tasks(values["rooms"])
        for attempt in range(1000):
            record = {**values, "seed": key64("textworld", seed, name, attempt) % 2**31}
            starts = _useful_starts(Recipe(task_id=name, start=0, **record), self.settings)[:wanted]
            if len(starts) == wanted:
                return [
                    {"task_id": f"{name}-{start}", **record, "start": start, "solution_length": length}
                    for start, length in starts
                ]
        raise ValueError(
            f"textworld: no game with {dict(values)} has {wanted} starts with solutions of {_SHORTEST} to "
            f"{self.settings.max_turns} commands; change per_domain.textworld.environment (levels, starts or max_turns)"
        )

    def recipe_kinds(self) -> set[str]:
        settings = self.settings
        goals = {f"goal {goal}" for goal in settings.goals}
        return {*map(_level_name, settings.levels), *goals, f"instructions {settings.instructions}"}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        recipe = parse_recipe(record)
        level = Level(rooms=recipe.rooms, objects=recipe.objects, quest_length=recipe.quest_length)
        return {_level_name(level), f"goal {recipe.goal}", f"instructions {recipe.instructions}"}

    def check(self, record: Mapping[str, Any]) -> None:
        recipe = parse_recipe(record)
        length = recipe.solution_length or 0
        if length > self.settings.max_turns:
            raise ValueError(
                f"textworld record {recipe.task_id}: its solution takes {length} commands, and max_turns "
                f"(params.yaml, per_domain.textworld.environment) is {self.settings.max_turns}"
            )

    def build(
        self,
        records: Sequence[Mapping[str, Any]],
        folder: Path,
        workers: int,
        *,
        built: Callable[[int], None] | None = None,
    ) -> list[Task]:
        """Compile the games of `records` into `folder`/games and return the tasks in the order of the records.

        `built` is called after each game with its number of records. Raises ValueError naming a record that can't be built.
        """
        folder = Path(folder)
        (folder / "games").mkdir(parents=True, exist_ok=True)
        games: dict[str, list[Recipe]] = {}
        recipes = [parse_recipe(record) for record in records]
        for recipe in recipes:
            games.setdefault(recipe.game_id, []).append(recipe)
        jobs = [(group, folder) for group in games.values()]
        tasks: dict[str, Task] = {}
        with worker_pool(workers) if workers > 1 and len(jobs) > 1 else nullcontext() as pool:
            for group in (pool.map if pool else map)(_build_game, jobs):
                tasks.update((task.task_id, task) for task in group)
                if built:
                    built(len(group))
        if len(tasks) < len(recipes):
            ids = [recipe.task_id for recipe in recipes]
            raise ValueError(f"textworld records share task ids: {sorted({each for each in ids if ids.count(each) > 1})}")
        return [tasks[recipe.task_id] for recipe in recipes]

    def world_files(self, task: Task) -> list[str]:
        """The compiled game, and its logic beside it."""
        game = Path(task.spec["game"])
        return [game.as_posix(), game.with_suffix(".json").as_posix()]

    def make(self, folder: Path) -> TextWorldEnvironment:
        from stages.environments.textworld.environment import TextWorldEnvironment
        from stages.environments.textworld.stories import Stories

        if self._stories is None:
            self._stories = Stories()
        return TextWorldEnvironment(folder, self.settings, self._stories)

    def expert(self, environment: TextWorldEnvironment) -> str | None:
        """The next command of TextWorld's winning policy; None if the episode is over or can no longer be won."""
        return next(iter(environment.policy()), None)

    def entities(self, task: Task) -> set[str]:
        return set(task.spec["entities"])


def _level_name(level: Level) -> str:
    return f"level {level.rooms} rooms {level.objects} objects {level.quest_length} commands"


def _useful_starts(recipe: Recipe, settings: TextWorldSettings) -> list[tuple[int, int]]:
    """(start, length of its shortest solution) where that is neither trivial nor longer than the turn limit."""
    from stages.environments.textworld.games import make_game, start_moves
    from stages.environments.textworld.world import World

    try:
        game = make_game(recipe)
    except ValueError:
        return []
    starts = range(recipe.rooms if settings.instructions == "goal" else 1)
    lengths = [len(World(game).policy(start_moves(game, recipe.model_copy(update={"start": start})))) for start in starts]
    return [(start, length) for start, length in zip(starts, lengths, strict=True) if _SHORTEST <= length <= settings.max_turns]


def _build_game(job: tuple[list[Recipe], Path]) -> list[Task]:
    """Compile one game and describe its tasks."""
    from stages.environments.textworld.games import compile_to, entity_names, make_game, objective, start_moves
    from stages.environments.textworld.world import World

    recipes, folder = job
    game = make_game(recipes[0])
    world = World(game)
    tasks = []
    for recipe in recipes:
        moves = start_moves(game, recipe)
        length = len(world.policy(moves))
        if length != (recipe.solution_length or length) or not length:
            raise ValueError(
                f"textworld record {recipe.task_id}: its solution takes {length} commands, not {recipe.solution_length}; "
                "remove the record or correct its solution_length"
            )
        tasks.append(
            Task(
                task_id=recipe.task_id,
                domain=TextWorldDomain.name,
                split=recipe.split,
                seed=recipe.seed,
                prompt=objective(game),
                spec={"game": f"games/{recipe.game_id}.z8", "moves": world.commands(moves), "entities": entity_names(game)},
                difficulty=float(length),
                cluster=recipe.game_id,
            )
        )
    compile_to(game, folder / "games")
    return tasks
