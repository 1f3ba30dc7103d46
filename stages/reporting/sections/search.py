"""Chapter on annotation: the search trees and the step-value model fitted on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stages.reporting.blocks import Block, Drawing, Figures, Heading, Section, Table, Text, all_numbers, draw, missing, number, slug
from stages.reporting.figures.data import histogram, short
from stages.reporting.figures.trees import most_visited_path, node_value, reliability, search_tree, telling_tree, trees_of
from stages.reporting.inputs import DomainInputs, Inputs

INTRO = (
    "Monte Carlo tree search from the fine-tuned policy: it returns to promising steps, tries other actions from there, and so finds out what "
    "each step is worth. Its statistics become step values and preference pairs; a small model learns the values and is checked for calibration."
)
_PREDICTED = ("predicted", "mean_predicted", "prediction", "mean_prediction", "mean_value", "confidence")
_OBSERVED = ("observed", "mean_observed", "target", "mean_target", "outcome", "mean_outcome", "accuracy", "actual")
_COUNT = ("count", "n", "weight", "rollouts")


def calibration_bins(value: Any) -> list[tuple[float, float, float]]:
    """(mean prediction, mean outcome, count) of each non-empty bin found in a report; [] if there are none.

    Takes a list of mappings, or a mapping of equally long lists, wherever it lies in `value`.
    """
    if isinstance(value, Sequence) and not isinstance(value, str) and value and all(isinstance(item, Mapping) for item in value):
        found = []
        for item in value:
            triple = [next((item[key] for key in names if isinstance(item.get(key), (int, float))), None) for names in (_PREDICTED, _OBSERVED)]
            if None not in triple:
                count = next((item[key] for key in _COUNT if isinstance(item.get(key), (int, float))), 1)
                found.append((float(triple[0]), float(triple[1]), float(count)))
        return [item for item in found if item[2] > 0]
    if isinstance(value, Mapping):
        columns = [next((value[key] for key in names if isinstance(value.get(key), list)), None) for names in (_PREDICTED, _OBSERVED, _COUNT)]
        if columns[0] is not None and columns[1] is not None:
            counts = columns[2] if columns[2] is not None else [1] * len(columns[0])
            rows = zip(columns[0], columns[1], counts, strict=True)
            return [(float(p), float(o), float(n)) for p, o, n in rows if p is not None and o is not None and n > 0]
        for key in sorted(value, key=lambda key: ("calib" not in str(key), str(key))):
            inner = calibration_bins(value[key])
            if inner:
                return inner
    return []


def _path_table(tree: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [short(node["action"], 80), number(node["depth"]), number(node["N"]), f"{node_value(node):.2f}", f"{node['n_success']} of {node['n_rollouts']}"]
        for node in most_visited_path(tree)[1:]
    ]
    return Table("Its most visited way", ("action", "depth", "visits", "mean value", "rollouts that succeed"), rows)


def _node_figures(domain: str, index: int, nodes: Sequence[Mapping[str, Any]]) -> list[Drawing]:
    name = slug(domain)
    inner = [node for node in nodes if node["parent"] >= 0]
    visited = [node for node in inner if node["N"] > 0]
    drawings = []
    if inner:
        depths = [float(node["depth"]) for node in inner]
        caption = f"{domain}: nodes by depth, the number of actions since the start."
        drawings.append(draw(f"depth-{name}", caption, histogram, depths, "Nodes by depth", index, "depth", "nodes"))
    if visited:
        visits = [float(node["N"]) for node in visited]
        caption = f"{domain}: visits of a node; the scale of counts is logarithmic."
        drawings.append(draw(f"visits-{name}", caption, histogram, visits, "Nodes by visits", index, "visits", "nodes", log=True))
        values = [node_value(node) for node in visited]
        caption = f"{domain}: mean value of visited nodes. Values between the ends are where steps differ in worth."
        drawings.append(draw(f"values-{name}", caption, histogram, values, "Nodes by mean value", index, "mean value W/N", "nodes"))
    return drawings


def _domain_blocks(domain: str, index: int, given: DomainInputs) -> list[Block]:
    blocks: list[Block] = [Heading(domain)]
    if given.annotate is None:
        blocks.append(missing(f"reports/annotate/{domain}.json", f"annotate@{domain}"))
    drawings: list[Drawing] = []
    if given.nodes:
        trees = trees_of(given.nodes)
        ends = Counter(bool(node["terminal"]) for node in given.nodes)
        rollouts = sum(node["n_rollouts"] for node in given.nodes)
        facts = f"{number(len(trees))} trees with {number(len(given.nodes))} nodes, {number(ends[True])} of them ends of a task; {number(rollouts)} rollouts."
        blocks.append(Text(facts))
        drawings = _node_figures(domain, index, given.nodes)
    else:
        blocks.append(missing(f"data/annotated/{domain}/nodes.parquet", f"annotate@{domain}"))
    bins = calibration_bins(given.annotate)
    if bins:
        total = sum(count for _, _, count in bins)
        error = sum(count * abs(predicted - observed) for predicted, observed, count in bins) / total
        caption = f"{domain}: reliability of the step-value model on held-out trees, area by count. Mean distance from the diagonal {error:.3f}."
        drawings.append(draw(f"calibration-{slug(domain)}", caption, reliability, bins, index))
    elif given.annotate is not None:
        blocks.append(Text(f"reports/annotate/{domain}.json holds no calibration bins of the step-value model.", tone="note"))
    if drawings:
        blocks.append(Figures(drawings))
    if given.nodes:
        tree = telling_tree(given.nodes)
        caption = (
            f"One tree ({tree[0]['task_id']}, {len(tree)} nodes). Left is the start; area is visits, fill the mean value (empty 0, full 1), "
            "squares end the task, the dark line is the most visited way."
        )
        blocks.append(Figures([draw(f"tree-{slug(domain)}", caption, search_tree, tree, index)]))
        if len(most_visited_path(tree)) > 1:
            blocks.append(_path_table(tree))
    return blocks + all_numbers(given.annotate, f"reports/annotate/{domain}.json")


def search_section(inputs: Inputs) -> Section:
    section = Section("trees", "Tree search", INTRO)
    for index, (domain, given) in enumerate(inputs.domains.items()):
        section.blocks += _domain_blocks(domain, index, given)
    return section
