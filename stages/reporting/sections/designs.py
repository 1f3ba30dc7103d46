"""Chapter on the search over agent designs, if one was run (`python -m flows.design`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.reporting.blocks import Block, Code, Figures, Section, Table, Text, all_numbers, draw, number, percent
from stages.reporting.figures.designs import LABELS, best_so_far, design_tree, predictions
from stages.reporting.inputs import Inputs
from stages.reporting.results import comparison_cells

INTRO = (
    "A design sets which model acts, how an action is selected among several samples, what history and reminders the model "
    "sees, and how it decodes. Designs were scored by {metric} on validation tasks, the best again on further ones, and the "
    "winner once on the frozen panels, next to the design in params.yaml."
)
METHODS = ("agentswift", "unguided", "random")
Results = Mapping[str, Any]


def _pair(pair: list[float]) -> str:
    return f"{100 * pair[0]:.1f} ± {100 * pair[1]:.1f} %"


def stale(inputs: Inputs, results: Results) -> bool:
    """Whether panels or model have changed since the search."""
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
        ["of these, training set of the value model", number(sum(node["origin"] in LABELS for node in nodes))],
        ["failed to run", number(sum(bool(node["failed"]) for node in nodes))],
        ["search tasks", ", ".join(f"{len(one['search'])} of {name}" for name, one in results["domains"].items())],
        ["confirmation tasks", ", ".join(f"{len(one['confirm'])} of {name}" for name, one in results["domains"].items())],
        ["attempts per task", number(settings["attempts"])],
        ["best score", percent(max(results["best"]))],
        ["rank correlation of predictions in the tree", number(results["rank_correlation"])],
    ]
    return Table("Summary", ("", results["settings"]["method"]), rows)


def _panel(results: Results) -> Table:
    rows = []
    for domain, of in results["panel"]["domains"].items():
        cells = comparison_cells(of["comparison"]) if of.get("comparison") else ["–"] * 4
        rows.append([domain, percent(of["default"]), percent(of["winner"]), *cells])
    header = ("domain", "params.yaml", "winner", "difference, points", "interval", "p", "verdict")
    return Table("Success on the frozen panels", header, rows)


def _finalists(results: Results) -> Table:
    rows = [
        [("★ " if one["name"] == results["winner"]["name"] else "") + one["label"], _pair(one["search"]), _pair(one["confirm"])]
        for one in results["finalists"]
    ]
    return Table("Finalists, ± one standard error", ("design", "search tasks", "confirmation tasks"), rows)


def _evaluated(results: Results) -> Table:
    rows = [
        [node["label"], number(place), node["origin"], _pair([node["score"], node["error"]]), percent(node["predicted"])]
        for place, node in enumerate(results["nodes"], start=1)
    ]
    header = ("design", "evaluation", "origin", "score", "predicted")
    return Table("All evaluated designs", header, rows, left=(2,), folded=True)


def design_section(inputs: Inputs) -> Section | None:
    found = {method: inputs.designs[method] for method in METHODS if method in inputs.designs}
    if not found:
        return None
    method, results = next(iter(found.items()))
    section = Section("designs", "Agent designs", INTRO.format(metric=results["settings"]["metric"]))
    blocks: list[Block] = []
    if stale(inputs, results):
        text = "Models or panels have changed since this search; 'python -m flows.design' runs it again."
        blocks.append(Text(text, tone="note"))
    if results["winner"]["name"] == results["default"]:
        blocks.append(Text("No design scored higher on the confirmation tasks than that of params.yaml."))
    else:
        blocks.append(Text(f"Winner: {results['winner']['label']}."))
    blocks += [_facts(results), _panel(results)]
    caption = "Evaluated designs by score. Lines lead to the parent design; area: number of descendants; ring: winner."
    blocks.append(Figures([draw("designs-tree", caption, design_tree, results["nodes"], results["winner"]["name"])]))
    curves = {name: one["best"] for name, one in found.items()}
    small = [draw("designs-best", "Best score so far.", best_so_far, curves)]
    if any(node["predicted"] is not None for node in results["nodes"]):
        caption = "Score predicted before each evaluation, ± one standard deviation, against the measured score."
        small.append(draw("designs-predicted", caption, predictions, results["nodes"]))
    blocks += [Figures(small), _finalists(results)]
    title = f"The winner as an overlay of params.yaml (apply with python -m stages.params --apply reports/design/{method}.yaml)"
    blocks += [Code(title, results["overlay"]), _evaluated(results)]
    rest = {key: results[key] for key in ("settings", "space")}
    section.blocks = blocks + all_numbers(rest, f"the search settings in reports/design/{method}.json")
    return section
