"""How far sampled contributions are from known Shapley values, at equal numbers of evaluations.

`python -m stages.control.exact.estimators --settings FILE --result FILE` compares once: a run of lane control with `environment:
coalition_game`. After the estimators of Heuillet et al., arXiv 2110.01307; the games are ours.
"""

from __future__ import annotations

import numpy as np

from stages.control.exact.settings import CoalitionGame
from stages.control.exact.shapley import shapley
from stages.control.exact.shapley_sampling import Array, by_coalitions, by_permutations
from stages.control.one_run import one_run
from stages.runtime.command import command
from stages.seeding import key64

INTERACTION = 0.1
"""Standard deviation of the random part of nearly additive games, whose weights are between 0 and 1."""


def table(settings: CoalitionGame) -> Array:
    """Values of all coalitions, [2^n], the empty one's 0."""
    rng, count = np.random.default_rng(key64(settings.seed, "coalition_game")), 1 << settings.players
    members = np.arange(count)[:, None] >> np.arange(settings.players) & 1
    if settings.game == "unanimity":
        return members.all(1).astype(float)
    if settings.game == "gloves":
        return (members[:, :-1].any(1) & (members[:, -1] == 1)).astype(float)
    found = rng.standard_normal(count)
    if settings.game == "nearly_additive":
        found = members @ rng.random(settings.players) + INTERACTION * found
    found[0] = 0.0
    return found


def estimates(settings: CoalitionGame, values: Array) -> tuple[Array, float]:
    """Estimates [repeats, n], and evaluations of coalitions per estimate. Noise is that of the coalition in the sample."""
    found, evaluations = [], 0
    for repeat in range(settings.repeats):

        def game(coalition: int, sample: int, repeat: int = repeat) -> float:
            if not settings.noise:
                return float(values[coalition])
            rng = np.random.default_rng(key64(settings.seed, "coalition_game", "noise", repeat, sample, coalition))
            return float(values[coalition] + settings.noise * rng.standard_normal())

        key = (settings.seed, "coalition_game", repeat)
        if settings.estimator == "permutation":
            estimate = by_permutations(game, settings.players, settings.samples, key, settings.antithetic)
        else:
            estimate = by_coalitions(game, settings.players, settings.samples, key)
        found.append(estimate.values)
        evaluations += estimate.evaluations
    return np.array(found), evaluations / settings.repeats


def run(settings: CoalitionGame) -> dict[str, float]:
    """Means over players, against Shapley values. squared_error: of an estimate; variance: of estimates; squared_bias: what is
    left of the squared error, which more samples do not reduce; evaluations: per estimate; efficiency_gap: mean absolute
    difference of the estimates' sum and what all players gain."""
    values = table(settings)
    found, evaluations = estimates(settings, values)
    error = float(((found - shapley(values)) ** 2).mean())
    variance = float(found.var(0, ddof=1).mean())
    return {
        "squared_error": error,
        "variance": variance,
        "squared_bias": error - variance,
        "efficiency_gap": float(np.abs(found.sum(1) - (values[-1] - values[0])).mean()),
        "evaluations": evaluations,
    }


@command
def main() -> int:
    return one_run("control", __doc__, CoalitionGame, run)


if __name__ == "__main__":
    raise SystemExit(main())
