"""Chapter on the merge: what the specialists changed, where, and how much of it they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stages.reporting.blocks import Block, Drawing, Figures, Section, Table, Text, all_numbers, draw, missing, number
from stages.reporting.figures.merging import changed_by_group, overlap_matrix, percent, sharing_histogram
from stages.reporting.inputs import Inputs

INTRO = (
    "Each specialist is the fine-tuned policy plus a change, its task vector. Where task vectors touch different weights they "
    "can be added; where they touch the same ones they have to be reconciled. A weight counts as changed if it moved by more "
    "than {eps}."
)


def _model_table(models: Mapping[str, Any], domains: list[str]) -> Table:
    rows = []
    for name in domains:
        row = models[name]
        rows.append(
            [name]
            + [percent(row.get(key)) for key in ("changed_fraction", "unique_fraction", "sparsity")]
            + [number(row.get(key)) for key in ("norm", "largest")]
        )
    return Table(
        "Task vectors",
        ("specialist", "weights changed", "of these changed by it alone", "exact zeros", "norm", "largest change"),
        rows,
    )


def merge_section(inputs: Inputs) -> Section:
    merge = inputs.merge
    diagnostics = (merge or {}).get("diagnostics") or {}
    section = Section("merge", "Merge", INTRO.format(eps=number(diagnostics.get("eps", inputs.params.merge.ram.eps))))
    if merge is None:
        section.blocks.append(missing("reports/merge.json", "merge"))
        return section
    blocks: list[Block] = []
    distance = merge.get("distance_to_linear")
    said = f"Method: {merge.get('method', inputs.params.merge.method)}."
    if isinstance(distance, (int, float)):
        said += f" The merged model lies {distance:.2f} times as far from the linear average as that lies from the start."
    blocks.append(Text(said))
    models = diagnostics.get("models") or {}
    domains = [domain for domain in inputs.params.domains if domain in models] or sorted(models)
    if models:
        blocks.append(_model_table(models, domains))
    small: list[Drawing] = []
    if diagnostics.get("histogram"):
        small.append(draw("merge-sharing", "How many specialists changed a weight.", sharing_histogram, diagnostics["histogram"]))
    pairs = diagnostics.get("pairs") or []
    for key, title, caption in (
        (
            "jaccard",
            "Overlap of the changed weights",
            "Weights both changed, as a share of those either changed (Jaccard index).",
        ),
        (
            "sign_agreement",
            "Agreement in direction",
            "Share of the weights both changed that both moved the same way; one half is chance.",
        ),
        (
            "cosine",
            "Cosine of the task vectors",
            "Cosine between task vectors: 0 is unrelated, 1 the same direction. Shade is its size.",
        ),
    ):
        if any(isinstance(pair.get(key), (int, float)) for pair in pairs):
            small.append(draw(f"merge-{key.replace('_', '-')}", caption, overlap_matrix, pairs, domains, key, title))
    if small:
        blocks.append(Figures(small))
    if diagnostics.get("groups"):
        caption = "Share of weights changed, by layer and module, for each specialist, and the share that two or more changed."
        blocks.append(Figures([draw("merge-groups", caption, changed_by_group, diagnostics["groups"], domains)]))
    if not diagnostics:
        blocks.append(Text("reports/merge.json holds no diagnostics of the task vectors.", tone="note"))
    section.blocks = blocks + all_numbers(
        {key: value for key, value in merge.items() if key != "diagnostics"}, "reports/merge.json"
    )
    return section
