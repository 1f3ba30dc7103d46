"""First chapter: did it learn? Success of every model on the frozen panels, and what the paired tests say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.reporting.blocks import Block, Drawing, Figures, Section, Table, Text, draw, number, slug
from stages.reporting.figures.curves import has_column, rl_panel
from stages.reporting.figures.outcome import by_difficulty, differences, journey_lines, success_bars
from stages.reporting.inputs import Inputs
from stages.reporting.results import (
    find_comparison,
    headline,
    journey,
    model_order,
    p_value,
    results_rows,
    signed,
    success,
    verdict_mark,
)
from stages.reporting.style import domain_colour

INTRO = (
    "Every model plays the same frozen panel of tasks, none of which was seen in training. A bar is the share of attempts that "
    "succeed, its line the {level} confidence interval. Comparisons are paired: both models on the same tasks."
)


def confidence_of(inputs: Inputs) -> float:
    """Confidence level of the evaluation's intervals: what the file says, else params.yaml."""
    return float(inputs.evaluation.get("confidence", inputs.params.evaluate.confidence))


def evaluated_domains(inputs: Inputs) -> list[str]:
    """Domains of params.yaml that the evaluation covers, in their order."""
    rows = inputs.evaluation["models"].values()
    return [domain for domain in inputs.params.domains if any(domain in row for row in rows)]


def tiles(inputs: Inputs) -> list[dict[str, Any]]:
    """The headline: per domain its way from base to merged, and verdicts in words."""
    confidence = confidence_of(inputs)
    found = []
    names = {"base": "base model", "sft": "after fine-tuning", "merged": "merged generalist"}
    for index, domain in enumerate(inputs.params.domains):
        steps = journey(inputs.evaluation, domain)
        if not steps:
            continue
        found.append(
            {
                "domain": domain,
                "colour": f"domain{index % 4}",
                "steps": [
                    {
                        "name": names.get(model, f"{domain} specialist"),
                        "value": f"{100 * estimate.mean:.0f} %",
                        "interval": f"{100 * estimate.low:.0f}–{100 * estimate.high:.0f}",
                        "share": f"{100 * estimate.mean:.1f}",
                    }
                    for model, estimate in steps
                ],
                "verdicts": headline(inputs.evaluation, domain, confidence),
            }
        )
    return found


def lead(inputs: Inputs) -> str:
    """One sentence: what was trained, on what, how."""
    params = inputs.params
    domains = evaluated_domains(inputs)
    method = (inputs.merge or {}).get("method", params.merge.method)
    listed = domains[0] if len(domains) == 1 else f"{', '.join(domains[:-1])} and {domains[-1]}"
    algorithms = sorted({params.section("rl", domain).algorithm for domain in domains})
    plural = "a specialist" if len(domains) == 1 else f"{len(domains)} specialists, one for each domain ({listed}),"
    where = f" on {listed}" if len(domains) == 1 else ""
    return (
        f"A base model was fine-tuned on demonstrations, trained by reinforcement learning ({', '.join(algorithms)}) "
        f"into {plural}{where} and merged into one generalist ({method})."
    )


def compared_with(model: str, domain: str) -> tuple[str, ...]:
    """What a model is held against on `domain`: the step before it on the way, and the fine-tuned model."""
    against = {"base": (), "sft": ("base",), "merged": (f"rl@{domain}", "sft"), "merged_linear": ("merged",)}
    return (model.partition("+")[0],) if "+" in model else against.get(model, ("sft",))


def results_table(inputs: Inputs) -> Table:
    """The one table: success of each model with its interval, and the verdict of the paired test against what it came from."""
    evaluation, domains = inputs.evaluation, evaluated_domains(inputs)
    body = []
    for domain in domains:
        for model in model_order(list(evaluation["models"]), domains):
            estimate = success(evaluation, model, domain)
            if estimate is None:
                continue
            own = [domain, model, estimate.percent(), estimate.interval()]
            pairs = [
                [item["b"], *_comparison_cells(item)]
                for other in compared_with(model, domain)
                if (item := find_comparison(evaluation, model, other, domain)) is not None
            ]
            body.append(own + (pairs[0] if pairs else [""] * 5))
            body += [[domain, "", "", "", *pair] for pair in pairs[1:]]
    level = f"{100 * confidence_of(inputs):g} % interval"
    header = ("domain", "model", "success", level, "against", "points", level, "p", "verdict")
    return Table("Success and verdicts", header, body, text_columns=2, left=(4, 8), grouped=True)


def _comparison_cells(item: Mapping[str, Any]) -> list[str]:
    """Points, interval, p and verdict of a paired comparison."""
    interval = f"{signed(100 * item['low'])} to {signed(100 * item['high'])}"
    return [signed(100 * item["difference"]), interval, p_value(item["p"], bare=True), verdict_mark(item["verdict"])]


