"""Chapter on behaviour: how often patterns occur in the episodes of each model, over training, and where models differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.reporting.blocks import Block, Figures, Link, Section, Table, Text, draw, percent, slug
from stages.reporting.figures.patterns import by_model, model_colours, over_training
from stages.reporting.inputs import ROLLOUTS, Inputs
from stages.reporting.results import model_order, p_value, signed
from stages.reporting.sections.outcome import compared_with, confidence_of
from stages.reporting.viewer.index import Indexed
from stages.reporting.viewer.links import side_by_side, with_pattern
from stages.reporting.viewer.patterns import Pattern
from stages.reporting.viewer.prevalence import Difference, Prevalence, differences, kept

INTRO = (
    "What the policies do, counted in every episode: {titles}. Shares have {level} confidence intervals over clusters of tasks; "
    "models are compared on the same attempts with the paired test of the results."
)


def episodes_link(one: Prevalence) -> Link:
    """The count, with a link to the episodes behind it."""
    return Link(f"{one.count} of {one.episodes}", with_pattern(one.domain, one.source, one.pattern))


def cells(test: Difference) -> list[str]:
    found = test.comparison
    interval = f"{signed(100 * found.low)} to {signed(100 * found.high)}"
    address = side_by_side(test.domain, test.a, test.b)
    return [Link(test.b, address), signed(100 * found.difference), interval, p_value(found.p, bare=True), test.words]


def table(
    domain: str,
    found: Sequence[Prevalence],
    tests: Sequence[Difference],
    titles: Mapping[str, str],
    models: Sequence[str],
    level: str,
) -> Table:
    """Per pattern and model: share with interval, episodes, and the tests against the model's baselines."""
    shares = {(one.pattern, one.source): one for one in found if one.domain == domain}
    rows: list[list[str]] = []
    for pattern, title in titles.items():
        for model in models:
            one = shares.get((pattern, model))
            if one is None:
                continue
            interval = "–" if one.low is None or one.high is None else f"{100 * one.low:.1f} to {100 * one.high:.1f}"
            own = [title, model, percent(one.share), interval, episodes_link(one)]
            pairs = [cells(test) for test in tests if (test.pattern, test.domain, test.a) == (pattern, domain, model)]
            rows.append(own + (pairs[0] if pairs else [""] * 5))
            rows += [[title, "", "", "", "", *pair] for pair in pairs[1:]]
    header = ("pattern", "model", "share", level, "episodes", "vs.", "points", level, "p", "difference")
    return Table(f"Patterns on {domain}", header, rows, text_columns=2, left=(5, 9), grouped=True, folded=True)


def trend(found: Sequence[Prevalence], domain: str, titles: Mapping[str, str]) -> list[tuple[str, list[tuple[int, float]]]]:
    """(title, [(step, share)]) of patterns in the SFT rollouts (step 0) and the stored steps of RL; [] for a single point."""
    points: dict[str, list[tuple[int, float]]] = {pattern: [] for pattern in titles}
    for one in found:
        if one.domain == domain and one.kind in ("rollout", "training") and one.pattern in points:
            points[one.pattern].append((0 if one.source == ROLLOUTS else int(one.source.rpartition(" ")[2]), one.share))
    return [(titles[pattern], sorted(line)) for pattern, line in points.items() if len(line) > 1]


def domain_blocks(
    domain: str, inputs: Inputs, found: Sequence[Prevalence], tests: Sequence[Difference], titles: Mapping[str, str]
) -> list[Block]:
    """Figures and the table of a domain; only patterns that occur."""
    occurring = {one.pattern for one in found if one.domain == domain and one.count}
    titles = {pattern: title for pattern, title in titles.items() if pattern in occurring}
    if not titles:
        return [Text(f"None of the patterns occurs in the episodes of {domain}.", tone="note")]
    here = [one for one in found if one.domain == domain]
    panel, index = [one for one in here if one.kind == "panel"], inputs.params.domains.index(domain)
    models = [model for model in model_colours(index, domain) if any(one.source == model[0] for one in panel)]
    drawings = []
    if models:
        caption = f"Patterns on the panel of {domain}; lines: intervals."
        drawings.append(draw(f"patterns-{slug(domain)}", caption, by_model, panel, list(titles.items()), models))
    if line := trend(here, domain, titles):
        caption = f"Patterns on the training tasks of {domain}, over the stored steps of RL."
        drawings.append(draw(f"patterns-trend-{slug(domain)}", caption, over_training, line))
    blocks: list[Block] = [Figures(drawings)] if drawings else []
    if panel:
        level = f"{100 * confidence_of(inputs):g} % interval"
        order = model_order(sorted({one.source for one in panel}), inputs.params.domains)
        blocks.append(table(domain, panel, tests, titles, order, level))
    return blocks


def behaviour_section(
    inputs: Inputs, groups: Sequence[Indexed], patterns: Sequence[Pattern], found: Sequence[Prevalence]
) -> Section | None:
    """None without stored episodes."""
    if not groups:
        return None
    titles = {pattern.name: pattern.title for pattern in patterns}
    panel = [(group.source, group.domain) for group in groups if group.kind == "panel"]
    tests = differences(groups, inputs, {(model, domain): compared_with(model, domain) for model, domain in panel})
    confidence = confidence_of(inputs)
    once = {pattern.name: pattern for pattern in patterns}.values()
    listed = "; ".join(f"{one.title.lower()} ({one.about[:1].lower()}{one.about[1:].rstrip('.')})" for one in once)
    section = Section("behaviour", "Behaviour", INTRO.format(titles=listed, level=f"{100 * confidence:g} %"))
    for domain in inputs.params.domains:
        if any(group.domain == domain for group in groups):
            section.blocks += domain_blocks(domain, inputs, found, tests, titles)
    if tests:
        significant = sum(test.comparison.verdict != "undecided" for test in tests)
        section.blocks.append(
            Text(
                f"{significant} of {len(tests)} differences are significant one by one; Benjamini–Hochberg keeps "
                f"{kept(tests, confidence)} of them. Own patterns: report.patterns in params.yaml.",
                tone="fine",
            )
        )
    return section
