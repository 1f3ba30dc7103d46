"""Chapters on the curated data and on the rollouts of the fine-tuned policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from stages.records.episode import Owner, row_succeeded
from stages.reporting.blocks import (
    Block,
    Drawing,
    Figures,
    Heading,
    Section,
    Table,
    Text,
    all_numbers,
    draw,
    missing,
    number,
    slug,
)
from stages.reporting.figures.data import grouped_counts, histogram, pass_at_k
from stages.reporting.inputs import ROLLOUTS, DomainInputs, Inputs
from stages.reporting.results import worth

CURATE_INTRO = (
    "Malformed records, duplicates and tasks that share a world with the evaluation panel are rejected, by reason. "
    "Demonstrations come from an expert, with and without random mistakes."
)
ROLLOUT_INTRO = (
    "With rollout.tasks above 0 the fine-tuned policy attempts training tasks several times. pass@k is the share of tasks solved "
    "by at least one of k attempts; its gap to pass@1 is the potential of reinforcement learning. A task's success rate is its "
    "difficulty."
)


def histogram_items(value: Mapping[str, float] | None) -> list[tuple[str, float]]:
    """A report's histogram {bin: count} as pairs."""
    return [(str(key), float(count)) for key, count in (value or {}).items()]


def in_numeric_order(items: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """Bins sorted by value if their names are numbers (JSON sorts them as text)."""
    try:
        return sorted(items, key=lambda item: float(item[0]))
    except ValueError:
        return list(items)


def _curate_domain(domain: str, index: int, report: Mapping[str, Any]) -> list[Block]:
    splits = {name: report["splits"][name] for name in ("train", "valid", "test") if name in report.get("splits", {})}
    blocks: list[Block] = [Heading(domain)]
    if splits:
        rows = [[name] + [number(row.get(key)) for key in ("asked", "kept", "clusters")] for name, row in splits.items()]
        blocks.append(Table("Tasks", ("split", "requested", "kept", "distinct worlds"), rows))
    demonstrations = report.get("demonstrations", {})
    kept = demonstrations.get("kept")
    reasons = [(f"task: {reason}", count) for reason, count in (report.get("rejected") or {}).items()]
    reasons += [(f"demonstration: {reason}", count) for reason, count in (demonstrations.get("rejected") or {}).items()]
    if isinstance(kept, Mapping):
        counts = ", ".join(f"{number(count)} {name}" for name, count in kept.items())
        blocks.append(Text(f"Demonstrations kept: {counts}." + ("" if reasons else " None rejected.")))
    if reasons:
        blocks.append(Table("Rejected", ("reason", "count"), [[reason, number(count)] for reason, count in reasons]))
    players = (report.get("games") or {}).get("players")
    if players:
        rows = [[name, number(of["games"]), number(of["success"])] for name, of in players.items()]
        blocks.append(Table("Game records", ("player", "games", "success"), rows))
    imports = (report.get("imports") or {}).get("files")
    if imports:
        columns = ("records", "demonstrations", "pairs", "of_tasks")
        rows = [[file] + [number(counts.get(key, 0)) for key in columns] for file, counts in imports.items()]
        blocks.append(Table("Imported", ("file", "records", "demonstrations", "pairs", "replayed in their tasks"), rows))
    drawings = []
    series = {name: items for name, row in splits.items() if (items := histogram_items(row.get("difficulty")))}
    if series:
        levels = in_numeric_order(list({name: (name, 0.0) for items in series.values() for name, _ in items}.values()))
        series = {name: [(level, dict(items).get(level, 0.0)) for level, _ in levels] for name, items in series.items()}
        caption, key = f"Difficulty of the {domain} tasks in the domain's unit, by split.", f"difficulty-{slug(domain)}"
        drawings.append(draw(key, caption, grouped_counts, series, "Tasks by difficulty", index, "tasks"))
    turns = in_numeric_order(histogram_items(demonstrations.get("turns")))
    if turns:
        caption, key = f"Length of the {domain} demonstrations in turns.", f"demo-turns-{slug(domain)}"
        counted = {"demonstrations": turns}
        drawings.append(draw(key, caption, grouped_counts, counted, "Demonstrations by turns", index, "demonstrations"))
    if drawings:
        blocks.append(Figures(drawings))
    rest = {key: value for key, value in report.items() if key != "rejections"}
    return blocks + all_numbers(rest, f"reports/curate/{domain}.json")


def curate_section(inputs: Inputs) -> Section:
    section = Section("data", "Data", CURATE_INTRO)
    for index, (domain, given) in enumerate(inputs.domains.items()):
        if given.curate is None:
            section.blocks.append(missing(f"reports/curate/{domain}.json", f"curate@{domain}"))
        else:
            section.blocks += _curate_domain(domain, index, given.curate)
    return section


def success_rates(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Success rate per task, sorted by task id."""
    tried: Counter[str] = Counter()
    solved: Counter[str] = Counter()
    for row in rows:
        tried[row["task_id"]] += 1
        solved[row["task_id"]] += row_succeeded(row)
    return [solved[task] / tried[task] for task in sorted(tried)]


def _rollout_figures(domain: str, index: int, given: DomainInputs) -> list[Drawing]:
    """Tasks by success rate, episodes by length; [] without episodes."""
    rows = given.episodes.get(ROLLOUTS, [])
    if not rows:
        return []
    attempts = max(Counter(row["task_id"] for row in rows).values())
    shares = Counter(f"{share:.2g}" for share in success_rates(rows))
    levels = {"tasks": [(level, float(shares[level])) for level in sorted(shares, key=float)]}
    lengths = [float(len(row["token_ids"])) for row in rows]
    solved = f"{domain}: success rate per task over {attempts} attempts."
    tokens = f"{domain}: tokens per episode, including prompt and observations."
    title = f"{domain}: tasks by success"
    return [
        draw(f"task-success-{slug(domain)}", solved, grouped_counts, levels, title, index, "tasks"),
        draw(f"length-{slug(domain)}", tokens, histogram, lengths, f"{domain}: episodes by length", index, "tokens", "episodes"),
    ]


def owner_table(domain: str, given: DomainInputs) -> Table | None:
    """Tokens per episode by who wrote them, of each source; None if there are only tokens of prompt, policy and environment."""
    counts = {source: Counter(int(owner) for row in rows for owner in row["owner"]) for source, rows in given.episodes.items()}
    owners = sorted({owner for of_source in counts.values() for owner in of_source})
    if not owners or owners[-1] <= Owner.ENVIRONMENT:
        return None
    rows = [
        [source, number(len(given.episodes[source]))]
        + [f"{of_source[owner] / max(len(given.episodes[source]), 1):.1f}" for owner in owners]
        for source, of_source in counts.items()
    ]
    header = ("source", "episodes", *(Owner(owner).name.lower() for owner in owners))
    return Table(f"Tokens per episode of {domain} by who wrote them; RL trains on policy and external ones", header, rows)


def _worth_of_rates(inputs: Inputs) -> list[Block]:
    """Why rollout can do without attempts: what the board says of choosing RL's tasks by their measured success rates."""
    found = [
        f"on {life['environment']} {worth(life['rates'])}, reports/claims/{life['slug']}.md"
        for life in (inputs.uses or {}).get("lives", ())
        if life.get("rates")
    ]
    start = "What choosing RL's tasks by their measured success rates is worth"
    return [Text(f"{start}: {'; '.join(found)}.")] if found else []


def rollout_section(inputs: Inputs) -> Section:
    section = Section("rollouts", "Rollouts of the fine-tuned policy", ROLLOUT_INTRO)
    curves: dict[str, dict[int, float]] = {}
    drawings: list[Drawing] = []
    numbers: list[Block] = []
    for index, (domain, given) in enumerate(inputs.domains.items()):
        if (given.rollout or {}).get("tasks") == 0:
            section.blocks.append(Text(f"{domain}: no attempts were made: rollout.tasks is 0."))
        elif given.rollout is None:
            section.blocks.append(missing(f"reports/rollout/{domain}.json", f"rollout@{domain}"))
        else:
            shares = given.rollout.get("pass_at_k") or {}
            curve = {int(k): float(share) for k, share in shares.items() if isinstance(share, (int, float))}
            if curve:
                curves[domain] = curve
            numbers += all_numbers(given.rollout, f"reports/rollout/{domain}.json")
        drawings += _rollout_figures(domain, index, given)
        if (owners := owner_table(domain, given)) is not None:
            numbers.append(owners)
    if any((given.rollout or {}).get("tasks") == 0 for given in inputs.domains.values()):
        section.blocks += _worth_of_rates(inputs)
    drawings = drawings[::2] + drawings[1::2]  # figures of one kind side by side
    if curves:
        caption = "pass@k of the fine-tuned policy on its training tasks."
        drawings.insert(0, draw("pass-at-k", caption, pass_at_k, curves, inputs.params.domains))
    if drawings:
        section.blocks.append(Figures(drawings))
    section.blocks += numbers
    return section