def panels_text(inputs: Inputs) -> Text:
    """What was played: tasks, attempts and panels."""
    parts = []
    for domain in evaluated_domains(inputs):
        counts = sorted(
            {found.n for model in inputs.evaluation["models"] if (found := success(inputs.evaluation, model, domain))}
        )
        parts.append(f"{domain}: {'/'.join(map(str, counts))} tasks, panel {inputs.evaluation['panels'].get(domain, '?')}")
    attempts = inputs.evaluation.get("attempts")
    tried = f" Attempts at each task: {attempts}." if attempts else ""
    return Text(
        f"{'; '.join(parts)}.{tried} A model is called better or worse if the interval of the difference is clear of zero and a "
        "sign-flip test on the same tasks agrees.",
        tone="fine",
    )


def numbers_table(inputs: Inputs) -> Table:
    """Reward, turns, tokens, pass@k, different solutions in k attempts and, beyond k = 1, maj@k of every model."""
    rows = results_rows(inputs.evaluation, evaluated_domains(inputs))
    columns = [
        (name, k)
        for name, first in (("pass_at_k", 1), ("distinct_at_k", 2), ("maj_at_k", 2))
        for k in sorted({k for row in rows for k in row[name]})
        if k >= first
    ]
    body = []
    for row in rows:
        shares = [_at_k(name, row[name].get(k)) for name, k in columns]
        numbers = [number(row[key]) for key in ("reward", "turns", "tokens")]
        body.append([row["domain"], row["model"], str(row["success"].n), *numbers, *shares])
    header = ("domain", "model", "n", "reward", "turns", "tokens", *(f"{name.replace('_at_k', '')}@{k}" for name, k in columns))
    return Table(
        "Reward, turns, tokens; successes and different solutions among k attempts",
        header,
        body,
        text_columns=2,
        grouped=True,
        folded=True,
    )


def _at_k(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return number(value) if name == "distinct_at_k" else f"{100 * value:.1f} %"


def comparison_table(comparisons: Sequence[Mapping[str, Any]], domains: Sequence[str], confidence: float) -> Table:
    """Every paired comparison: first model minus second, on the same tasks."""
    ordered = sorted(comparisons, key=lambda item: domains.index(item["domain"]))
    rows = [[item["domain"], item["a"], item["b"], *_comparison_cells(item)] for item in ordered]
    header = ("domain", "model", "compared with", "points", f"{100 * confidence:g} % interval", "p", "verdict")
    return Table("Every paired comparison", header, rows, text_columns=3, left=(6,), grouped=True, folded=True)


def learning_curve(inputs: Inputs) -> Drawing | None:
    """Success over the steps of reinforcement learning; None without a history."""
    histories = {domain: given.rl_history for domain, given in inputs.domains.items() if given.rl_history is not None}
    if not has_column(histories, "success"):
        return None
    caption = "Success in training, over the steps of reinforcement learning; tasks are drawn anew in each step."
    return draw(
        "rl-success", caption, rl_panel, histories, inputs.params.domains, "success", "Training success, share of episodes"
    )


def outcome_section(inputs: Inputs) -> Section:
    domains, every = evaluated_domains(inputs), inputs.params.domains
    confidence = confidence_of(inputs)
    section = Section("results", "Results", INTRO.format(level=f"{100 * confidence:g} %"))
    if not domains:
        section.blocks.append(Text("reports/evaluation.json covers none of the domains in params.yaml.", tone="note"))
        return section
    bars = [
        draw(f"success-{slug(domain)}", f"Success of every model on {domain}. Pale: the specialist of another domain. "
             "Outlined: linear averaging of the specialists, for comparison.", success_bars, inputs.evaluation, [domain], every)
        for domain in domains
    ]  # fmt: skip
    bars += [
        draw(f"by-difficulty-{slug(domain)}", f"Where success on {domain} comes from: by difficulty, in the domain's own unit.",
             by_difficulty, inputs.evaluation, domain, every)
        for domain in domains
        if any(len(row.get(domain, {}).get("by_difficulty") or {}) > 1 for row in inputs.evaluation["models"].values())
    ]  # fmt: skip
    caption = "Success along the way, each domain with its own specialist."
    top = [draw("journey", caption, journey_lines, inputs.evaluation, domains)]
    if (curve := learning_curve(inputs)) is not None:
        top.append(curve)
    legend = [(domain_colour(every.index(domain)), domain) for domain in domains]
    compared = [item for item in inputs.evaluation["comparisons"] if item["domain"] in domains]
    blocks: list[Block] = [Figures(top, legend), Figures(bars), results_table(inputs), panels_text(inputs)]
    blocks.append(numbers_table(inputs))
    if compared:
        caption = "Paired differences, first model minus second. A filled mark means that the interval leaves out zero."
        blocks.insert(2, Figures([draw("differences", caption, differences, compared, every)]))
        blocks.append(comparison_table(compared, domains, confidence))
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
