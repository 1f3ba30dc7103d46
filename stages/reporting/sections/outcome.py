"""First chapter: did it learn? Success of every model on the frozen panels, and what the paired tests say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.reporting.blocks import Block, Figures, Section, Table, Text, draw, number, slug
from stages.reporting.figures.outcome import by_difficulty, differences, journey_lines, success_bars
from stages.reporting.inputs import Inputs
from stages.reporting.results import NBSP, journey, p_value, results_rows, signed, success, verdicts

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
                "verdicts": verdicts(inputs.evaluation, domain, confidence),
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


def results_table(inputs: Inputs) -> Table:
    rows = results_rows(inputs.evaluation, evaluated_domains(inputs))
    ks = sorted({k for row in rows for k in row["pass_at_k"]})
    body = []
    for row in rows:
        shares = [f"{100 * row['pass_at_k'][k]:.1f} %" if k in row["pass_at_k"] else "–" for k in ks]
        estimate = row["success"]
        body.append(
            [row["domain"], row["model"], estimate.percent(), estimate.interval(), str(estimate.n)]
            + [number(row[key]) for key in ("reward", "turns", "tokens")]
            + shares
        )
    level = f"{100 * confidence_of(inputs):g} %"
    header = ["domain", "model", "success", f"{level} interval", "n", "reward", "turns", "tokens", *(f"pass@{k}" for k in ks)]
    return Table("All results", header, body, text_columns=2)


def comparison_table(comparisons: Sequence[Mapping[str, Any]], confidence: float) -> Table:
    """Every paired comparison: first model minus second, on the same tasks."""
    rows = [
        [
            item["domain"],
            item["a"],
            item["b"],
            signed(100 * item["difference"]),
            f"{signed(100 * item['low'])} to {signed(100 * item['high'])}",
            p_value(item["p"]).removeprefix("p").strip(f"={NBSP}"),
            str(item["verdict"]),
        ]
        for item in comparisons
    ]
    header = ("domain", "model", "compared with", "points", f"{100 * confidence:g} % interval", "p", "verdict")
    return Table("Paired comparisons", header, rows, text_columns=3)


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
    blocks: list[Block] = [
        Figures(
            [
                draw(
                    "journey",
                    "Success along the way, each domain with its own specialist.",
                    journey_lines,
                    inputs.evaluation,
                    domains,
                )
            ]
        ),
        Figures(bars),
        results_table(inputs),
    ]
    compared = [item for item in inputs.evaluation["comparisons"] if item["domain"] in domains]
    if compared:
        caption = "Paired differences, first model minus second. A filled mark means that the interval leaves out zero."
        blocks.append(Figures([draw("differences", caption, differences, compared, every)]))
        blocks.append(comparison_table(compared, confidence))
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
