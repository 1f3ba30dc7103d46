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

AGAIN = 2000
"""Episodes of the full and the empty team that the sum of sampled values is compared with."""


def contributions(settings: Pursuit) -> tuple[Array, Array, int]:
    """Values [n], their standard errors [n], and how many coalitions were played: `episodes` times (exact) or once."""
    players = len(settings.speeds)
    if settings.estimator == "exact":
        returns = [team_returns(settings, coalition, settings.episodes, "exact") for coalition in range(1 << players)]
        found = (shapley if settings.value == "shapley" else banzhaf)(np.stack(returns))
        spread = found.std(1, ddof=1) if settings.episodes > 1 else np.full(players, np.nan)
        return found.mean(1), spread / np.sqrt(settings.episodes), len(returns)

    def game(coalition: int, sample: int) -> float:
        return float(team_returns(settings, coalition, 1, "sample", sample)[0])

    key = (settings.seed, "pursuit")
    if settings.estimator == "permutation":
        estimate = by_permutations(game, players, settings.samples, key, settings.antithetic)
    else:
        estimate = by_coalitions(game, players, settings.samples, key)
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
    switched off (0 without one)."""
    values, errors, evaluations = contributions(settings)
    players = len(values)
    episodes, key = (settings.episodes, "exact") if settings.estimator == "exact" else (AGAIN, "again")
    whole, none = (team_returns(settings, coalition, episodes, key).mean() for coalition in ((1 << players) - 1, 0))
    off = settings.switched_off
    return {
        **{f"player_{player}": float(value) for player, value in enumerate(values)},
        "rank_correlation": rank_correlation(values, np.array(settings.speeds)),
        "team": float(whole - none),
        "efficiency_gap": float(values.sum() - (whole - none)),
        "standard_error": float(errors.mean()),
        "evaluations": float(evaluations),
        "switched_off": 0.0 if off is None else abs(float(values[off])),
    }


@command
def main() -> int:
    return one_run("control", __doc__, Pursuit, run)


if __name__ == "__main__":
    raise SystemExit(main())
