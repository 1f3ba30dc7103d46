"""Goofspiel: both players bid a card for each prize, and the higher bid wins it. Learnt by Q-learning, solved exactly.

`python -m stages.control.games.goofspiel --settings FILE --result FILE` learns once: a run of lane control with
`environment: markov_game`. Minimax-Q after Littman (1994): a next state counts as the value of its matrix game. Independent
Q-learners have tables of their own actions only.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stages.control.games.markov import Array, evaluate, exploitability, matrix_game, maximin, order, solve
from stages.control.games.settings import Goofspiel
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.seeding import key64

Hand = tuple[int, ...]
State = tuple[Hand, Hand, Hand, int]
"""Cards of the row and of the column player, prizes that are left, and the one that is bid for."""


class Game:
    """Cards and prizes 1 to n; with `handicap`, as many of the row player's highest cards are worth 0."""

    def __init__(self, cards: int, handicap: int = 0) -> None:
        self.prizes: Hand = tuple(range(1, cards + 1))
        self.hand: Hand = (*(0,) * handicap, *self.prizes[: cards - handicap])

    def _revealed(self, rows: Hand, columns: Hand, prizes: Hand) -> Sequence[tuple[float, State]]:
        share = 1.0 / max(1, len(prizes))
        return [(share, (rows, columns, _without(prizes, place), prize)) for place, prize in enumerate(prizes)]

    def start(self) -> Sequence[tuple[float, State]]:
        return self._revealed(self.hand, self.prizes, self.prizes)

    def actions(self, state: State) -> tuple[int, int]:
        return len(state[0]), len(state[1])

    def reward(self, state: State) -> Array:
        return state[3] * np.sign(np.subtract.outer(state[0], state[1])).astype(float)

    def following(self, state: State, row: int, column: int) -> Sequence[tuple[float, State]]:
        return self._revealed(_without(state[0], row), _without(state[1], column), state[2])


def _without(hand: Hand, place: int) -> Hand:
    return hand[:place] + hand[place + 1 :]


class MinimaxQ:
    """Tables of Q over both players' actions, explored evenly."""

    def __init__(self, game: Game, settings: Goofspiel) -> None:
        self.q = {state: np.zeros(game.actions(state)) for state in order(game)}
        self.values = dict.fromkeys(self.q, 0.0)

    def choose(self, state: State, rng: np.random.Generator) -> tuple[int, int]:
        rows, columns = self.q[state].shape
        return int(rng.integers(rows)), int(rng.integers(columns))

    def update(self, state: State, bids: tuple[int, int], reward: float, after: State | None, rate: float) -> None:
        ahead = self.values[after] if after else 0.0
        self.q[state][bids] += rate * (reward + ahead - self.q[state][bids])
        self.values[state] = maximin(self.q[state])[0]

    def strategies(self) -> tuple[dict[State, Array], dict[State, Array]]:
        """Of both players: equilibria of Q."""
        solved = {state: matrix_game(table) for state, table in self.q.items()}
        return {state: one[1] for state, one in solved.items()}, {state: one[2] for state, one in solved.items()}


class IndependentQ:
    """Each player's table of Q over its own actions, explored with probability `exploration`."""

    def __init__(self, game: Game, settings: Goofspiel) -> None:
        self.exploration = settings.exploration
        self.q = {state: [np.zeros(size) for size in game.actions(state)] for state in order(game)}

    @property
    def values(self) -> dict[State, float]:
        """Of the row player's best actions."""
        return {state: float(tables[0].max()) for state, tables in self.q.items()}

    def choose(self, state: State, rng: np.random.Generator) -> tuple[int, int]:
        explores, drawn = rng.random(2) < self.exploration, rng.random(2)
        bids = [
            int(chance * len(table)) if explored else int(table.argmax())
            for table, explored, chance in zip(self.q[state], explores, drawn, strict=True)
        ]
        return bids[0], bids[1]

    def update(self, state: State, bids: tuple[int, int], reward: float, after: State | None, rate: float) -> None:
        for player, sign in ((0, 1.0), (1, -1.0)):
            ahead = self.q[after][player].max() if after else 0.0
            table = self.q[state][player]
            table[bids[player]] += rate * (sign * reward + ahead - table[bids[player]])

    def strategies(self) -> tuple[dict[State, Array], dict[State, Array]]:
        """Of both players: greedy actions."""
        greedy = {state: [np.eye(len(table))[table.argmax()] for table in tables] for state, tables in self.q.items()}
        return {state: one[0] for state, one in greedy.items()}, {state: one[1] for state, one in greedy.items()}


LEARNERS = {"minimax_q": MinimaxQ, "independent_q": IndependentQ}


def learn(game: Game, settings: Goofspiel) -> MinimaxQ | IndependentQ:
    """Sweep over all states in random order, playing one step in each, at rates that fall with the sweeps."""
    learner = LEARNERS[settings.learner](game, settings)
    rng = np.random.default_rng(key64(settings.seed, "goofspiel", "play"))
    states = list(learner.q)
    for sweep in range(settings.sweeps):
        rate = (1.0 + sweep) ** -settings.rate_power
        for place in rng.permutation(len(states)):
            bids = learner.choose(states[place], rng)
            after = game.following(states[place], *bids)
            drawn = after[rng.integers(len(after))][1] if after else None
            learner.update(states[place], bids, float(game.reward(states[place])[bids]), drawn, rate)
    return learner


def run(settings: Goofspiel) -> dict[str, float]:
    """Learn once. exploitability: what best responses to both players' strategies gain together, exact, 0 at an equilibrium;
    value: of the game to the row player, exact; return: of the learnt strategies against each other; value_error: mean absolute
    error of the learnt values of all states."""
    game = Game(settings.cards, settings.handicap)
    learner, exact = learn(game, settings), solve(game)
    rows, columns = learner.strategies()
    learnt = learner.values
    return {
        "exploitability": exploitability(game, rows, columns),
        "value": sum(chance * exact.values[state] for chance, state in game.start()),
        "return": evaluate(game, lambda state, table: float(rows[state] @ table @ columns[state])),
        "value_error": float(np.mean([abs(learnt[state] - value) for state, value in exact.values.items()])),
    }


@command
def main() -> int:
    return one_run("control", __doc__, Goofspiel, run)


if __name__ == "__main__":
    raise SystemExit(main())
