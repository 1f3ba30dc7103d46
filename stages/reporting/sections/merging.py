"""Chapter on the merge: which weights the specialists changed, and their overlap."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.merging.overlap import chance_lift
from stages.reporting.blocks import Block, Drawing, Figures, Section, Table, Text, all_numbers, draw, missing, number
from stages.reporting.figures.merging import changed_by_group, overlap_matrix, percent, sharing_histogram
from stages.reporting.inputs import Inputs

INTRO = (
    "A specialist's task vector is its difference from the fine-tuned policy. Task vectors that change different weights can be "
    "added; where they overlap, the merge method resolves the conflict."
)

MATRICES = (
    ("jaccard", "Overlap of the changed weights", "Jaccard index of the sets of changed weights."),
    ("sign_agreement", "Sign agreement", "Share of weights changed by both that moved in the same direction; 0.5 is chance."),
    ("cosine", "Cosine of the task vectors", "Cosine similarity of the task vectors; shade by magnitude."),
)
"""Key of a pair in the diagnostics, title and caption of its matrix."""


def _model_table(models: Mapping[str, Any], domains: list[str]) -> Table:
    rows = []
    for name in domains:
        row = models[name]
        rows.append(
            [name]
            + [percent(row.get(key)) for key in ("changed_fraction", "unique_fraction", "sparsity")]
            + [number(row.get(key)) for key in ("norm", "largest")]
        )
    return Table("Task vectors", ("specialist", "changed", "unique (of changed)", "exact zeros", "norm", "largest change"), rows)


def limits(eps: float | Sequence[float]) -> str:
    """The threshold of all specialists, or each one's."""
    return number(eps) if isinstance(eps, (int, float)) else f"{', '.join(map(number, eps))} (by specialist, in order)"


def _overlap_table(diagnostics: Mapping[str, Any]) -> Table:
    """Overlap of each two specialists' changes beside that of independent ones."""
    rows = [
        [f"{pair['a']}, {pair['b']}", percent(pair["jaccard"]), number(chance_lift(diagnostics, pair["a"], pair["b"]))]
        for pair in diagnostics["pairs"]
    ]
    return Table("Overlap beside chance", ("specialists", "Jaccard index", "overlap / overlap of independent changes"), rows)


def _joint_table(joint: Mapping[str, Any]) -> Table:
    """What the policy of `merge.method: joint_rl` played on each domain, and its success in the first and last fifth of it."""
    rows = [
        [domain, *(number(found[key]) for key in ("steps", "episodes", "environment_steps"))]
        + [percent(found.get(key)) for key in ("success_first", "success_last")]
        for domain, found in joint["domains"].items()
    ]
    columns = ("domain", "steps", "episodes", "environment steps", "success, first fifth", "success, last fifth")
    return Table("Joint reinforcement learning, domains in turn", columns, rows)


def merge_section(inputs: Inputs) -> Section:
    merge = inputs.merge
    diagnostics = (merge or {}).get("diagnostics") or {}
    threshold = f" A weight is changed if it moved by more than {limits(diagnostics['eps'])}." if "eps" in diagnostics else ""
    section = Section("merge", "Merge", INTRO + threshold)
    if merge is None:
        section.blocks.append(missing("reports/merge.json", "merge"))
        return section
    blocks: list[Block] = []
    distance = merge.get("distance_to_linear")
    text = f"Method: {merge.get('method', inputs.params.merge.method)}."
    if isinstance(distance, (int, float)):
        text += f" Distance to the linear average, relative to that of the average from the start: {distance:.2f}."
    blocks.append(Text(text))
    if "joint_rl" in merge:
        blocks.append(_joint_table(merge["joint_rl"]))
    models = diagnostics.get("models") or {}
    domains = [domain for domain in inputs.params.domains if domain in models] or sorted(models)
    if models:
        blocks.append(_model_table(models, domains))
    small: list[Drawing] = []
    if diagnostics.get("histogram"):
        small.append(
            draw(
                "merge-sharing",
                "Weights by the number of specialists that changed them.",
                sharing_histogram,
                diagnostics["histogram"],
            )
        )
    pairs = diagnostics.get("pairs") or []
    for key, title, caption in MATRICES:
        if any(isinstance(pair.get(key), (int, float)) for pair in pairs):
            small.append(draw(f"merge-{key.replace('_', '-')}", caption, overlap_matrix, pairs, domains, key, title))
    if small:
        blocks.append(Figures(small))
    if diagnostics.get("groups"):
        if pairs:
            blocks.append(_overlap_table(diagnostics))
        caption = "Share of weights changed by each specialist, and by two or more, by layer and module."
        blocks.append(Figures([draw("merge-groups", caption, changed_by_group, diagnostics["groups"], domains)]))
    if not diagnostics:
        blocks.append(Text("reports/merge.json has no diagnostics of the task vectors.", tone="note"))
    rest = {key: value for key, value in merge.items() if key != "diagnostics"}
    section.blocks = blocks + all_numbers(rest, "reports/merge.json")
    return section
