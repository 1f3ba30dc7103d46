"""`python -m stages.control.exact.contributions ROWS COALITION=MODEL ...`: what each specialist contributes to a merged model, or
with `--team MODEL` each role to a team that evaluate.attribution evaluated.

A coalition's members are joined by `+`; the empty one, the merge's base model, has no name before `=`. The values are success
rates on the same tasks, so that Shapley values are means over tasks, with intervals by bootstrap over clusters of tasks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from stages.control.exact.shapley import MOST_PLAYERS, CoalitionError, shapley
from stages.control.exact.shapley_sampling import banzhaf
from stages.evaluation.replaced import coalition_of
from stages.evaluation.statistics import Interval, StatisticsError, mean_interval
from stages.runtime.command import command

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("model", "domain", "task_id", "cluster", "panel", "success")
Method = Literal["shapley", "banzhaf"]
CLEAR = 3.0
"""Shares are of a gain of more than so many standard errors; of less they would be noise over noise."""


@dataclass(frozen=True)
class Contributions:
    """Of a team's players to its success on a panel."""

    players: Mapping[str, Interval]
    gain: Interval
    """Of all players together over none."""
    error: float
    """Standard error of the gain over clusters of tasks."""

    def share(self, player: str) -> float | None:
        """The player's contribution as a share of the gain; None if the gain is at most CLEAR standard errors."""
        clear = abs(self.gain.mean) > CLEAR * self.error
        return self.players[player].mean / self.gain.mean if clear else None


