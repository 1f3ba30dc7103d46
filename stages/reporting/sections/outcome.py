"""First chapter: success of every model on the frozen panels, with paired tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.agent.model_names import evaluated_domains as panel_domains
from stages.merging.registry import get_merger
from stages.reporting import spread
from stages.reporting.blocks import Block, Drawing, Figures, Link, Section, Table, Text, draw, number, slug
from stages.reporting.figures.curves import has_column, rl_panel
from stages.reporting.figures.outcome import by_difficulty, differences, journey_lines, success_bars
from stages.reporting.inputs import Inputs
from stages.reporting.results import (
    comparison_cells,
    find_comparison,
    headline,
    journey,
    model_order,
    on_panels,
    panel_sizes,
    scalar,
    success,
)
from stages.reporting.style import domain_colour
from stages.reporting.viewer.links import side_by_side

INTRO = (
    "{tasks} Bars show the share of successful attempts, lines the {level} confidence interval. Comparisons are paired by task."
)
PANEL = "Every model is evaluated on the same frozen panel of unseen tasks."
VALIDATION = (
    "Every model is evaluated on the same validation tasks (evaluate.split: valid), by which settings may be chosen, and not on "
    "the frozen panels."
)


def confidence_of(inputs: Inputs) -> float:
    """Confidence level of the evaluation's intervals; params.yaml's if the file has none."""
    return float(inputs.evaluation.get("confidence", inputs.params.evaluate.confidence))


def evaluated_domains(inputs: Inputs) -> list[str]:
    """Domains of params.yaml that were evaluated, in order; those of evaluate.transfer come last."""
    rows = inputs.evaluation["models"].values()
    return [domain for domain in panel_domains(inputs.params) if any(domain in row for row in rows)]


def tiles(inputs: Inputs) -> list[dict[str, Any]]:
    """The headline: per domain the models from base to merged, and the main comparisons."""
    confidence = confidence_of(inputs)
    found = []
    names = {"base": "base model", "sft": "after fine-tuning", "merged": "merged generalist"}
    for index, domain in enumerate(panel_domains(inputs.params)):
        steps = journey(inputs.evaluation, domain)
        if not steps:
            continue
        rows = [
            {
                "name": names.get(model, f"{domain} specialist"),
                "value": f"{100 * estimate.mean:.0f} %",
                "interval": f"{100 * estimate.low:.0f}–{100 * estimate.high:.0f}",
                "share": f"{100 * estimate.mean:.1f}",
            }
            for model, estimate in steps
        ]
        lines = headline(inputs.evaluation, domain, confidence)
        name = domain if domain in inputs.params.domains else f"{domain}, not trained on"
        found.append({"domain": name, "colour": domain_colour(index), "steps": rows, "verdicts": lines})
    return found


def lead(inputs: Inputs) -> str:
    """One sentence: what was trained on what, and how."""
    params = inputs.params
    domains = [domain for domain in evaluated_domains(inputs) if domain in params.domains]
    method = (inputs.merge or {}).get("method", params.merge.method)
    listed = domains[0] if len(domains) == 1 else f"{', '.join(domains[:-1])} and {domains[-1]}"
    algorithms = sorted({params.section("rl", domain).algorithm for domain in domains})
    specialists = f"a specialist on {listed}" if len(domains) == 1 else f"{len(domains)} specialists ({listed})"
    return (
        f"A base model was fine-tuned on demonstrations, trained by reinforcement learning ({', '.join(algorithms)}) "
        f"into {specialists}{get_merger(method).became} ({method})."
    )


def compared_with(model: str, domain: str) -> tuple[str, ...]:
    """The baselines of a model on `domain`: its predecessor, and the fine-tuned model."""
    against = {"base": (), "sft": ("base",), "merged": (f"rl@{domain}", "sft"), "merged_linear": ("merged",)}
    return (model.partition("+")[0],) if "+" in model else against.get(model, ("sft",))


def episodes_cell(inputs: Inputs, model: str, other: str, domain: str) -> list[str]:
    """A link to the episodes of two models side by side; empty if they are not stored."""
    both = {(model, domain), (other, domain)} <= inputs.stored
    return [Link("side by side", side_by_side(domain, model, other)) if both else ""]


def results_table(inputs: Inputs) -> Table:
    """Success of each model with its interval, and paired tests against its baselines."""
    evaluation, domains = inputs.evaluation, evaluated_domains(inputs)
    body = []
    for domain in domains:
        for model in model_order(list(evaluation["models"]), domains):
            estimate = success(evaluation, model, domain)
            if estimate is None:
                continue
            own = [domain, model, estimate.percent(), estimate.interval()]
            pairs = [
                [item["b"], *comparison_cells(item), *episodes_cell(inputs, model, other, domain)]
                for other in compared_with(model, domain)
                if (item := find_comparison(evaluation, model, other, domain)) is not None
            ]
            body.append(own + (pairs[0] if pairs else [""] * 6))
            body += [[domain, "", "", "", *pair] for pair in pairs[1:]]
    level = f"{100 * confidence_of(inputs):g} % interval"
    header = ("domain", "model", "success", level, "vs.", "points", level, "p", "verdict", "episodes")
    return Table("Success and paired comparisons", header, body, text_columns=2, left=(4, 8, 9), grouped=True)


def panels_text(inputs: Inputs) -> Text:
    """Tasks, panels and attempts, and when a difference is significant."""
    evaluation = inputs.evaluation
    tasks = "tasks, panel" if on_panels(evaluation) else "validation tasks, hash"
    parts = [
        f"{domain}: {panel_sizes(evaluation, domain)} {tasks} {evaluation['panels'].get(domain, '?')}"
        f"{'' if domain in inputs.params.domains else ', nothing was trained on it'}"
        for domain in evaluated_domains(inputs)
    ]
    attempts = f" Attempts per task: {evaluation['attempts']}." if evaluation.get("attempts") else ""
    rule = "Better/worse: the interval of the difference excludes zero and the sign-flip test on the same tasks is significant."
    return Text(f"{'; '.join(parts)}.{attempts} {rule}", tone="fine")


AT_K = (("pass_at_k", 1), ("distinct_at_k", 2), ("maj_at_k", 2))
"""Metrics over k attempts, with the smallest k shown."""


def numbers_table(inputs: Inputs) -> Table:
    """Reward, turns, tokens, pass@k, and for k > 1 distinct@k and maj@k, of every model."""
    models, domains = inputs.evaluation["models"], evaluated_domains(inputs)
    rows = [(domain, name) for domain in domains for name in model_order(list(models), domains) if domain in models[name]]
    at_k = {
        name: sorted({int(k) for domain, model in rows for k in models[model][domain].get(name) or {} if int(k) >= first})
        for name, first in AT_K
    }
    body = []
    looks_ahead = any("environment_steps" in models[model][domain] for domain, model in rows)
    for domain, model in rows:
        values = models[model][domain]
        cells = [domain, model, str(values["success"]["n"])]
        cells += [number(scalar(values, key, f"{key}_mean")) for key in ("reward", "turns", "tokens")]
        cells += [number(values["environment_steps"]) if "environment_steps" in values else cells[4]] * looks_ahead
        body.append(cells + [_at_k(name, (values.get(name) or {}).get(str(k))) for name, ks in at_k.items() for k in ks])
    columns = [f"{name.removesuffix('_at_k')}@{k}" for name, ks in at_k.items() for k in ks]
    title = "Reward, turns, tokens, pass@k; distinct solutions and majority vote of k attempts"
    header = ("domain", "model", "n", "reward", "turns", "tokens", *(["environment steps"] * looks_ahead), *columns)
    return Table(title, header, body, text_columns=2, grouped=True, folded=True)


def _at_k(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return number(value) if name == "distinct_at_k" else f"{100 * value:.1f} %"


def comparison_table(comparisons: Sequence[Mapping[str, Any]], domains: Sequence[str], inputs: Inputs) -> Table:
    """All paired comparisons: first model minus second."""
    rows = []
    for item in sorted(comparisons, key=lambda item: domains.index(item["domain"])):
        names = (item["domain"], item["a"], item["b"])
        rows.append([*names, *comparison_cells(item), *episodes_cell(inputs, item["a"], item["b"], item["domain"])])
    header = (
        "domain",
        "model",
        "compared with",
        "points",
        f"{100 * confidence_of(inputs):g} % interval",
        "p",
        "verdict",
        "episodes",
    )
    return Table("All paired comparisons", header, rows, text_columns=3, left=(6, 7), grouped=True, folded=True)


def learning_curve(inputs: Inputs) -> Drawing | None:
    """Training success over RL steps; None without a history."""
    histories = {domain: given.rl_history for domain, given in inputs.domains.items() if given.rl_history is not None}
    if not has_column(histories, "success"):
        return None
    caption, title = "Training success over RL steps; each step samples new tasks.", "Training success, share of episodes"
    return draw("rl-success", caption, rl_panel, histories, inputs.params.domains, "success", title)


def spread_blocks(inputs: Inputs) -> list[Block]:
    """Success of each model over seeds of the lifecycle, on fresh panels, or how to measure it; [] without the file."""
    found = inputs.spread
    if not found:
        return []
    if not found["seeds"]:
        return [Text(spread.NOT_MEASURED.replace("`", ""), tone="note")]
    header, rows = spread.table(found)
    title = f"The lifecycle with {len(found['seeds'])} seeds, on fresh panels"
    return [
        Table(title, header, rows, text_columns=2, left=(5,), grouped=True),
        Text(spread.about(found).replace("`", ""), tone="fine"),
    ]


def outcome_section(inputs: Inputs) -> Section:
    domains, every = evaluated_domains(inputs), panel_domains(inputs.params)
    confidence, tasks = confidence_of(inputs), PANEL if on_panels(inputs.evaluation) else VALIDATION
    section = Section("results", "Results", INTRO.format(tasks=tasks, level=f"{100 * confidence:g} %"))
    if not domains:
        section.blocks.append(Text("reports/evaluation.json covers none of the domains in params.yaml.", tone="note"))
        return section
    bars = [
        draw(f"success-{slug(domain)}", f"Success on {domain}. Pale: specialists of other domains. Outlined: linear average of "
             "the specialists.", success_bars, inputs.evaluation, [domain], every)
        for domain in domains
    ]  # fmt: skip
    bars += [
        draw(f"by-difficulty-{slug(domain)}", f"Success on {domain} by difficulty, in the domain's unit.",
             by_difficulty, inputs.evaluation, domain, every)
        for domain in domains
        if any(len(row.get(domain, {}).get("by_difficulty") or {}) > 1 for row in inputs.evaluation["models"].values())
    ]  # fmt: skip
    caption = "Success from base to merged model; each domain with its own specialist."
    top = [draw("journey", caption, journey_lines, inputs.evaluation, domains)]
    if (curve := learning_curve(inputs)) is not None:
        top.append(curve)
    legend = [(domain_colour(every.index(domain)), domain) for domain in domains]
    compared = [item for item in inputs.evaluation["comparisons"] if item["domain"] in domains]
    blocks: list[Block] = [Figures(top, legend), Figures(bars), results_table(inputs), panels_text(inputs)]
    blocks += [*spread_blocks(inputs), numbers_table(inputs)]
    if compared:
        caption = "Paired differences, first model minus second. Filled marks: the interval excludes zero."
        blocks.insert(2, Figures([draw("differences", caption, differences, compared, every)]))
        blocks.append(comparison_table(compared, domains, inputs))
    absent = [
        f"{model} on {domain}"
        for domain in domains
        for model in inputs.evaluation["models"]
        if success(inputs.evaluation, model, domain) is None
    ]
    if absent:
        blocks.append(Text(f"Not evaluated: {', '.join(absent)}.", tone="note"))
    section.blocks = blocks
    return section
