"""Chapter on annotation: search trees and the step-value model fitted on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.annotation.derived import highest_value, lowest_value
from stages.reporting.blocks import (
    Block,
    Drawing,
    Figures,
    Heading,
    Section,
    Table,
    Text,
    TreeViewer,
    all_numbers,
    draw,
    missing,
    number,
    slug,
)
from stages.reporting.figures.data import histogram, short
from stages.reporting.figures.trees import example_tree, most_visited_path, node_value, reliability, search_tree
from stages.reporting.inputs import DomainInputs, Inputs
from stages.reporting.sections.uses import use_blocks
from stages.reporting.trees import DomainTrees, forest, left_on_path

INTRO = (
    "Monte Carlo tree search with the fine-tuned policy estimates the value of each step. Its statistics give step labels and "
    "preference pairs; a step-value model is fitted on them and its calibration checked on held-out trees."
)
FACTS = (
    ("trees", "trees"),
    ("middling_tasks", "trees of tasks with intermediate success"),
    ("nodes", "nodes"),
    ("ends.correct", "ends: success"),
    ("ends.wrong", "ends: failure"),
    ("ends.truncated", "ends: truncated"),
    ("root_success", "success rate of the policy's rollouts"),
    ("root_tree_value", "mean root value of the search"),
    ("labels.count", "labelled steps"),
    ("pairs.count", "preference pairs"),
    ("pairs.task_share", "share of trees with pairs"),
    ("value_model.held_out_tasks", "value model: held-out trees"),
    ("value_model.calibration.brier", "value model: Brier score"),
    ("value_model.calibration.explained_variance", "value model: explained variance"),
    ("value_model.calibration.explainable", "value model: what true values would explain"),
    ("value_model.calibration.correlation", "value model: correlation"),
    ("value_model.calibration.ece", "value model: expected calibration error"),
    ("q_model.kind", "Q-model"),
    ("q_model.held_out.pairs", "Q-model: held-out pairs"),
    ("q_model.held_out.accuracy", "Q-model: pair accuracy"),
    ("q_model.held_out.correlation", "Q-model: correlation of differences with q"),
    ("progress.held_out.explained_variance", "progress estimator: explained variance of returns"),
)
"""Dotted key of reports/annotate/<domain>.json, label."""


def at(report: Mapping[str, Any] | None, key: str) -> Any:
    """The value under a dotted key; None if it does not exist."""
    value: Any = report
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def calibration_bins(report: Mapping[str, Any] | None) -> list[tuple[float, float, float]]:
    """(mean prediction, mean outcome, count) per bin of the value model's held-out calibration."""
    bins = at(report, "value_model.calibration.bins") or []
    return [(float(item["predicted"]), float(item["observed"]), float(item["count"])) for item in bins]


def facts_table(reports: Mapping[str, Mapping[str, Any]]) -> Table | None:
    """The main numbers, a column per domain; None if there are none."""
    rows = []
    for key, label in FACTS:
        values = [at(report, key) for report in reports.values()]
        if any(value is not None for value in values):
            rows.append([label, *(number(round(value, 3) if isinstance(value, float) else value) for value in values)])
    return Table("Summary", ("", *reports), rows) if rows else None


def path_table(tree: Sequence[Mapping[str, Any]]) -> Table:
    """The most visited path, with the observations that left the context on it, if any."""
    path = most_visited_path(tree)
    left = left_on_path(tree, [node["node"] for node in path])
    rows = [
        [
            short(node["action"], 80),
            number(node["depth"]),
            number(node["N"]),
            f"{node_value(node):.2f}",
            f"{node['n_success']} of {node['n_rollouts']}",
        ]
        for node in path[1:]
    ]
    header = ["action", "depth", "visits", "mean value", "successful rollouts"]
    if left:
        header.append("observation")
        for row, node in zip(rows, path[1:], strict=True):
            row.append(f"left the context after turn {left[node['node']] + 1}" if node["node"] in left else "")
    return Table("Its most visited path", header, rows, left=(5,))


