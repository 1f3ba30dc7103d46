"""How long the lane's last runs took in this checkout. Times are in .bellwether/costs (stages/runtime/costs.py), outside of DVC's
outputs, which must not depend on them; MLflow has those of methods, too (control/seconds)."""

from __future__ import annotations

from pathlib import Path

from stages.control.lane.settings import Lane
from stages.runtime.costs import read_cost
from stages.runtime.speed import duration

PAGE = "page"


def title(name: str, data: bool = False) -> str:
    """The cost's file: of a method, or of a data set."""
    return f"control.{'data.' * data}{name}"


def seconds(root: Path, of: str) -> float | None:
    """Of the last run that finished; None if none has."""
    cost = read_cost(root, of)
    return cost.seconds if cost is not None and cost.done else None


def table(root: Path, lane: Lane) -> str:
    """A line per data set and method, their sum, and what has not run here."""
    titles = {
        **{f"data set {name}": title(name, data=True) for name in lane.data},
        **{name: title(name) for name in lane.methods},
        PAGE: title(PAGE),
    }
    found = {name: took for name, of in titles.items() if (took := seconds(root, of)) is not None}
    width = max(map(len, [*titles, "all"]))
    lines = [f"{name.ljust(width)}  {duration(took):>10}" for name, took in found.items()]
    lines.append(f"{'all'.ljust(width)}  {duration(sum(found.values())):>10}")
    lacking = [name for name in titles if name not in found]
    if lacking:
        lines.append(f"not run here: {', '.join(lacking)}")
    machines = sorted({cost.machine for name in found if (cost := read_cost(root, titles[name])) is not None})
    return "\n".join([*lines, *machines])
