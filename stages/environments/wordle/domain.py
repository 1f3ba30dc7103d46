"""The wordle domain: recipes, tasks and the players of game records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from stages.environments.base_domain import RecipeDomain, levels_in_turn, parse_record
from stages.environments.protocol import Environment
from stages.environments.wordle.environment import WordleEnvironment
from stages.environments.wordle.players import choose
from stages.environments.wordle.settings import Level, Recipe, WordleSettings
from stages.environments.wordle.words import WordList, make_list, spell, split_of
from stages.records.task import SPLITS, Split, Task
from stages.seeding import key64, permutation


class WordleDomain(RecipeDomain[WordleSettings]):
    name = "wordle"
    Settings = WordleSettings

    def difficulty_weights(self) -> dict[float, float]:
        """Difficulty (log2 of the list's words) -> weight in curation."""
        weights: dict[float, float] = {}
        for level in self.settings.levels:
            bits = _bits(level)
            weights[bits] = weights.get(bits, 0.0) + level.weight
        return dict(sorted(weights.items()))

    def record_difficulty(self, record: Mapping[str, Any]) -> float:
        return _bits(self._recipe(record))

    def recipe_kinds(self) -> set[str]:
        return {_kind(level, self._shared(level)) for level in self.settings.levels}

    def record_kinds(self, record: Mapping[str, Any]) -> set[str]:
        recipe = self._recipe(record)
        return {_kind(recipe, recipe.list == _SHARED)}

    def _shared(self, level: Level) -> bool:
        return self.settings.lists == "shared" or level.source == "english"

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raw records. Raises ValueError if a shared list has too few words for a split, unless guesses redraw them."""
        levels = self.settings.levels
        weights = {split: [level.weight for level in levels] for split in SPLITS}
        used: Counter[tuple[Split, int]] = Counter()
        for split, index, place in levels_in_turn(count, weights):
            level = Level(**levels[place].model_dump(include=set(Level.model_fields)))
            task_id = f"wordle-{split}-{index:06d}"
            drawn = 1 + key64("wordle.recipes", seed, task_id) % (2**31 - 1)
            if self._shared(level):
                list_seed, word = _SHARED, self._shared_word(level, split, seed, used[split, place])
                used[split, place] += 1
            else:
                list_seed, word = _own_list(level, split, drawn)
            yield {"task_id": task_id, "split": split, **level.model_dump(), "list": list_seed, "word": word, "seed": drawn}

    def _shared_word(self, level: Level, split: Split, seed: int, number: int) -> str:
        """Word `number` of the shared list's words for the split, in random order."""
        words = _shared_words(level, split, seed)
        if not words or (number >= len(words) and self.settings.hidden == "fixed"):
            raise ValueError(
                f"wordle: the shared list has only {len(words)} words for {split}; request fewer tasks, make it longer "
                "(per_domain.wordle.environment, levels), or set lists: own or hidden: consistent"
            )
        return words[number % len(words)]

    def _recipe(self, record: Mapping[str, Any]) -> Recipe:
        return parse_record(Recipe, record, self.name)

    def check(self, record: Mapping[str, Any]) -> None:
        recipe = self._recipe(record)
        words = make_list(recipe.level, recipe.list)
        if recipe.word not in words.index:
            raise ValueError(f"wordle record {recipe.task_id}: word: '{recipe.word}' is not in its list")
        if (split := split_of(recipe.word)) != recipe.split:
            raise ValueError(f"wordle record {recipe.task_id}: word: '{recipe.word}' is reserved for {split} tasks")

    def task(self, record: Mapping[str, Any], worlds: dict[str, WordList]) -> Task:
        recipe = self._recipe(record)
        words = make_list(recipe.level, recipe.list)
        name = None
        if recipe.size is not None or recipe.source == "english":
            name = f"{recipe.source}-{recipe.letters}-{recipe.alphabet}-{recipe.size or len(words.words)}-{recipe.list}"
            worlds[name] = words
        return Task(
            task_id=recipe.task_id,
            domain=self.name,
            split=recipe.split,
            seed=recipe.seed,
            prompt=self._prompt(words, recipe.letters),
            spec={"letters": words.letters, "list": name, "word": recipe.word},
            difficulty=_bits(recipe),
            cluster=f"wordle-{recipe.word}" if self.settings.hidden == "fixed" else f"wordle-{recipe.task_id}",
        )

    def _prompt(self, words: WordList, length: int) -> str:
        text = f"letters {spell(words.letters, self.settings.spelling)}."
        if self.settings.show_words:
            text = f"{text} words {', '.join(spell(word, self.settings.spelling) for word in words.words)}."
        if not self.settings.instructions:
            return text
        turns = self.settings.max_turns
        return (
            f"Find the word of {length} letters in {turns} guesses. Each turn, write one word, letters apart. Then each letter "
            f"is here (right place), in (elsewhere in the word) or not (no more of it in the word).\n{text}"
        )

    def world_files(self, task: Task) -> list[str]:
        return [f"{task.spec['list']}.json"] if task.spec["list"] else []

    def make(self, folder: Path) -> WordleEnvironment:
        settings = self.settings
        return WordleEnvironment(
            lambda name: self.load_world(folder / f"{name}.json", "word list", WordList.from_json),
            settings.max_turns,
            consistent=settings.hidden == "consistent",
            reward=settings.reward,
            board=settings.show == "board",
            spelling=settings.spelling,
        )

    def entities(self, task: Task) -> set[str]:
        """The hidden word, or the seed of its draws if it is redrawn."""
        return {task.spec["word"]} if self.settings.hidden == "fixed" else {f"draws {task.seed}"}

    def returns(self) -> tuple[float, float]:
        return (0.0, 1.0) if self.settings.reward == "solved" else (-float(self.settings.max_turns), 0.0)

    def players(self) -> dict[str, float]:
        """Players of game records and their weights."""
        return {str(name): weight for name, weight in self.settings.players.items() if weight > 0}

    def player_action(self, player: str, environment: Environment, rng: Random) -> str:
        assert isinstance(environment, WordleEnvironment)
        guess = choose(player, environment.words, environment.state, rng)  # type: ignore[arg-type]
        return spell(guess, self.settings.spelling)


_SHARED = 0
"""Seed of shared lists."""
_DRAWS = 200
"""Attempts to draw a list with a word of the right split."""


def _own_list(level: Level, split: Split, seed: int) -> tuple[int, str]:
    """Seed of a list with words for `split`, and one of them. Raises ValueError if lists are too short to have one."""
    for attempt in range(_DRAWS):
        words = make_list(level, seed + attempt).words
        shuffled = permutation(words, "wordle.word", seed + attempt)
        word = next((word for word in shuffled if split_of(word) == split), None)
        if word is not None:
            return seed + attempt, word
    raise ValueError(f"wordle: lists of {level.size} words have none for {split}; use longer lists (levels, size)")


@lru_cache(maxsize=64)
def _shared_words(level: Level, split: Split, seed: int) -> list[str]:
    words = [word for word in make_list(level, _SHARED).words if split_of(word) == split]
    return permutation(words, "wordle.order", seed, split)


def _bits(level: Level) -> float:
    """log2 of the words in a level's list, to three digits."""
    return level.bits(level.size or len(make_list(level, _SHARED).words))


def _kind(level: Level, shared: bool) -> str:
    size = f"{level.source} {level.letters} letters {level.alphabet} alphabet {level.size or 'all'} words"
    return f"level {size}{' shared' if shared else ''}"
