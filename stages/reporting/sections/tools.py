"""Chapter on priced tools: what each model spends, on which tools, and what it gets for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.reporting.blocks import Block, Drawing, Figures, Section, Table, draw, percent, slug
from stages.reporting.figures.spending import spending
from stages.reporting.inputs import Inputs
from stages.reporting.results import model_order

INTRO = (
    "Calls of priced tools on the panels, per attempt. A call costs the tool's price times the tokens of its reply, in "
    "millionths of the currency of the prices; the cost per success is all that a model spent over its number of successes."
)


def _amount(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _table(domain: str, models: Mapping[str, Mapping[str, Any]]) -> Table:
    """A row per model: success, cost, cost per success, calls by tool, and calls by difficulty."""
    tools = sorted({tool for values in models.values() for tool in values["calls"]})
    levels = sorted({level for values in models.values() for level in values["calls_by_difficulty"]}, key=float)
    rows = []
    for model, values in models.items():
        success, cost = values["success"]["mean"], values["cost"]["mean"]
        calls = [f"{values['calls'].get(tool, 0.0):.2f}" for tool in tools]
        by_level = [f"{values['calls_by_difficulty'].get(level, 0.0):.2f}" for level in levels]
        rows.append([model, percent(success), _amount(cost), _amount(cost / success) if success else "–", *calls, *by_level])
    header = ("model", "success", "cost", "cost per success", *tools, *(f"calls at difficulty {level}" for level in levels))
    return Table(f"Tools on {domain}", header, rows)


def _drawing(domain: str, models: Mapping[str, Mapping[str, Any]]) -> Drawing:
    points = {model: (values["cost"], values["success"]) for model, values in models.items()}
    return draw(f"spending-{slug(domain)}", f"Cost per attempt against success on the panel of {domain}.", spending, points)


def tools_section(inputs: Inputs) -> Section | None:
    """None if no domain has priced tools."""
    section = Section("tools", "Priced tools", INTRO)
    by_model = inputs.evaluation["models"]
    for domain in inputs.params.domains:
        found = {name: of[domain] for name, of in by_model.items() if "calls" in of.get(domain, {})}
        if found:
            models = {name: found[name] for name in model_order(list(found), inputs.params.domains)}
            blocks: list[Block] = [Figures([_drawing(domain, models)]), _table(domain, models)]
            section.blocks += blocks
    return section if section.blocks else None