def _node_figures(domain: str, index: int, nodes: Sequence[Mapping[str, Any]]) -> list[Drawing]:
    name = slug(domain)
    inner = [node for node in nodes if node["parent"] >= 0]
    visited = [node for node in inner if node["N"] > 0]
    drawings = []
    if inner:
        depths = [float(node["depth"]) for node in inner]
        caption = f"{domain}: nodes by depth."
        drawings.append(draw(f"depth-{name}", caption, histogram, depths, "Nodes by depth", index, "depth", "nodes"))
    if visited:
        visits = [float(node["N"]) for node in visited]
        caption = f"{domain}: visits per node, log scale."
        drawings.append(draw(f"visits-{name}", caption, histogram, visits, "Nodes by visits", index, "visits", "nodes", log=True))
        values = [node_value(node) for node in visited]
        caption, title = f"{domain}: mean value of visited nodes.", "Nodes by mean value"
        drawings.append(draw(f"values-{name}", caption, histogram, values, title, index, "mean value W/N", "nodes"))
    return drawings


def _domain_blocks(domain: str, index: int, given: DomainInputs, limits: tuple[float, float]) -> list[Block]:
    source = f"reports/annotate/{domain}.json"
    blocks: list[Block] = [Heading(domain)]
    if (given.annotate or {}).get("trees") == 0:
        return [*blocks, Text("No trees were grown: annotate.tasks is 0."), *all_numbers(given.annotate, source)]
    if given.annotate is None:
        blocks.append(missing(source, f"annotate@{domain}"))
    drawings: list[Drawing] = []
    if given.nodes:
        drawings = _node_figures(domain, index, given.nodes)
    else:
        blocks.append(missing(f"data/annotated/{domain}/nodes.parquet", f"annotate@{domain}"))
    bins = calibration_bins(given.annotate)
    if bins:
        caption = f"{domain}: reliability diagram of the step-value model on held-out trees, area by count."
        drawings.append(draw(f"calibration-{slug(domain)}", caption, reliability, bins, index))
    elif given.annotate is not None:
        blocks.append(Text(f"{source} has no calibration of the step-value model.", tone="note"))
    if drawings:
        blocks.append(Figures(drawings))
    if given.nodes:
        tree = example_tree(given.nodes, limits)
        caption = (
            f"Example tree ({tree[0]['task_id']}, {len(tree)} nodes), root at the left. Area: visits. Opacity: mean value, "
            f"{limits[0]:g} to {limits[1]:g}. Squares: end of the episode. Bold line: most visited path."
        )
        blocks.append(Figures([draw(f"tree-{slug(domain)}", caption, search_tree, tree, index, limits)]))
        if len(most_visited_path(tree)) > 1:
            blocks.append(path_table(tree))
    return blocks + all_numbers(given.annotate, source)


def search_section(inputs: Inputs) -> Section:
    section = Section("trees", "Tree search", INTRO)
    facts = facts_table({domain: given.annotate for domain, given in inputs.domains.items() if given.annotate is not None})
    if facts is not None:
        section.blocks.append(facts)
    grown = {
        domain: DomainTrees(given.nodes, given.labels, given.pairs, inputs.params.section("annotate", domain))
        for domain, given in inputs.domains.items()
        if given.nodes
    }
    trees, chosen = forest(grown, inputs.params.report.trees, inputs.tokenizer, inputs.params.seed)
    if trees:
        section.blocks += [Heading("Explore a tree"), TreeViewer(trees, chosen)]
    for index, (domain, given) in enumerate(inputs.domains.items()):
        annotate = inputs.params.section("annotate", domain)
        section.blocks += _domain_blocks(domain, index, given, (lowest_value(annotate), highest_value(annotate)))
    section.blocks += use_blocks(inputs)
    return section
