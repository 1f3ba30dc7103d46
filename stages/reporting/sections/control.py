"""Chapter on lane control: value learning on small problems, which is no part of the run but of the same checkout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.reporting.blocks import Block, Section, Table, number
from stages.reporting.control_summary import LANE
from stages.reporting.inputs import Inputs

INTRO = (
    "Value learning on small problems without a language model (docs/control.md). Ends of runs are interquartile means over "
    "seeds of the return in the second half of the evaluations, with 95 % intervals; where these are not stored, means of the "
    "last evaluation with their range. P(ends higher): that a run ends higher than one of the method that it is compared with. "
    f"Over-estimation is of critics on the policy's actions. From {LANE}."
)


def figure(value: float) -> str:
    """Three significant digits, or all before the point; U+2212 for minus."""
    return number(round(value) if abs(value) >= 100 else float(f"{value:.3g}")).replace("-", "−")


def bounded(found: Mapping[str, float] | None) -> str:
    """A value with its interval, or with the range over seeds."""
    if found is None:
        return "–"
    value, low, high = (figure(float(found[name])) for name in ("mean", "lowest", "highest"))
    return value if low == high else f"{value} ({low} to {high})"


def _played(methods: Sequence[Mapping[str, Any]]) -> Table:
    """Methods that play, by task; the comparison's column only where one is stored."""
    tasks = list(dict.fromkeys(one["task"] for one in methods))
    ordered = sorted(methods, key=lambda one: tasks.index(one["task"]))
    compared = any(one["improvement"] is not None for one in methods)
    rows = []
    for one in ordered:
        better = "–" if one["improvement"] is None else f"{bounded(one['improvement'])} over {one['baseline']}"
        middle = [better] if compared else []
        rows.append([one["task"], one["method"], bounded(one["end"]), *middle, bounded(one["overestimation"])])
    columns = ("task", "method", "end of runs", *(["P(ends higher)"] if compared else []), "over-estimation (range)")
    return Table("Methods that play, or learn from data", columns, rows, text_columns=2, grouped=True)


def control_section(inputs: Inputs) -> Section | None:
    """None without results of the lane."""
    methods: list[Mapping[str, Any]] = list((inputs.control or {}).get("methods", []))
    played = [one for one in methods if one["played"]]
    exact = [(one, name, found) for one in methods for name, found in one["figures"].items()]
    blocks: list[Block] = []
    if played:
        blocks.append(_played(played))
    if exact:
        lines = [
            [one["method"], one["problem"].replace("_", " "), name.replace("_", " "), bounded(found)]
            for one, name, found in exact
        ]
        header = ("method", "problem", "figure", "mean (range over seeds)")
        blocks.append(Table("Exact worlds", header, lines, text_columns=3, folded=True))
    return Section("control", "Lane control", INTRO, blocks) if blocks else None
