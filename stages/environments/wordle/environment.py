"""Playing one word. All state is a few Python values and an array that is never written, so snapshots are free."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from stages.environments.base_environment import ValueEnvironment
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
"""A place whose letter was not found yet."""
READABLE = 8
"""So many possible words, at most, are spelt out in a state's key."""
SAMPLE = 32
"""Legal words that `admissible` names where there are more, half of them possible ones."""


@dataclass(frozen=True)
class WordleState:
    """Everything that changes while a word is looked for."""

    task_id: str
    left: np.ndarray = field(compare=False)
    """Numbers of the words that fit all that was said, ascending."""
    rows: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Legal guesses with their marks."""
    turns: int = 0
    solved: bool = False
    truncated: bool = False

    @property
    def over(self) -> bool:
        return self.solved or self.truncated


def knowledge_key(words: WordList, left: np.ndarray) -> str:
    """A canonical name of the words that are still possible."""
    if len(left) <= READABLE:
        return " ".join(words.words[number] for number in left)
    return f"{len(left)} words {hashlib.blake2b(left.astype('<i8').tobytes(), digest_size=8).hexdigest()}"


def step_reward(kind: str, solved: bool) -> float:
    """See `WordleSettings.reward`."""
    return float(solved) - (1.0 if kind == "lmrl" else 0.0)


class WordleEnvironment(ValueEnvironment[WordleState]):
    """One running word. `load_list` gives a list by the name in task.spec["list"]; null there means every string of the letters.

    With `consistent`, the word behind a state is a function of the task's seed and of what is known: drawn anew each time that a
    guess tells something, each word that fits being as likely, and the same in copies of the state.
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
        return WordleState(task.task_id, self.words.everything), ""

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
        after = replace(state, turns=state.turns + 1)
        if legal:
            marks = marks_of(guess, self.hidden())
            fits = self.words.codes([self.words.index[guess]], state.left)[0] == code_of(marks)
            rows, solved = (*state.rows, (guess, marks)), all(mark == HERE for mark in marks)
            after = replace(after, left=state.left[fits], rows=rows, solved=solved)
        self._state = replace(after, truncated=not after.solved and after.turns >= self._max_turns)
        terms = {SUCCESS_TERM: float(after.solved)}
        if self._state.over:
            terms["places"] = sum(letter is not None for letter in self._found()) / self.words.array.shape[1]
        return Step(
            observation=Observation(self._shown(legal)),
            reward=step_reward(self._reward, after.solved),
            accepted=legal,
            terminated=after.solved,
            truncated=self._state.truncated,
            cost=1.0,
            terms=terms,
        )

    def _found(self) -> list[str | None]:
        """The letter of each place, where it is known by a mark `here`."""
        found: list[str | None] = [None] * self.words.array.shape[1]
        for guess, marks in self._state.rows:
            found = [letter if mark == HERE else known for letter, mark, known in zip(guess, marks, found, strict=True)]
        return found

    def _shown(self, legal: bool) -> str:
        """The marks of the last guess, and the board, its places last: from there they are as far from the next guess's as
        letters are from each other."""
        state = self._state
        if state.solved:
            return SOLVED
        parts = [ILLEGAL]
        if legal:
            parts = [
                " ".join(f"{spell(letter, self.spelling)} {mark}" for letter, mark in zip(*state.rows[-1], strict=True)) + "."
            ]
        if self._board:
            parts.append(self._board_text())
        return " ".join(parts)

    def _board_text(self) -> str:
        """ "from g h with f. open d open." : untried letters, letters that are in the word beyond the places found, places."""
        found, needed = self._found(), ""
        for guess, marks in self._state.rows:
            told = [letter for letter, mark in zip(guess, marks, strict=True) if mark in (HERE, IN)]
            for letter in dict.fromkeys(told):
                missing = told.count(letter) - found.count(letter) - needed.count(letter)
                needed += letter * max(0, missing)
        tried = {letter for guess, _ in self._state.rows for letter in guess}
        untried = [letter for letter in self.words.letters if letter not in tried]
        named = [("from", "".join(untried)), ("with", needed)]
        parts = [f"{name} {spell(letters, self.spelling)}" for name, letters in named if letters]
        places = " ".join(spell(letter, self.spelling) if letter else OPEN for letter in found)
        return f"{' '.join(parts)}. {places}." if parts else f"{places}."

    def state_key(self) -> str:
        """The words that are still possible, and whether it was found."""
        key = f"{self.task.task_id}#{knowledge_key(self.words, self._state.left)}"
        return f"{key}#{SOLVED}" if self._state.solved else key

    def next_action(self) -> str | None:
        """The guess that leaves the fewest words on average; None once the episode is over."""
        if self._state.over:
            return None
        return spell(self.words.words[best_guess(self.words, self._state.left)], self.spelling)

    def admissible(self) -> Sequence[str]:
        """Legal words; where there are many, a sample that depends on the state alone. Empty once the episode is over."""
        if self._state.over:
            return []
        numbers = self.words.everything
        if len(numbers) > SAMPLE:
            rng = stream("wordle.admissible", self.state_key())
            some = [rng.sample(list(pool), min(SAMPLE // 2, len(pool))) for pool in (self._state.left, numbers)]
            numbers = np.array([*some[0], *some[1]])
        return sorted({spell(self.words.words[number], self.spelling) for number in numbers})
