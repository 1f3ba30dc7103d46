"""Policy-space response oracles of risk-averse players: drivers who meet at a merge.

`python -m stages.control.games.psro --settings FILE --result FILE` learns once: a run of lane control with `environment:
driving_game`. After Slumbers et al., arXiv 2205.15434: each player keeps a population of policies; the payoffs of all pairs make
a meta-game, whose risk-averse equilibrium gives both mixtures; a new policy is learnt against the co-player's mixture with the
return R - c (R - mean R)^2. The paper's population method was not available in detail, and these parts are not confirmed. The
oracle is a table of values, and the world is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stages.control.games.driving import (
    KEEP,
    KNOWN,
    Array,
    Driver,
    Ints,
    Values,
    aggressive,
    by_table,
    drive,
    erratic,
    mixture,
)
from stages.control.games.risk_averse import exploitability, fictitious_play, selected, utility
from stages.control.games.settings import DrivingGame
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.seeding import key64

MEAN_RATE = 0.05
"""Share of a batch's mean return in the running mean that the oracle's penalty is around."""
FORGETTING = 0.02
"""Share of the past that a new policy's table forgets with every update, in which its own driving changes."""


@dataclass
class Meta:
    """The meta-game of two populations, of sizes m and n."""

    policies: tuple[list[Ints], list[Ints]]
    means: tuple[Array, Array]
    """Of both players' returns, [m, n]."""
    spreads: tuple[Array, Array]
    """Variances of returns within pairs, each with the player's own policies first: [m, n] and [n, m]."""
    mixtures: list[Array]


def deviants(settings: DrivingGame) -> Driver:
    return {"random": erratic, "aggressive": aggressive}[settings.deviants]


def seated(player: int, own: Driver, other: Driver) -> tuple[Driver, Driver]:
    """Both drivers in the order of the players."""
    return (own, other) if player == 0 else (other, own)


def facing(policies: list[Ints], weights: Array, settings: DrivingGame) -> Driver:
    """A co-player of one batch of episodes: drawn from its mixture, or deviating."""
    drivers = [*map(by_table, policies), deviants(settings)]
    return mixture(drivers, np.append((1.0 - settings.deviating) * weights, settings.deviating))


def respond(player: int, policies: list[Ints], weights: Array, settings: DrivingGame, rng: np.random.Generator) -> Ints:
    """A new policy against the co-player's mixture: greedy for a table that is learnt from its own episodes."""
    values, running = Values(), None
    coefficient = settings.gamma if settings.variance_coef is None else settings.variance_coef
    for _ in range(settings.oracle_updates):
        drivers = seated(player, values.exploring(settings.exploration), facing(policies, weights, settings))
        episodes = drive(drivers, settings.oracle_episodes, rng)
        returns = episodes.returns[:, player]
        running = returns.mean() if running is None else running + MEAN_RATE * (returns.mean() - running)
        values.learn(episodes, player, penalty(returns, running, coefficient), FORGETTING)
    return values.greedy()


def penalty(returns: Array, mean: float, coefficient: float) -> Array:
    """What is added to each episode's return: -c (R - mean)^2."""
    return -coefficient * (returns - mean) ** 2


def meta_game(policies: tuple[list[Ints], list[Ints]], settings: DrivingGame) -> Meta:
    """Returns of all pairs, each on its own draws, whatever else is in the populations; and the risk-averse mixtures."""
    shape = (len(policies[0]), len(policies[1]))
    means, spreads = np.zeros((2, *shape)), np.zeros((2, *shape))
    for row, column in np.ndindex(*shape):
        rng = np.random.default_rng(key64(settings.seed, "psro", "meta", row, column))
        other = [facing([policies[1][column]], np.ones(1), settings), facing([policies[0][row]], np.ones(1), settings)]
        for player, own in enumerate((policies[0][row], policies[1][column])):
            drivers = seated(player, by_table(own), other[player])
            returns = drive(drivers, settings.meta_episodes, rng).returns[:, player]
            means[player, row, column], spreads[player, row, column] = returns.mean(), returns.var(ddof=1)
    tables, noise = (means[0], means[1]), (spreads[0], spreads[1].T)
    mixtures = fictitious_play(tables, [np.full(size, 1.0 / size) for size in shape], settings, settings.iterations, noise)
    return Meta(policies, tables, noise, mixtures)


