"""Masks of turns: of a behaviour formula, by its monitor, and of grammars, by llguidance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stages.agent.turn_vocabulary import TurnVocabulary
from stages.constraints.formula import StateInfo
from stages.constraints.grammar import GrammarRules
from stages.constraints.monitor import Position
from stages.constraints.settings import Constraint
from stages.constraints.transcript import Transcripts


@dataclass(frozen=True)
class Option:
    """Tokens that a choice may write: those that begin a state, an entry of its closed list, or the turn's end."""

    tokens: tuple[int, ...]
    state: str = ""
    value: bool = False


class SpecTexts:
    """What the masks of one specification have in common."""

    def __init__(self, rules: Transcripts, vocabulary: TurnVocabulary) -> None:
        self.rules, self.monitor, self.vocabulary = rules, rules.monitor, vocabulary
        self.states = rules.spec.states
        own = [state for state in self.states.values() if not state.env]
        self.markers = {state.name: state.text for state in own if not state.turn}
        self.values = {state.name: [vocabulary.within(f" {value}") for value in state.values] for state in own}
        self.costs: dict[str, float] = {state.name: len(self.tokens(state.name)) + self.content(state.name) for state in own}
        self._ends = vocabulary.special.copy()
        self._ends[vocabulary.end] = False
        self._inside = {marker: vocabulary.containing(marker) for marker in self.markers.values()}
        self._longest = max(map(len, self.markers.values()), default=0)
        self._first = {marker[0] for marker in self.markers.values()}
        self._usual: dict[tuple[tuple[str, ...], bool], np.ndarray] = {}

    def tokens(self, state: str) -> tuple[int, ...]:
        """What begins a state within a turn."""
        return self.vocabulary.within("\n" + self.states[state].text)

    def content(self, state: str) -> int:
        """Tokens that the longest entry of its closed list takes; 0 without one."""
        return max((len(tokens) for tokens in self.values[state]), default=0)

    def completing(self, content: str, marker: str, exactly: bool = False) -> np.ndarray:
        """Which tokens complete `marker` after `content`, [V] bool; exactly: those that go on after it."""
        found = np.zeros(self.vocabulary.size, dtype=bool) if exactly else self._inside[marker].copy()
        for length in range(len(marker)):
            if content.endswith(marker[:length]):
                rest = marker[length:]
                starting = self.vocabulary.continuing(rest)
                found |= starting & np.array([text != rest for text in self.vocabulary.texts]) if exactly else starting
        return found | self._inside[marker] if exactly else found

    def free(self, content: str, following: Sequence[str], end: bool) -> np.ndarray:
        """Which tokens may follow within free content, [V] bool: none that completes the text of a state that may not follow;
        end: whether the turn may end."""
        tail = content[-self._longest :]
        usual = not self._first.intersection(tail)  # no text has begun: the same mask in all contents
        key = tuple(following), end
        if usual and key in self._usual:
            return self._usual[key]
        banned = self._ends.copy()
        banned[self.vocabulary.end] = not end
        for name, marker in self.markers.items():
            if name not in following:
                banned |= self.completing(tail, marker)
            elif self.values[name]:
                banned |= self.completing(tail, marker, exactly=True)
        if usual:
            self._usual[key] = ~banned
        return ~banned


