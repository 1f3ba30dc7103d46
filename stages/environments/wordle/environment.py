"""Plays one word."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from stages.environments.base_environment import EpisodeEnvironment, EpisodeState
from stages.environments.protocol import Observation, Step
from stages.environments.wordle.players import best_guess
from stages.environments.wordle.rules import HERE, IN, code_of, marks_of
from stages.environments.wordle.settings import Spelling
from stages.environments.wordle.words import WordList, every_word, read, spell
from stages.records.task import SUCCESS_TERM, Task
from stages.seeding import key64, stream

ILLEGAL = "not a word."
SOLVED = "solved."
OPEN = "open"
"""A place whose letter is unknown."""
READABLE = 8
"""Most possible words that are listed in a state's key."""
SAMPLE = 32
"""Most legal words that `admissible` lists, half of them possible ones."""


@dataclass(frozen=True, kw_only=True)
class WordleState(EpisodeState):
    """`terminated`: the word was found."""

    left: np.ndarray = field(compare=False)
    """Numbers of the words consistent with all marks, ascending; never written to."""
    rows: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Legal guesses with their marks."""


def knowledge_key(words: WordList, left: np.ndarray) -> str:
    """A canonical name of the set of possible words."""
    if len(left) <= READABLE:
        return " ".join(words.words[number] for number in left)
    return f"{len(left)} words {hashlib.blake2b(left.astype('<i8').tobytes(), digest_size=8).hexdigest()}"


def step_reward(kind: str, solved: bool) -> float:
    """See `WordleSettings.reward`."""
    return float(solved) - (1.0 if kind == "lmrl" else 0.0)


class WordleEnvironment(EpisodeEnvironment[WordleState]):
    """One running word. `load_list` returns the list named in task.spec["list"]; null there means every string of the letters.

    With `consistent`, the hidden word is drawn uniformly from the possible words, as a function of the task's seed and that set:
    copies of a state have the same word.
    """

    name = "wordle"

    def __init__(
        self,
        load_list: Callable[[str], WordList],
        max_turns: int,
        *,
        consistent: bool = False,
        reward: str = "solved",
        board: bool = True,
        spelling: Spelling = "letters",
    ) -> None:
        super().__init__(max_turns)
        self._load_list = load_list
        self._consistent, self._reward, self._board = consistent, reward, board
        self.spelling: Spelling = spelling

    def _start(self, task: Task) -> tuple[WordleState, str]:
        spec = task.spec
        self.words = self._load_list(spec["list"]) if spec["list"] else every_word(spec["letters"], len(spec["word"]))
        return WordleState(task_id=task.task_id, left=self.words.everything), ""

    @property
    def state(self) -> WordleState:
        return self.snapshot()

    def hidden(self) -> str:
        """The word that the next guess is marked for."""
        left, task = self._state.left, self.task
        if not self._consistent:
            return task.spec["word"]
        return self.words.words[left[key64("wordle.draw", task.seed, knowledge_key(self.words, left)) % len(left)]]

    def step(self, action: str) -> Step:
        state = self._running()
        guess = read(action, self.spelling)
        legal = guess in self.words.index
        after = state
        if legal:
            marks = marks_of(guess, self.hidden())
            fits = self.words.codes([self.words.index[guess]], state.left)[0] == code_of(marks)
            solved = all(mark == HERE for mark in marks)
            after = replace(state, left=state.left[fits], rows=(*state.rows, (guess, marks)), terminated=solved)
        now = self._end_turn(after)
        terms = {SUCCESS_TERM: float(now.terminated)}
        if now.over:
            terms["places"] = sum(letter is not None for letter in self._found()) / self.words.array.shape[1]
        return Step(
            observation=Observation(self._shown(legal)),
            reward=step_reward(self._reward, now.terminated),
            accepted=legal,
            terminated=now.terminated,
            truncated=now.truncated,
            cost=1.0,
            terms=terms,
        )

    def _found(self) -> list[str | None]:
        """The letter of each place that a mark `here` has revealed."""
        found: list[str | None] = [None] * self.words.array.shape[1]
        for guess, marks in self._state.rows:
            found = [letter if mark == HERE else known for letter, mark, known in zip(guess, marks, found, strict=True)]
        return found

    def _shown(self, legal: bool) -> str:
        """The marks of the last guess, then the board."""
        if self._state.terminated:
            return SOLVED
        text = ILLEGAL
        if legal:
            marked = zip(*self._state.rows[-1], strict=True)
            text = " ".join(f"{spell(letter, self.spelling)} {mark}" for letter, mark in marked) + "."
        return f"{text} {self._board_text()}" if self._board else text

    def _board_text(self) -> str:
        """Untried letters, letters of the word whose place is unknown, and the places: "from g h with f. open d open."."""
        found, needed = self._found(), ""
        for guess, marks in self._state.rows:
            present = [letter for letter, mark in zip(guess, marks, strict=True) if mark in (HERE, IN)]
            for letter in dict.fromkeys(present):
                missing = present.count(letter) - found.count(letter) - needed.count(letter)
                needed += letter * max(0, missing)
        tried = {letter for guess, _ in self._state.rows for letter in guess}
        untried = [letter for letter in self.words.letters if letter not in tried]
        named = [("from", "".join(untried)), ("with", needed)]
        parts = [f"{name} {spell(letters, self.spelling)}" for name, letters in named if letters]
        places = " ".join(spell(letter, self.spelling) if letter else OPEN for letter in found)
        return f"{' '.join(parts)}. {places}." if parts else f"{places}."

    def state_key(self) -> str:
        """The possible words, and whether the word was found."""
        key = f"{self.task.task_id}#{knowledge_key(self.words, self._state.left)}"
        return f"{key}#{SOLVED}" if self._state.terminated else key

    def _expert_action(self) -> str:
        """The guess with the fewest expected words left."""
        return spell(self.words.words[best_guess(self.words, self._state.left)], self.spelling)

    def _actions(self) -> Iterator[str]:
        """Legal words; of a long list, a sample that depends on the state alone."""
        numbers = self.words.everything
        if len(numbers) > SAMPLE:
            rng = stream("wordle.admissible", self.state_key())
            some = [rng.sample(list(pool), min(SAMPLE // 2, len(pool))) for pool in (self._state.left, numbers)]
            numbers = np.array([*some[0], *some[1]])
        return (spell(self.words.words[number], self.spelling) for number in numbers)
