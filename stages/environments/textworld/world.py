"""The facts of a game in TextWorld's logic, kept in sync with the interpreter by the events that the game reports."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

from textworld.generator.game import Game, GameProgression
from textworld.generator.inform7 import Inform7Game
from textworld.logic import Action, Rule, State

_IDLE_RULES = ("look", "inventory", "examine")
_IDLE_EVENTS = ("looking", "taking inventory", "examining ")
_CACHED = 128
"""Cached states per game; 10 to 20 kB each."""


class World:
    """A loaded game; shared by its states."""

    def __init__(self, game: Game) -> None:
        self.game = game
        self._states: OrderedDict[str, WorldState] = OrderedDict()
        self.inform7 = Inform7Game(game)
        rules = game.kb.rules.values()
        self.rules = [rule for rule in rules if not rule.name.startswith(_IDLE_RULES)]
        self.idle_rules = [rule for rule in rules if rule.name.startswith(_IDLE_RULES)]

    def initial(self) -> WorldState:
        return self.cached(WorldState(self, self.game.world.state.copy()))

    def cached(self, state: WorldState) -> WorldState:
        """The cached state with the same facts, whose actions may be computed already; else `state`."""
        found = self._states.setdefault(state.key, state)
        self._states.move_to_end(state.key)
        if len(self._states) > _CACHED:
            self._states.popitem(last=False)
        return found

    def commands(self, actions: Sequence[Action]) -> list[str]:
        """The commands for `actions`, in the same order, in lower case."""
        return [command.lower() for command in self.inform7.gen_commands_from_actions(actions)]

    def policy(self, history: Sequence[Action]) -> list[str]:
        """See `Planner.policy`."""
        return Planner(self).policy(tuple(history))


class WorldState:
    """The facts at one time; immutable."""

    def __init__(self, world: World, facts: State) -> None:
        self.world = world
        self.facts = facts

    def _applicable(self, rules: Sequence[Rule]) -> tuple[Action, ...]:
        return tuple(self.facts.all_applicable_actions(rules, self.world.game.kb.types.constants_mapping))

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions that would change the facts."""
        return self._applicable(self.world.rules)

    @cached_property
    def commands(self) -> tuple[str, ...]:
        """Commands for `actions`, sorted."""
        return tuple(sorted(set(self.world.commands(self.actions))))

    @cached_property
    def idle_commands(self) -> tuple[str, ...]:
        """Commands that change nothing, sorted."""
        return tuple(sorted(set(self.world.commands(self._applicable(self.world.idle_rules)))))

    @cached_property
    def key(self) -> str:
        """16 hex digits, equal for equal facts."""
        text = "\n".join(sorted(str(fact) for fact in self.facts.facts))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def room(self) -> str:
        """Id of the player's room."""
        return next(fact.arguments[1].name for fact in self.facts.facts if fact.name == "at" and fact.arguments[0].name == "P")

    def after(self, action: Action) -> WorldState:
        return self.world.cached(WorldState(self.world, self.facts.apply_on_copy(action)))

    def follow(self, events: Sequence[str]) -> tuple[WorldState, tuple[Action, ...]] | None:
        """The state after `events`, and their actions (none for looking); None if an event is not in the rules."""
        state, done = self, []
        for event in events:
            if event.startswith(_IDLE_EVENTS):
                continue
            action = self.world.inform7.detect_action(event, state.actions)
            if action is None:
                return None
            done.append(action)
            state = state.after(action)
        return state, tuple(done)


class Progress(GameProgression):
    """TextWorld's progress, without its list of valid actions after each action: no plan needs that, and it costs most."""

    def update(self, action: Action) -> None:
        self.state.apply(action)
        for quest in self.quest_progressions:
            quest.update(action, self.state)


class Planner:
    """TextWorld's own winning policy along a history of actions. Tracking an action costs about as much as a step, so it is done
    on demand, and only for new actions."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._seen: tuple[Action, ...] = ()
        self._progress = Progress(world.game)

    def policy(self, history: tuple[Action, ...]) -> list[str]:
        """Commands that win from the state after `history`; empty if the game is won or can't be won."""
        known = len(self._seen)
        if len(history) < known or any(a is not b for a, b in zip(self._seen, history, strict=False)):
            self._progress, known = Progress(self.world.game), 0
        for action in history[known:]:
            self._progress.update(action)
        self._seen = history
        return self.world.commands(self._progress.winning_policy or ())