class SpecMask:
    """A `TokenMask` of one turn that begins, or goes on, at `position`.

    room: tokens that the turn may have; turns: those the environment has left, this one included: each command is one. state,
    content, sent: of a turn that goes on within a state, after so many commands. one_choice: only the next choice is masked, and
    what follows is free.
    """

    def __init__(
        self,
        texts: SpecTexts,
        settings: Constraint,
        position: Position,
        room: int,
        turns: float = math.inf,
        *,
        state: StateInfo | None = None,
        content: str = "",
        sent: int = 0,
        one_choice: bool = False,
    ) -> None:
        self.texts, self.settings, self.renormalise = texts, settings, settings.renormalise
        self.position, self.state, self.content = position, state, content
        self.left, self.one_choice, self.sent = room, one_choice, sent
        shortest = settings.budget_exit == "shortest_path"
        self.turns = turns if shortest else math.inf
        self.shortest = shortest
        self.count = 0
        """Tokens of the state's content."""
        self.choice: list[Option] | None = None
        self.taken = 0
        """Tokens of the choice so far."""
        self.finished = False
        self._forget()
        if state is None:
            monitor, vocabulary = texts.monitor, texts.vocabulary
            found = self._affordable(monitor.choices(position), opening=True)
            self.choice = [Option(vocabulary.opening(texts.states[name].text), name) for name in found]
            self.finished = not found  # the formula is fulfilled
        elif one_choice:
            self.choice = self._exits()
        else:
            self._settle()

    def _forget(self) -> None:
        """Begin to remember what follows from a new position."""
        self._needs: dict[tuple[str, bool], tuple[float, float]] = {}
        self._ending: bool | None = None
        self._names: list[str] | None = None

    # ---- what may follow ----------------------------------------------------------------------------------------------------

    def _need(self, name: str, opening: bool) -> tuple[float, float]:
        """Turns, and tokens of this turn, that a state needs up to where the episode, and the turn, may end."""
        if (name, opening) not in self._needs:
            monitor, texts = self.texts.monitor, self.texts
            after = monitor.step(self.position, name)
            begins = len(texts.vocabulary.opening(texts.states[name].text)) if opening else len(texts.tokens(name))
            tokens = begins + texts.content(name) + monitor.cost_to_pause(after, texts.costs) + 1
            self._needs[name, opening] = monitor.turns_to_end(after) + 1, tokens
        turns, tokens = self._needs[name, opening]
        return turns + self._further(name), tokens

    def _further(self, name: str) -> int:
        """1 for a state that sends a command beyond the turn's first, which the turn itself counts for; else 0."""
        return int(self.sent > 0 and bool(self.texts.states[name].send))

    def _affordable(self, names: Sequence[str], *, opening: bool = False) -> list[str]:
        """The states after which the end can be reached in time; if there is none, those that come closest to it."""
        if not self.shortest or not names:
            return list(names)
        needs = {name: self._need(name, opening) for name in names}
        lacking = {name: (max(turns - self.turns, 0.0), max(tokens - self.left, 0.0)) for name, (turns, tokens) in needs.items()}
        least = min(lacking.values())
        return [name for name in names if lacking[name] == least]

    def _may_end(self) -> bool:
        """Whether the turn may end here, and the episode's end is then still within reach."""
        if self._ending is None:
            self._ending = self._find_ending()
        return self._ending

    def _find_ending(self) -> bool:
        rules, monitor = self.texts.rules, self.texts.monitor
        if not rules.may_end(self.position):
            return False
        if monitor.fulfilled(self.position) or not self.shortest:
            return True
        within = self._following()
        ending = monitor.turns_to_end(rules.answered(self.position)) + 2
        return ending <= self.turns or not within or all(self._need(name, False)[0] > self.turns for name in within)

    def _following(self) -> list[str]:
        """The states that the formula admits next within the turn."""
        if self._names is None:
            choices = self.texts.monitor.choices(self.position)
            self._names = [name for name in choices if not self.texts.states[name].turn]
        return self._names

    def _within(self) -> list[str]:
        """The states that may follow within the turn."""
        found = self._following()
        if not self.shortest:
            return found
        fitting = [name for name in found if self._need(name, False)[0] <= self.turns and self._need(name, False)[1] <= self.left]
        return fitting or ([] if self._may_end() else self._affordable(found))

    def _exits(self) -> list[Option]:
        end = [Option((self.texts.vocabulary.end,))] if self._may_end() else []
        return [Option(self.texts.tokens(name), name) for name in self._within()] + end

    def _settle(self) -> None:
        """Within free content: force a choice where the state's tokens are used up, or those of the turn nearly are."""
        if self.finished or self.choice is not None:
            return
        if self.count >= self.settings.max_state_tokens or (self.shortest and self.left <= self.least):
            self.choice, self.taken = self._exits() or None, 0

    @property
    def least(self) -> float:
        """Tokens that the turn needs at least to end, from within a state's content."""
        return min((self._cost(option) for option in self._exits()), default=math.inf)

    def _cost(self, option: Option) -> float:
        return self._need(option.state, False)[1] if option.state else 1.0

    # ---- the protocol -------------------------------------------------------------------------------------------------------

    def allowed(self) -> np.ndarray | None:
        if self.finished:
            return None
        vocabulary = self.texts.vocabulary
        if self.choice is not None:
            result = np.zeros(vocabulary.size, dtype=bool)
            for option in self.choice:
                if len(option.tokens) > self.taken:
                    result[option.tokens[self.taken]] = True
                else:  # an entry that others continue may also end here
                    for follower in self._exits():
                        result[follower.tokens[0]] = True
            return result
        return self.texts.free(self.content, self._within(), self._may_end())

    def append(self, token: int) -> None:
        if self.finished:
            return
        self.left -= 1
        if self.choice is not None:
            self._choose(token)
        elif token == self.texts.vocabulary.end:
            self.finished = True
        else:
            self.count += 1
            self.content += self.texts.vocabulary.texts[token]
            self._find_marker()
        self._settle()

    def _find_marker(self) -> None:
        """Begin the state whose marker the content now contains."""
        places = [(self.content.find(self.texts.markers[name]), name) for name in self._following()]
        found = min(((place, name) for place, name in places if place >= 0), default=None)
        if found is not None:
            self._begin(found[1], self.content[found[0] + len(self.texts.markers[found[1]]) :])

    def _choose(self, token: int) -> None:
        assert self.choice is not None
        matching = [one for one in self.choice if len(one.tokens) > self.taken and one.tokens[self.taken] == token]
        if not matching:  # an entry ended here, and this token begins what follows it
            self.choice, self.taken = self._exits(), 0
            matching = [one for one in self.choice if one.tokens[0] == token]
        self.choice, self.taken = matching, self.taken + 1
        if len(matching) > 1 or len(matching[0].tokens) > self.taken:
            return
        option, self.choice, self.taken = matching[0], None, 0
        if option.value:
            self.choice = self._exits()
        elif option.state:
            self._begin(option.state, "")
        else:
            self.finished = True

    def _begin(self, name: str, content: str) -> None:
        self.turns -= self._further(name)
        self.sent += bool(self.texts.states[name].send)
        self.position = self.texts.monitor.step(self.position, name)
        self._forget()
        self.state, self.content, self.count = self.texts.states[name], content, 0
        if self.one_choice and not self.texts.values[name]:
            self.finished = True
        elif self.texts.values[name]:
            self.choice, self.taken = [Option(tokens, name, value=True) for tokens in self.texts.values[name]], 0


class GrammarMask:
    """A `TokenMask` of a turn that matches a grammar. matcher: a fresh `llguidance.LLMatcher` over the vocabulary's tokens."""

    def __init__(self, matcher: Any, settings: Constraint, vocabulary: TurnVocabulary) -> None:
        self.matcher, self.renormalise, self.vocabulary = matcher, settings.renormalise, vocabulary

    def allowed(self) -> np.ndarray | None:
        if self.matcher.is_stopped():  # all of the grammar is written
            only = np.zeros(self.vocabulary.size, dtype=bool)
            only[self.vocabulary.end] = True
            return only
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.vocabulary.size].astype(bool)

    def append(self, token: int) -> None:
        if not self.matcher.is_stopped() and not self.matcher.consume_token(token):
            raise RuntimeError(f"llguidance refuses token {token}, which its mask allowed: {self.matcher.get_error()}")


def token_matcher(rules: GrammarRules, vocabulary: TurnVocabulary) -> Any:
    """A matcher over the vocabulary, to copy for each turn."""
    import llguidance.hf

    tokenizer = llguidance.hf.from_tokenizer(vocabulary.chat.tokenizer, n_vocab=vocabulary.size, eos_token=vocabulary.end)
    return rules.matcher(tokenizer)
