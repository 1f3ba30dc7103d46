"""Chapter on judges: who gave the rewards, at what cost, how good they are, and samples of what they said."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stages.reporting.blocks import Block, Figures, Section, Table, Text, draw, number, percent
from stages.reporting.figures.curves import has_column, rl_panel
from stages.reporting.inputs import DomainInputs, History, Inputs
from stages.reporting.sections.learning import first_and_last
from stages.reporting.style import domain_colour

INTRO = (
    "Who scored episodes that no program can call right or wrong, and what is known of these judges. Judgments of an episode are "
    "shown beside it among the sample episodes."
)
PANELS = (
    ("judge_agreement", "Agreement with the gold quality", "Rank correlation of rewards and gold quality inside groups."),
    ("judge_gap", "Gap to the gold quality", "Standard deviations by which scores have risen more than the gold quality; a "
     "policy that learns the judge's errors widens it."),
    ("judge_gold", "Gold quality", "Mean hidden quality, or return, of the step's episodes; no reward contains it."),
    ("judge_score", "Judge's score", "Mean score of the step's episodes."),
    ("judge_flip_rate", "Verdicts that depend on the order", "Share of pairs asked in both orders."),
    ("judge_failures", "Failed judgments", "Share of nonsense, refusals, time-outs, rate limits and errors."),
    ("references_agreement", "Agreement of rewards from references", "Rank correlation with the gold quality inside groups."),
    ("references_gold", "Gold quality under rewards from references", "As above."),
    ("references_keyword_share", "Share of key words", "Words of an answer that belong to key words: it rises where a policy "
     "learns to list them."),
    ("references_words", "Words of an answer", "Mean of the step's episodes."),
    ("verifier_gap", "Verifier's gap", "As above, of a verifier that compares with references."),
    ("verifier_false_positive_rate", "False positives", "Share of the environment's failures that the verifier accepts."),
)  # fmt: skip
"""Column of the RL history, title, caption."""
SAMPLES = 12
"""Judgments shown per domain."""
LONGEST = 160
"""Characters of an answer or a reason."""


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _costs(domains: Mapping[str, DomainInputs]) -> Iterator[list[str]]:
    for domain, given in domains.items():
        for stage, found in (("annotate", _labelling(given)), ("rl", (given.rl or {}).get("judge"))):
            if not found:
                continue
            statuses = found["statuses"]
            failed = [f"{count} {status}" for status, count in statuses.items() if status != "ok"]
            yield [
                *(domain, stage, str(found.get("judge", "")), str(found.get("scheme", "pairs by both orders"))),
                *(number(sum(statuses.values())), number(found["calls"]), number(found.get("tokens_in")), number(found["money"])),
                *(", ".join(failed) or "none", percent(found["flip_rate"]), percent(found["tie_rate"])),
                number(found["position_bias"]),
            ]


def _labelling(given: DomainInputs) -> Mapping[str, Any] | None:
    model = (given.annotate or {}).get("judge_model") or {}
    return {"judge": model["labels"], **model["labelling"]} if "labelling" in model else None


def _gold(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Agreement with what is known of the answers, of the labels and of the model; by principle if there are some."""
    return [one.get("against_gold", {}) for one in (model.get("labelling", {}), model)]


def _models(domains: Mapping[str, DomainInputs]) -> list[Block]:
    """What is known of judge models on held-out tasks, before they are believed."""
    rows, read = [], []
    for domain, given in domains.items():
        model = (given.annotate or {}).get("judge_model")
        if not model:
            continue
        held = model["held_out"]
        names = ("accuracy", "kappa", "alpha", "brier", "calibration_error", "flip_rate")
        rows.append(
            [domain, model["kind"], model["labels"], model["version"], number(model["preferences"]), number(held["pairs"])]
            + [number(held.get(name)) for name in names]
            + [percent(one.get("accuracy")) for one in _gold(model)]
        )
        for name, one in model.get("principles", {}).items():
            right = [percent(found.get(name, {}).get("accuracy")) for found in _gold(model)]
            read.append([domain, name, number(one["pairs"]), percent(one["accuracy"]), percent(one["negated"]), *right])
    if not rows:
        return []
    header = ("domain", "kind", "labels", "version", "preferences", "held-out pairs", "accuracy", "kappa", "alpha", "Brier score")
    gold = ("labels right by gold", "model right by gold")
    blocks: list[Block] = [
        Table("Judge models, on held-out tasks", (*header, "calibration error", "order flips", *gold), rows, text_columns=4)
    ]
    if read:
        columns = ("domain", "principle", "pairs", "right", "same verdict when it reads the negation", *gold)
        blocks.append(Table("How well they read single principles", columns, read, text_columns=2))
    return blocks


