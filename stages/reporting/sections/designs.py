"""Chapter on the search over agent designs; only where one was run (`python -m flows.design`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.reporting.blocks import Block, Code, Figures, Section, Table, Text, all_numbers, draw, number
from stages.reporting.figures.designs import best_so_far, design_tree, predictions
from stages.reporting.inputs import Inputs
from stages.reporting.results import p_value, signed, verdict_mark

INTRO = (
    "What surrounds the model matters as well: who plays, how an action is chosen among several draws, what of its past the "
    "model sees and is reminded of, how it decodes. Designs were scored by {metric} on validation tasks; the best were "
    "played again on further ones, and the winner of these once on the frozen panels, beside what params.yaml has."
)
METHODS = ("agentswift", "unguided", "random")
Results = Mapping[str, Any]


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _pair(pair: list[float]) -> str:
    return f"{100 * pair[0]:.1f} ± {100 * pair[1]:.1f} %"


def stale(inputs: Inputs, results: Results) -> bool:
    """Whether the panels or the model that params.yaml's design plays by are no longer those of the search."""
    panels = inputs.evaluation["panels"]
    if any(panels.get(domain) != one["panel"] for domain, one in results["domains"].items()):
        return True
    played = inputs.evaluation["models"].get(results["panel"]["model"], {})
    hashes = {row.get("policy_hash", "") for row in played.values()}
    return bool(hashes) and hashes != {results["panel"]["policy_hash"]}


def _facts(results: Results) -> Table:
    nodes, settings = results["nodes"], results["settings"]
    rows = [
        ["designs in the space", number(results["designs"])],
        ["evaluated", number(len(nodes))],
        [
            "of these labels of the value model",
            number(sum(node["origin"] in ("covering", "promising", "poor") for node in nodes)),
        ],
        ["could not be run", number(sum(bool(node["failed"]) for node in nodes))],
        ["tasks to choose by", ", ".join(f"{len(one['search'])} of {name}" for name, one in results["domains"].items())],
        ["tasks to confirm by", ", ".join(f"{len(one['confirm'])} of {name}" for name, one in results["domains"].items())],
        ["attempts per task", number(settings["attempts"])],
        ["best score", _percent(max(results["best"]))],
        ["rank correlation of predictions in the tree", number(results["rank_correlation"])],
    ]
    return Table("In numbers", ("", results["settings"]["method"]), rows)


def _panel(results: Results) -> Table:
    rows = []
    for domain, of in results["panel"]["domains"].items():
        found = of.get("comparison")
        told = ["–"] * 4
        if found:
            interval = f"{signed(100 * found['low'])} to {signed(100 * found['high'])}"
            told = [signed(100 * found["difference"]), interval, p_value(found["p"], bare=True), verdict_mark(found["verdict"])]
        rows.append([domain, _percent(of["default"]), _percent(of["winner"]), *told])
    header = ("domain", "as params.yaml has it", "winner", "difference, points", "interval", "p", "verdict")
    return Table("On the frozen panels: success", header, rows)


def _finalists(results: Results) -> Table:
    rows = [
        [("★ " if one["name"] == results["winner"]["name"] else "") + one["label"], _pair(one["search"]), _pair(one["confirm"])]
        for one in results["finalists"]
    ]
    return Table("Finalists, ± one standard error", ("design", "tasks to choose by", "tasks to confirm by"), rows)


def _evaluated(results: Results) -> Table:
    rows = [
        [node["label"], number(place), node["origin"], _pair([node["score"], node["error"]]), _percent(node["predicted"])]
        for place, node in enumerate(results["nodes"], start=1)
    ]
    return Table(
        "All designs that were evaluated", ("design", "evaluation", "origin", "score", "predicted"), rows, left=(2,), folded=True
    )


def design_section(inputs: Inputs) -> Section | None:
    found = {method: inputs.designs[method] for method in METHODS if method in inputs.designs}
    if not found:
        return None
    method, results = next(iter(found.items()))
    section = Section("designs", "Agent designs", INTRO.format(metric=results["settings"]["metric"]))
    blocks: list[Block] = []
    if stale(inputs, results):
        blocks.append(
            Text(
                "The search was run on other models or panels than those of this page; python -m flows.design runs it again.",
                tone="note",
            )
        )
    changes = results["winner"]["label"]
    same = results["winner"]["name"] == results["default"]
    blocks.append(
        Text("No design did better on the confirming tasks than what params.yaml has." if same else f"The winner: {changes}.")
    )
    blocks += [_facts(results), _panel(results)]
    caption = (
        "Every evaluated design by its score; a line leads to the design that it was made from, area is how many came of it, the "
        "ring marks the winner."
    )
    blocks.append(Figures([draw("designs-tree", caption, design_tree, results["nodes"], results["winner"]["name"])]))
    curves = draw(
        "designs-best", "Best score of the designs evaluated so far.", best_so_far, {k: v["best"] for k, v in found.items()}
    )
    small = [curves]
    if any(node["predicted"] is not None for node in results["nodes"]):
        caption = "Predicted before each design was evaluated, with the prediction's standard deviation; on the line it is right."
        small.append(draw("designs-predicted", caption, predictions, results["nodes"]))
    blocks += [Figures(small), _finalists(results)]
    title = f"The winner as overrides of params.yaml (python -m stages.params --apply reports/design/{method}.yaml)"
    blocks += [Code(title, results["overlay"]), _evaluated(results)]
    rest = {key: results[key] for key in ("settings", "space")}
    section.blocks = blocks + all_numbers(rest, f"the search's settings in reports/design/{method}.json")
    return section
