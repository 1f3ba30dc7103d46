"""Chapter on contributions: of each specialist to the merged model, and of each role to a team."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.control.exact.contributions import Contributions, Method, contributions, team_coalitions
from stages.control.exact.shapley import CoalitionError
from stages.evaluation.replaced import coalition_of
from stages.evaluation.statistics import StatisticsError
from stages.merging.registry import get_merger
from stages.reporting.blocks import Block, Section, Table, Text, percent
from stages.reporting.contributions import TOGETHER, merge_coalitions
from stages.reporting.inputs import Inputs
from stages.reporting.results import signed
from stages.reporting.sections.outcome import confidence_of

if TYPE_CHECKING:
    import pandas as pd

INTRO = (
    "How much of the success over the start is due to whom: a player's contribution is its mean gain over all orders in which "
    "the players can join (Shapley value), per task, so that all contributions sum to what all gain together. Intervals are over "
    "clusters of tasks. A low value does not mean that a player can be spared: two similar ones share theirs."
)
REPLACED = {
    "noop": "its message is dropped, and nothing is done without the member that acts",
    "random": "its message comes from another task",
    "random_player": "another member speaks in its place",
}


def contributions_section(inputs: Inputs) -> Section | None:
    """None where nothing is merged and no team was attributed."""
    import pandas as pd

    blocks = merge_blocks(inputs, pd.DataFrame(list(inputs.outcomes)))
    teams = [
        name
        for name in inputs.evaluation["models"]
        if any(coalition_of(row["model"], name) is not None for row in inputs.coalitions)
    ]
    frame = pd.DataFrame([*inputs.outcomes, *inputs.coalitions])
    for team in teams:
        blocks += team_blocks(inputs, frame, team)
    return Section("contributions", "Contributions", INTRO, blocks) if blocks else None


def merge_blocks(inputs: Inputs, rows: pd.DataFrame) -> list[Block]:
    """Of the specialists to the merged model; [] where there is one, or where they are not what is merged."""
    merge, domains = inputs.params.merge, list(inputs.params.domains)
    if len(domains) < 2 or rows.empty or "merged" not in set(rows.model) or not get_merger(merge.method).from_specialists:
        return []
    try:
        models = merge_coalitions(list(rows.model.unique()), domains, merge.base)
        found = contributions(rows, domains, models, **options(inputs))
    except (CoalitionError, StatisticsError) as error:
        return [Text(f"Contributions of the specialists to the merged model are not shown: {error}.", tone="note")]
    return [table(f"Specialists in the merged model, over {merge.base}", found, "rl@")]


def team_blocks(inputs: Inputs, rows: pd.DataFrame, team: str) -> list[Block]:
    """Of the roles to a team's success."""
    attribution = inputs.params.evaluate.attribution
    method: Method = attribution.method if attribution is not None else "shapley"
    try:
        players, models = team_coalitions(list(rows.model.unique()), team)
        found = contributions(rows[rows.model.isin(models)], players, models, method, **options(inputs))
    except (CoalitionError, StatisticsError) as error:
        return [Text(f"Contributions of the roles in {team} are not shown: {error}.", tone="note")]
    how = f" A member outside a coalition is replaced: {REPLACED[attribution.replacement]}." if attribution is not None else ""
    name = "Banzhaf values, which do not sum to the gain." if method == "banzhaf" else "Shapley values."
    return [Text(name + how, tone="fine"), table(f"Roles in {team}", found)]


def options(inputs: Inputs) -> Mapping[str, Any]:
    """Of the intervals, as the evaluation's."""
    evaluate = inputs.params.evaluate
    return {"confidence": confidence_of(inputs), "resamples": evaluate.resamples, "seed": inputs.params.seed}


def table(title: str, found: Mapping[str, Contributions], prefix: str = "") -> Table:
    """A row per panel and player, and what all gain together. `prefix`: of a player's name."""
    rows: list[Sequence[str]] = []
    for domain, of in found.items():
        for player, one in [*of.players.items(), (TOGETHER, of.gain)]:
            share = of.share(player) if player in of.players else None
            name = f"{prefix}{player}" if player in of.players else TOGETHER
            interval = f"{signed(100 * one.low)} to {signed(100 * one.high)}"
            rows.append([domain, name, signed(100 * one.mean), interval, percent(share), str(one.n)])
    header = ("panel", "player", "contribution, points", "interval", "share of the gain", "tasks")
    return Table(title, header, rows, text_columns=2)