def parse_coalitions(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(players, the model of each coalition in the order of stages/control/exact/shapley.py). Raises CoalitionError."""
    models: dict[frozenset[str], str] = {}
    players: list[str] = []
    for argument in arguments:
        names, equals, model = argument.partition("=")
        members = names.split("+") if names else []
        if not equals or not model or not all(members) or len(set(members)) < len(members):
            raise CoalitionError(f"{argument!r} is not of the form PLAYER+PLAYER=MODEL; the empty coalition is =MODEL")
        if frozenset(members) in models:
            raise CoalitionError(f"coalition {names or '(empty)'} is given twice; remove one")
        models[frozenset(members)] = model
        players += [name for name in members if name not in players]
    if not 1 <= len(players) <= MOST_PLAYERS:
        raise CoalitionError(f"the coalitions name {len(players)} players; name 1 to {MOST_PLAYERS}")
    return players, in_order(models, players, "evaluate the merge of its members and add {name}=MODEL")


def in_order(models: Mapping[frozenset[str], str], players: Sequence[str], remedy: str) -> list[str]:
    """The models of all 2^n coalitions in the order of stages/control/exact/shapley.py. Raises CoalitionError, ending with the
    remedy, in which `{name}` is the coalition, if one has none."""
    coalitions = [[player for i, player in enumerate(players) if c >> i & 1] for c in range(1 << len(players))]
    for members in coalitions:
        if frozenset(members) not in models:
            name = "+".join(members)
            raise CoalitionError(
                f"coalition {name or '(empty)'} has no model: {len(players)} players have {len(coalitions)} coalitions; "
                + remedy.format(name=name)
            )
    return [models[frozenset(members)] for members in coalitions]


def team_coalitions(evaluated: Sequence[str], team: str) -> tuple[list[str], list[str]]:
    """As `parse_coalitions`, of the models that evaluate.attribution adds to those of a team, whose own name is that of all
    players. Raises CoalitionError if they are none of its coalitions, or not all."""
    found = {members: name for name in evaluated if (members := coalition_of(name, team)) is not None}
    players = list(dict.fromkeys(player for members in found for player in members))
    if not players:
        raise CoalitionError(f"there are no coalitions of {team}: set evaluate.attribution, and run `dvc repro evaluate`")
    models = {frozenset(members): name for members, name in found.items()} | {frozenset(players): team}
    return players, in_order(models, players, "run `dvc repro evaluate` again")


def read_rows(path: Path) -> pd.DataFrame:
    """The evaluation's rows. Raises CoalitionError for a file that is none."""
    import pandas as pd
    import pyarrow as pa

    try:
        return pd.read_parquet(path, columns=list(COLUMNS))
    except (OSError, pa.ArrowException) as error:
        raise CoalitionError(f"{path} is no table of evaluation rows ({error}); run `dvc repro evaluate`") from error


def coalition_values(rows: pd.DataFrame, models: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """(task names [T], success rate of each coalition's model on each task [2^n, T]). Raises CoalitionError."""
    columns = []
    for model in models:
        own = rows[rows.model == model]
        if own.empty:
            raise CoalitionError(f"model {model} was not evaluated; the rows have {', '.join(sorted(set(rows.model)))}")
        columns.append(own.astype({"success": float}).groupby(["task_id", "panel"]).success.mean())
    for model, column in zip(models, columns, strict=True):
        if not column.index.equals(columns[0].index):
            raise CoalitionError(
                f"models {models[0]} and {model} were evaluated on different tasks or panels; evaluate them together"
            )
    return list(columns[0].index.get_level_values("task_id")), np.stack([column.to_numpy() for column in columns])


def contributions(
    rows: pd.DataFrame, players: Sequence[str], models: Sequence[str], method: Method = "shapley", **options: Any
) -> dict[str, Contributions]:
    """Domain -> the players' contributions to success, with intervals; the domain `all` weights tasks equally.

    options: of `mean_interval`. Raises CoalitionError if a model lacks rows, or if models were evaluated on different tasks,
    StatisticsError for fewer than two clusters of tasks.
    """
    found, by = {}, {"shapley": shapley, "banzhaf": banzhaf}[method]
    rows = rows[rows.model.isin(list(models))]
    domains = sorted(set(rows.domain))
    for domain in domains + (["all"] if len(domains) > 1 else []):
        own = rows if domain == "all" else rows[rows.domain == domain]
        own = own.assign(task_id=own.domain + "/" + own.task_id, cluster=own.domain + "/" + own.cluster)
        tasks, values = coalition_values(own, models)
        clusters = dict(zip(own.task_id, own.cluster, strict=True))

        def interval(of: np.ndarray, tasks: list[str] = tasks, clusters: dict[str, str] = clusters) -> Interval:
            return mean_interval(of, tasks, clusters=clusters, **options)

        gains = values[-1] - values[0]
        by_player = {player: interval(phi) for player, phi in zip(players, by(values), strict=True)}
        found[domain] = Contributions(by_player, interval(gains), cluster_error(gains, [clusters[task] for task in tasks]))
    return found


def cluster_error(values: np.ndarray, clusters: Sequence[str]) -> float:
    """Standard error of the mean over tasks [T] whose clusters [T] are a sample: sqrt(C / (C - 1) sum over c of (sum_c - n_c
    mean)^2) / T."""
    names, index = np.unique(np.asarray(clusters, dtype=str), return_inverse=True)
    sums, sizes = np.bincount(index, weights=values), np.bincount(index)
    deviations = sums - sizes * values.mean()
    return float(np.sqrt(len(names) / (len(names) - 1) * (deviations**2).sum()) / len(values))


def table(found: Mapping[str, Contributions]) -> str:
    """Markdown, in percentage points; each domain's last row is what all players gain together."""
    lines = ["| domain | player | contribution (points) | 95 % CI | share of the gain | tasks |", "|---|---|---|---|---|---|"]
    for domain, of in found.items():
        for player, one in [*of.players.items(), ("all together", of.gain)]:
            share = of.share(player) if player in of.players else None
            shown = "–" if share is None else f"{100 * share:.0f} %"
            interval = f"{100 * one.low:+.1f} to {100 * one.high:+.1f}"
            lines.append(f"| {domain} | {player} | {100 * one.mean:+.1f} | {interval} | {shown} | {one.n} |")
    return "\n".join(lines)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.control.exact.contributions", description=__doc__)
    parser.add_argument("rows", type=Path, help="the evaluation's rows, e.g. data/evaluation/rows.parquet")
    parser.add_argument("coalitions", nargs="*", metavar="COALITION=MODEL")
    parser.add_argument("--team", metavar="MODEL", help="a model that plays in a team, such as rl@search, instead of coalitions")
    parser.add_argument("--method", choices=("shapley", "banzhaf"), default="shapley")
    given = parser.parse_args(arguments)
    if bool(given.coalitions) == bool(given.team):
        parser.error("give either coalitions or --team")
    try:
        rows = read_rows(given.rows)
        found = team_coalitions(list(dict.fromkeys(rows.model)), given.team) if given.team else parse_coalitions(given.coalitions)
        print(table(contributions(rows, *found, given.method)))
    except (CoalitionError, StatisticsError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