def _labelled_pairs(domains: Mapping[str, DomainInputs]) -> list[Block]:
    """What was measured of rl's judges on labelled pairs before training (rl.judge.labelled_pairs)."""
    rows = []
    for domain, given in domains.items():
        judge = (given.rl or {}).get("judge") or {}
        if (found := judge.get("measured")) is None:
            continue
        counts = [number(found[name]) for name in ("pairs", "compared", "failed")]
        figures = [number(found.get(name)) for name in ("accuracy", "kappa", "brier", "calibration_error")]
        order = [percent(found.get("flip_rate")), percent(found.get("ties")), number(found["position_bias"])]
        rows.append([domain, judge["judge"], found["scheme"], *counts, *figures, *order])
    header = ("domain", "judge", "scheme", "pairs", "compared", "failed", "accuracy", "kappa", "Brier score", "calibration error")
    title = "Judges on labelled pairs, before training"
    return [Table(title, (*header, "order flips", "ties", "position bias"), rows, text_columns=3)] if rows else []


def _curves(inputs: Inputs, histories: Mapping[str, History]) -> list[Block]:
    domains = inputs.params.domains
    drawings = [
        draw(f"judges-{column.replace('_', '-')}", caption, rl_panel, histories, domains, column, title)
        for column, title, caption in PANELS
        if has_column(histories, column)
    ]
    if not drawings:
        return []
    legend = [(domain_colour(index), domain) for index, domain in enumerate(domains) if domain in histories]
    rows = [
        [domain, *(first_and_last(history, column) for column, _, _ in PANELS if has_column(histories, column))]
        for domain, history in histories.items()
    ]
    titles = [title for column, title, _ in PANELS if has_column(histories, column)]
    return [Table("First and last five steps", ("domain", *titles), rows), Figures(drawings, legend)]


def _warnings(domains: Mapping[str, DomainInputs]) -> list[Block]:
    found: list[Block] = []
    for domain, given in domains.items():
        for name in ("judge", "verifier"):
            step = ((given.rl or {}).get(name) or {}).get("warned_at")
            if step is not None:
                text = f"{domain}: by step {step}, scores of the {name} and gold quality have moved apart (rl.{name}.warn_gap)."
                found.append(Text(text, tone="note"))
    return found


def sampled(rows: Sequence[Mapping[str, Any]], count: int = SAMPLES) -> list[Mapping[str, Any]]:
    """`count` rows at equal distances, failures first in equal parts; in the table's order."""
    failed = [place for place, row in enumerate(rows) if row["status"] != "ok"][: count // 3]
    others = [place for place, row in enumerate(rows) if row["status"] == "ok"]
    left = count - len(failed)
    chosen = others if len(others) <= left else [others[place * len(others) // left] for place in range(left)]
    return [rows[place] for place in sorted({*failed, *chosen})]


def _said(domain: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    found = [
        [
            number(row["step"]),
            row["task_id"],
            " | ".join(_shortened(answer) for answer in row["answers"]),
            ", ".join(number(round(score, 2)) for score in row["scores"]) or row["status"],
            _shortened(row["reason"]),
            number(row["calls"]),
            number(row["money"]),
        ]
        for row in sampled(rows)
    ]
    header = ("step", "task", "answers, as shown", "scores", "reason", "calls", "cost")
    return Table(
        f"What was said on {domain}: {len(found)} of {number(len(rows))} judgments", header, found, left=(1, 2, 4), folded=True
    )


def judges_section(inputs: Inputs) -> Section | None:
    """None if nothing was judged."""
    domains = inputs.domains
    costs = list(_costs(domains))
    histories = {name: given.rl_history for name, given in domains.items() if given.rl_history is not None}
    judged = {name: history for name, history in histories.items() if any(column in history for column, _, _ in PANELS)}
    blocks: list[Block] = []
    if costs:
        header = ("domain", "stage", "judge", "scheme", "judgments", "calls", "tokens read", "cost", "failed")
        columns = (*header, "flips", "ties", "position bias")
        blocks.append(Table("Judgments and what they cost", columns, costs, text_columns=4, left=(8,)))
    blocks += [*_warnings(domains), *_labelled_pairs(domains), *_models(domains), *_curves(inputs, judged)]
    blocks += [_said(domain, given.judgments) for domain, given in domains.items() if given.judgments]
    return Section("judges", "Judges", INTRO, blocks) if blocks else None