def gains(before: Meta, after: Meta, settings: DrivingGame) -> list[float]:
    """Each player's: by how much its last policy has more utility than its old mixture, against the co-player's old mixture, as a
    share of the mixture's."""
    found = []
    for player in range(2):
        table = after.means[player] if player == 0 else after.means[player].T
        old, other = before.mixtures[player], before.mixtures[1 - player]
        table, noise = table[:, : len(other)], after.spreads[player][:, : len(other)]
        newest = np.eye(len(table))[-1]
        was = utility(np.append(old, 0.0), table, other, settings, noise)
        found.append((utility(newest, table, other, settings, noise) - was) / max(abs(was), 1e-12))
    return found


def learn(settings: DrivingGame) -> tuple[Meta, int]:
    """The last meta-game, and how many rounds were played. Both players begin with the policy that keeps its speed."""
    rng = np.random.default_rng(key64(settings.seed, "psro", "oracle"))
    meta = meta_game(([np.full(KNOWN, KEEP)], [np.full(KNOWN, KEEP)]), settings)
    for number in range(1, settings.rounds + 1):
        new = [respond(player, meta.policies[1 - player], meta.mixtures[1 - player], settings, rng) for player in range(2)]
        before, meta = meta, meta_game(([*meta.policies[0], new[0]], [*meta.policies[1], new[1]]), settings)
        if max(gains(before, meta, settings)) < settings.least_gain:
            return meta, number
    return meta, settings.rounds


def driver_of(meta: Meta, player: int, settings: DrivingGame) -> Driver:
    """Who drives for a player in one batch of the evaluation."""
    policies = meta.policies[player]
    if settings.select == "none":
        return mixture(list(map(by_table, policies)), meta.mixtures[player])
    table = meta.means[player] if player == 0 else meta.means[player].T
    gamma = settings.gamma if settings.select == "mean_variance" else 0.0
    return by_table(policies[selected(table, meta.mixtures[1 - player], gamma, meta.spreads[player])])


def run(settings: DrivingGame) -> dict[str, float]:
    """Means over both players. return, spread, crashes: mean and standard deviation of a player's return and share of episodes
    with a crash, against the co-player's mixture and its deviations; return_unseen, spread_unseen, crashes_unseen: the same
    against drivers who always accelerate; exploitability: of the mixtures in the meta-game; rounds: played; policies: of both
    players that their mixtures use (with a probability above 1 %)."""
    meta, rounds = learn(settings)
    figures: dict[str, list[float]] = {}
    for player in range(2):
        others = {"": facing(meta.policies[1 - player], meta.mixtures[1 - player], settings), "_unseen": aggressive}
        for name, other in others.items():
            rng = np.random.default_rng(key64(settings.seed, "psro", "evaluation", player, name))
            drivers = seated(player, driver_of(meta, player, settings), other)
            episodes = drive(drivers, settings.evaluate_episodes, rng)
            returns = episodes.returns[:, player]
            for figure, value in (("return", returns.mean()), ("spread", returns.std()), ("crashes", episodes.crash.mean())):
                figures.setdefault(figure + name, []).append(float(value))
    return {
        **{name: float(np.mean(values)) for name, values in figures.items()},
        "exploitability": exploitability(meta.means, meta.mixtures, settings, meta.spreads),
        "rounds": float(rounds),
        "policies": float(sum((weights > 0.01).sum() for weights in meta.mixtures)),
    }


@command
def main() -> int:
    return one_run("control", __doc__, DrivingGame, run)


if __name__ == "__main__":
    raise SystemExit(main())
