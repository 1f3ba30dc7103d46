"""Two players of a matrix game learn by fictitious play, from many random beliefs about each other.

`python -m stages.control.games.matrix_games --settings FILE --result FILE` plays once: a run of lane control with
`environment: matrix_game`.
"""

from __future__ import annotations

import numpy as np

from stages.control.games.risk_averse import Array, exploitability, fictitious_play
from stages.control.games.settings import MatrixGame
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.seeding import key64

DEVIATION = 0.1
"""Probability with which a co-player deviates to a uniformly drawn action, in the evaluation."""


def tables(settings: MatrixGame) -> list[Array]:
    """Payoffs [m, n] of both players, of standard deviation 1 with `unit_payoffs`."""
    found = [np.array(matrix, dtype=float) for matrix in settings.table]
    if settings.unit_payoffs:
        found = [matrix / spread if (spread := matrix.std()) else matrix for matrix in found]
    return found


def safe_actions(payoffs: list[Array]) -> list[int]:
    """Each player's action whose payoff varies least over the co-player's actions; ties: the first."""
    return [int(payoffs[0].var(1).argmin()), int(payoffs[1].var(0).argmin())]


def with_deviations(strategy: Array) -> Array:
    return (1 - DEVIATION) * strategy + DEVIATION / len(strategy)


def evaluate(payoffs: list[Array], strategies: list[Array]) -> tuple[float, float]:
    """Mean and standard deviation of a player's payoff, averaged over both, when the co-player deviates."""
    found = []
    for player, table in enumerate(payoffs):
        joint = [with_deviations(one) if number != player else one for number, one in enumerate(strategies)]
        weights = np.outer(*joint)
        mean = (weights * table).sum()
        found.append((mean, np.sqrt(max((weights * table**2).sum() - mean**2, 0.0))))
    mean, spread = np.mean(found, axis=0)
    return float(mean), float(spread)


def run(settings: MatrixGame) -> dict[str, float]:
    """Means over the starts. payoff, spread: of a player if co-players deviate with probability DEVIATION, in units of the
    table; safe: share of starts after which both players mostly take the action of the smallest variance; exploitability: see its
    function; first_action: probability of the row player's first action."""
    rng = np.random.default_rng(key64(settings.seed, "matrix_game", "beliefs"))
    payoffs, rows = tables(settings), []
    table, safe = [np.array(matrix, dtype=float) for matrix in settings.table], safe_actions(payoffs)
    for _ in range(settings.starts):
        beliefs = [rng.dirichlet(np.ones(size)) for size in payoffs[0].shape]
        strategies = fictitious_play(payoffs, beliefs, settings, settings.iterations)
        mean, spread = evaluate(table, strategies)
        both = all(strategy[action] > 0.5 for strategy, action in zip(strategies, safe, strict=True))
        rows.append((mean, spread, float(both), exploitability(payoffs, strategies, settings), strategies[0][0]))
    names = ("payoff", "spread", "safe", "exploitability", "first_action")
    return dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))


@command
def main() -> int:
    return one_run("control", __doc__, MatrixGame, run)


if __name__ == "__main__":
    raise SystemExit(main())
