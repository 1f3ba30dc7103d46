"""`python -m stages.control.exact.contributions ROWS COALITION=MODEL ...`: what each specialist contributes to a merged model.

A coalition's members are joined by `+`; the empty one, the merge's base model, has no name before `=`. The values are success
rates on the same tasks, so that Shapley values are means over tasks, with intervals by bootstrap over clusters of tasks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stages.control.exact.shapley import MOST_PLAYERS, CoalitionError, shapley
from stages.runtime.command import command

if TYPE_CHECKING:
    import pandas as pd

    from stages.evaluation.statistics import Interval

COLUMNS = ("model", "domain", "task_id", "cluster", "panel", "success")


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
    coalitions = [[player for i, player in enumerate(players) if c >> i & 1] for c in range(1 << len(players))]
    for members in coalitions:
        if frozenset(members) not in models:
            name = "+".join(members)
            raise CoalitionError(
                f"coalition {name or '(empty)'} has no model: {len(players)} players have {len(coalitions)} coalitions; "
                f"evaluate the merge of its members and add {name}=MODEL"
            )
    return players, [models[frozenset(members)] for members in coalitions]


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


def contributions(rows: pd.DataFrame, players: Sequence[str], models: Sequence[str]) -> dict[str, dict[str, Interval]]:
    """Domain -> player -> its Shapley value in success rate, with a 95 % interval; the domain `all` weights tasks equally.

    Raises CoalitionError if a model lacks rows, or if models were evaluated on different tasks.
    """
    from stages.evaluation.statistics import mean_interval

    found = {}
    domains = sorted(set(rows.domain))
    for domain in domains + (["all"] if len(domains) > 1 else []):
        own = rows if domain == "all" else rows[rows.domain == domain]
        own = own.assign(task_id=own.domain + "/" + own.task_id, cluster=own.domain + "/" + own.cluster)
        tasks, values = coalition_values(own, models)
        clusters = dict(zip(own.task_id, own.cluster, strict=True))
        by_player = zip(players, shapley(values), strict=True)
        found[domain] = {player: mean_interval(phi, tasks, clusters=clusters) for player, phi in by_player}
    return found


def table(found: Mapping[str, Mapping[str, Interval]]) -> str:
    """Markdown, in percentage points."""
    lines = ["| domain | player | contribution (points) | 95 % CI | tasks |", "|---|---|---|---|---|"]
    for domain, players in found.items():
        for player, one in players.items():
            lines.append(
                f"| {domain} | {player} | {100 * one.mean:+.1f} | {100 * one.low:+.1f} to {100 * one.high:+.1f} | {one.n} |"
            )
    return "\n".join(lines)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.control.exact.contributions", description=__doc__)
    parser.add_argument("rows", type=Path, help="the evaluation's rows, e.g. data/evaluation/rows.parquet")
    parser.add_argument("coalitions", nargs="+", metavar="COALITION=MODEL")
    given = parser.parse_args(arguments)
    try:
        players, models = parse_coalitions(given.coalitions)
        print(table(contributions(read_rows(given.rows), players, models)))
    except CoalitionError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
