"""Makes TextWorld games from recipes and compiles them reproducibly."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from textworld import GameOptions
from textworld.generator import make_grammar, make_map, make_quest
from textworld.generator.chaining import QuestGenerationError
from textworld.generator.data import KnowledgeBase
from textworld.generator.game import Game
from textworld.generator.inform7 import generate_inform7_source
from textworld.generator.inform7.world2inform7 import I7_DEFAULT_PATH
from textworld.generator.world import World as TextWorldMap
from textworld.logic import Action

from stages.environments.textworld.settings import NAME_NUMBERS, Recipe
from stages.environments.textworld.world import World, WorldState
from stages.runtime.files import atomic_bytes, atomic_text
from stages.seeding import permutation

_NOUNS = {"r": "room", "c": "box", "s": "stand", "o": "thing", "f": "snack", "k": "key"}
_GOAL_RULES = {goal: rf"{goal}(/[cs])?" for goal in ("take", "put", "insert", "open", "unlock", "drop", "eat")}
_SERIAL = slice(0x12, 0x18)
"""Bytes of a story file with its compilation date (Z-machine standard 1.1, section 11.1)."""


def make_game(recipe: Recipe) -> Game:
    """The recipe's game, not compiled. Raises ValueError if TextWorld finds no such quest for this seed."""
    options = GameOptions()
    options.kb = KnowledgeBase.default()
    options.seeds = recipe.seed
    options.nb_rooms, options.nb_objects, options.quest_length = recipe.rooms, recipe.objects, recipe.quest_length
    options.quest_breadth = 1
    options.grammar.theme = "basic"
    options.grammar.blend_descriptions = True
    options.grammar.only_last_action = recipe.instructions == "goal"
    rngs = options.rngs
    chaining = options.chaining
    chaining.rules_per_depth = [options.kb.rules.get_matching(_GOAL_RULES[recipe.goal])]
    chaining.backward = chaining.create_variables = True
    chaining.rng = rngs["quest"]
    chaining.restricted_types = frozenset({"r", "d"})
    world = TextWorldMap.from_map(make_map(recipe.rooms, rng=rngs["map"], possible_door_states=None))
    world.set_player_room()
    try:
        quests = make_quest(world, options)
    except QuestGenerationError as error:
        raise ValueError(f"textworld record {recipe.task_id}: {error}; give it another seed") from error
    missing = recipe.objects - sum(entity.type not in ("r", "d", "I", "P") for entity in world.entities)
    if missing > 0:
        world.populate(missing, rng=np.random.RandomState(rngs["objects"].randint(2**31)))
    game = Game(world, None, quests)
    _name_entities(game, recipe)
    game.change_grammar(make_grammar(options.grammar, rng=rngs["grammar"]))
    game.metadata["uuid"] = recipe.game_id
    return game


def _name_entities(game: Game, recipe: Recipe) -> None:
    """Give entities names with numbers of the split, each used once; a key has the number of what it opens."""
    numbers = iter(permutation(NAME_NUMBERS[recipe.split], "textworld", "game", recipe.seed))
    locks = {fact.arguments[0].name: fact.arguments[1].name for fact in game.world.facts if fact.name == "match"}
    given: dict[str, int] = {}
    for name in sorted(game.infos):
        if game.infos[name].type not in _NOUNS:
            continue
        thing = locks.get(name, name)
        if thing not in given:
            given[thing] = next(numbers, -1)
        info = game.infos[name]
        info.name = info.noun = f"{_NOUNS[info.type]}{given[thing]}"
        info.adj = ""
    if -1 in given.values():
        raise ValueError(f"textworld record {recipe.task_id}: its {len(given)} entities exceed the names of its split")


def entity_names(game: Game) -> list[str]:
    return sorted(info.name for info in game.infos.values() if info.type in _NOUNS)


def start_moves(game: Game, recipe: Recipe) -> tuple[Action, ...]:
    """The shortest walk to the recipe's start: 0 is the quest's own room, the others are in random order by seed."""
    first = World(game).initial()
    walks: dict[str, tuple[Action, ...]] = {first.room: ()}
    frontier: list[WorldState] = [first]
    while frontier:
        state = frontier.pop(0)
        for action in sorted((a for a in state.actions if a.name.startswith("go/")), key=lambda a: a.name):
            after = state.after(action)
            if after.room not in walks:
                walks[after.room] = (*walks[state.room], action)
                frontier.append(after)
    others = permutation(sorted(set(walks) - {first.room}), "textworld", "starts", recipe.seed)
    rooms = [first.room, *others]
    if recipe.start >= len(rooms):
        raise ValueError(
            f"textworld record {recipe.task_id}: start {recipe.start} is out of range; {len(rooms)} rooms can be reached"
        )
    return walks[rooms[recipe.start]]


def objective(game: Game) -> str:
    """The game's objective in lower case, without its usual opening."""
    text = " ".join(game.objective.split()).lower()
    return text.removeprefix("the objective is to ").removeprefix("first; ")


def compile_to(game: Game, folder: Path) -> None:
    """Write `<game id>.z8` and `.json` to `folder`, without dates and paths. Raises RuntimeError with the compiler's message."""
    name = game.metadata["uuid"]
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as work:
        code = bytearray(_compiled(generate_inform7_source(game), Path(work), name))
    code[_SERIAL] = b"000000"
    data: dict[str, Any] = dict(game.serialize())
    data["KB"] = {**data["KB"], "text_grammars_path": ""}
    atomic_bytes(folder / f"{name}.z8", bytes(code))
    atomic_text(folder / f"{name}.json", json.dumps(data, sort_keys=True))


def _compiled(source: str, project: Path, name: str) -> bytes:
    """The story file of an Inform 7 program, as TextWorld compiles it, but without Inform's index of a hundred pages, which takes
    a quarter of the time. Raises RuntimeError."""
    home = Path(os.environ.get("INFORM_HOME", I7_DEFAULT_PATH), "share", "inform7")
    for part in ("Source", "Build"):
        (project / part).mkdir()
    (project / "uuid.txt").touch()
    (project / "Source" / "story.ni").write_text(source)
    to_inform6 = ["ni", "--internal", home / "Internal", "--format=.z8", "--project", project, "-noindex"]
    to_story = ["inform6", "-E2wSv8F0", project / "Build" / "auto.inf", project / "story.z8"]
    for compiler, *arguments in (to_inform6, to_story):
        done = subprocess.run(
            [home / "Compilers" / compiler, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode:
            message = done.stdout.decode(errors="replace")
            raise RuntimeError(f"{compiler} could not compile game {name} (exit code {done.returncode}):\n{message}")
    return (project / "story.z8").read_bytes()
