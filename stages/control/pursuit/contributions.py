"""What each of a team of predators contributes to the return, by removing it from the team.

`python -m stages.control.pursuit.contributions --settings FILE --result FILE` evaluates one team: a run of lane control with
`environment: pursuit`. After the predator-prey study of Heuillet et al., arXiv 2110.01307, with scripted predators.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import rankdata

from stages.control.exact.shapley import shapley
from stages.control.exact.shapley_sampling import Array, banzhaf, by_coalitions, by_permutations
from stages.control.one_run import one_run
from stages.control.pursuit.settings import Pursuit
from stages.control.pursuit.world import team_returns
from stages.runtime.command import command

CLEAR = 3.0
AGAIN = 2000
"""Episodes of the full and the empty team that the sum of sampled values is compared with."""


def players_of(settings: Pursuit) -> list[int]:
    return list(range(len(settings.speeds))) if settings.players is None else settings.players


def returns_of(settings: Pursuit, coalition: int, episodes: int, *key: object) -> Array:
    """Returns [E] of a coalition of the players, given as bits in their order, with the predators that are none. Without common
    random numbers the draws depend on the coalition too."""
    players = players_of(settings)
    team = sum(1 << predator for predator in range(len(settings.speeds)) if predator not in players)
    team |= sum(1 << predator for place, predator in enumerate(players) if coalition >> place & 1)
    return team_returns(settings, team, episodes, *key, *(() if settings.common_random_numbers else (coalition,)))


def contributions(settings: Pursuit) -> tuple[Array, Array, int]:
    """Values [n], their standard errors [n], and how many coalitions were played: `episodes` times (exact, cached) or once.
    Errors of cached coalitions are those of sampling coalitions alone."""
    players = len(players_of(settings))
    if settings.estimator == "exact":
        returns = [returns_of(settings, coalition, settings.episodes, "exact") for coalition in range(1 << players)]
        found = (shapley if settings.value == "shapley" else banzhaf)(np.stack(returns))
        spread = found.std(1, ddof=1) if settings.episodes > 1 else np.full(players, np.nan)
        return found.mean(1), spread / np.sqrt(settings.episodes), len(returns)

    cached = settings.cache_coalitions

    def game(coalition: int, sample: int) -> float:
        if cached:
            return float(returns_of(settings, coalition, settings.episodes, "exact").mean())
        return float(returns_of(settings, coalition, 1, "sample", sample)[0])

    key = (settings.seed, "pursuit")
    if settings.estimator == "permutation":
        estimate = by_permutations(game, players, settings.samples, key, settings.antithetic, cached)
    else:
        estimate = by_coalitions(game, players, settings.samples, key, cached)
    return estimate.values, estimate.errors, estimate.evaluations


def rank_correlation(one: Array, other: Array) -> float:
    """Spearman's; 0 where one of both is constant."""
    ranks = [rankdata(values) - (len(values) + 1) / 2 for values in (one, other)]
    lengths = [float(np.sqrt(rank @ rank)) for rank in ranks]
    return float(ranks[0] @ ranks[1]) / (lengths[0] * lengths[1]) if all(lengths) else 0.0


def run(settings: Pursuit) -> dict[str, float]:
    """player_<i>: the predator's contribution, in units of return per episode; rank_correlation: of contributions and speeds;
    team: return of the full team minus that of the empty one; efficiency_gap: the contributions' sum minus that; standard_error:
    the contributions' mean one; evaluations: coalitions played; switched_off: absolute contribution of the predator that is
    switched off (0 without one). With details also error_<i> and, where the team's gain is more than CLEAR standard errors,
    share_<i>."""
    values, errors, evaluations = contributions(settings)
    players = players_of(settings)
    exact = settings.estimator == "exact" or settings.cache_coalitions
    episodes, key = (settings.episodes, "exact") if exact else (AGAIN, "again")
    whole, none = (returns_of(settings, coalition, episodes, key) for coalition in ((1 << len(players)) - 1, 0))
    gain = float(whole.mean() - none.mean())
    off = settings.switched_off
    return {
        **{f"player_{player}": float(value) for player, value in zip(players, values, strict=True)},
        "rank_correlation": rank_correlation(values, np.array(settings.speeds)[players]),
        "team": gain,
        "efficiency_gap": float(values.sum() - gain),
        "standard_error": float(errors.mean()),
        "evaluations": float(evaluations),
        "switched_off": 0.0 if off is None or off not in players else abs(float(values[players.index(off)])),
        **(details(players, values, errors, whole - none) if settings.details else {}),
    }


def details(players: list[int], values: Array, errors: Array, gains: Array) -> dict[str, float]:
    """error_<i>, and share_<i> of the mean of `gains` [E] where that is more than CLEAR standard errors; of less, a share would
    be noise over noise."""
    gain = float(gains.mean())
    error = float(gains.std(ddof=1) / np.sqrt(len(gains))) if len(gains) > 1 else np.inf
    found = {f"error_{player}": float(one) for player, one in zip(players, errors, strict=True)}
    if abs(gain) > CLEAR * error:
        found |= {f"share_{player}": float(value) / gain for player, value in zip(players, values, strict=True)}
    return found


@command
def main() -> int:
    return one_run("control", __doc__, Pursuit, run)


if __name__ == "__main__":
    raise SystemExit(main())
