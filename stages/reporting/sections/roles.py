"""Chapter on roles: who spoke in rl, what it cost, how many proposals were valid, and what was said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.records.episode import Owner
from stages.records.tools import calls_by_tool
from stages.reporting.blocks import Block, Figures, Heading, Section, Table, draw, number
from stages.reporting.figures.curves import has_column, rl_panel
from stages.reporting.figures.data import short
from stages.reporting.inputs import DomainInputs, History, Inputs
from stages.reporting.sections.learning import first_and_last
from stages.reporting.style import domain_colour
from stages.reporting.viewer.index import terms_of

INTRO = (
    "Episodes of training belong to roles, which one policy plays or several adapters do. The tables are about the first and the "
    "last training step, whose episodes are kept; the curves are about all steps."
)
PANELS = (
    ("valid", "Valid proposals, share", "Share of proposed questions that pass the gate."),
    ("solve_rate", "Solved, share", "Share of right answers to the step's new questions."),
    ("diversity", "Distinct questions, share", "Share of a step's valid questions that differ from the others."),
    ("new_questions", "New questions, share", "Share of a step's valid questions that were never asked before."),
    ("proposer_reward", "Proposer's reward", "Mean reward of proposals, failed ones included."),
    ("pool", "Problems in the pool", "Problems of earlier steps that can fill failed slots."),
)
"""Column of the history, title of the axis, caption."""
SHOWN = 3
"""Episodes, or plays, per role that are quoted."""
Row = Mapping[str, Any]


def role_rows(given: DomainInputs) -> dict[int, list[Row]]:
    """Training step -> its kept episodes that have a role."""
    steps: dict[int, list[Row]] = {}
    for rows in given.episodes.values():
        for row in rows:
            if row.get("role") and "step" in row:
                steps.setdefault(int(row["step"]), []).append(row)
    return dict(sorted(steps.items()))


def _mean(values: Sequence[float]) -> str:
    return number(round(sum(values) / len(values), 2)) if values else "–"


def _spent(row: Row) -> float:
    return sum(turn["cost"] for turn in row["turns"])


def _calls(row: Row) -> float:
    """Calls in an episode: by the terms of priced tools; without them, what it cost (stages/records/tools.py)."""
    by_tool = calls_by_tool(terms_of(row))
    return sum(by_tool.values()) if by_tool else _spent(row)


def cost_table(steps: Mapping[int, Sequence[Row]]) -> Table:
    """A row per step and role: episodes, and means per episode of turns, tokens written and read, tool calls, their cost if tools
    have prices, and reward."""
    lines = []
    priced = any(calls_by_tool(terms_of(row)) for rows in steps.values() for row in rows)
    for step, rows in steps.items():
        for role in sorted({row["role"] for row in rows}):
            own = [row for row in rows if row["role"] == role]
            written = [sum(owner == Owner.POLICY for owner in row["owner"]) for row in own]
            lines.append(
                [
                    *(number(step), role, number(len(own)), _mean([len(row["turns"]) for row in own]), _mean(written)),
                    _mean([len(row["token_ids"]) - count for row, count in zip(own, written, strict=True)]),
                    _mean([_calls(row) for row in own]),
                    *([_mean([_spent(row) for row in own])] if priced else []),
                    _mean([row["reward"] for row in own]),
                ]
            )
    spending = ("tool calls", "cost of calls") if priced else ("tool calls",)
    header = ("step", "role", "episodes", "turns", "tokens written", "tokens read", *spending, "reward")
    return Table("Who spoke, and what it cost (means per episode)", header, lines, text_columns=2)


def gate_table(history: History) -> Table | None:
    """Why proposals failed: shares in the first and last steps; None without a gate."""
    names = [name for name in history if name.startswith("gate/") and any(value > 0 for value in history[name])]
    rows = [[name.removeprefix("gate/").replace("_", " "), first_and_last(history, name)] for name in names]
    return Table("Why proposals failed (first and last five steps)", ("reason", "share"), rows) if rows else None


def prompt_table(report: Mapping[str, Any]) -> Table | None:
    """The files of prompts that the roles of rl's report have, with their hashes; None if there are none."""
    prompts = {name: sha256 for key in ("self_play", "team") for name, sha256 in report.get(key, {}).get("prompts", {}).items()}
    rows = [[name, sha256] for name, sha256 in sorted(prompts.items())]
    return Table("Prompts of roles (files of data/raw/prompts)", ("file", "SHA-256"), rows, text_columns=2) if rows else None


def quotes(rows: Sequence[Row]) -> Table:
    """What was said in a step: by each role in its own episodes; in a play of several roles, in the order of the moves."""
    lines = []
    for role in sorted({row["role"] for row in rows if not row.get("play")}):
        for row in [row for row in rows if row["role"] == role][:SHOWN]:
            read = row["messages"][0]["content"] if row["messages"] else ""
            said = " → ".join(short(turn["action"], 90) for turn in row["turns"])
            lines.append([role, short(" ".join(read.split()), 160), said or "–", number(round(row["reward"], 3))])
    plays = dict.fromkeys(row["play"] for row in rows if row.get("play"))
    for play in list(plays)[:SHOWN]:
        own = [row for row in rows if row.get("play") == play]
        moves = sorted(
            (move, row["role"], turn, row)
            for row in own
            for move, turn in zip(row["moves"], range(len(row["turns"])), strict=True)
        )
        for move, role, turn, row in moves:
            said = row["turns"][turn]
            lines.append([role, f"{short(play, 60)}, move {move + 1}", short(said["action"], 200), number(said["reward"])])
    return Table("Who said what, in the last kept step", ("role", "read", "said", "reward"), lines, text_columns=3)


def roles_section(inputs: Inputs) -> Section | None:
    """None if no episode of training has a role."""
    found = {domain: role_rows(given) for domain, given in inputs.domains.items()}
    found = {domain: steps for domain, steps in found.items() if steps}
    if not found:
        return None
    section = Section("roles", "Roles", INTRO)
    histories = {domain: history for domain in found if (history := inputs.domains[domain].rl_history) is not None}
    domains = inputs.params.domains
    drawings = [
        draw(f"roles-{column.replace('_', '-')}", caption, rl_panel, histories, domains, column, title)
        for column, title, caption in PANELS
        if has_column(histories, column)
    ]
    if drawings:
        legend = [(domain_colour(index), domain) for index, domain in enumerate(domains) if domain in histories]
        section.blocks.append(Figures(drawings, legend))
    for domain, steps in found.items():
        ends = {step: steps[step] for step in (min(steps), max(steps))}
        blocks: list[Block] = [Heading(domain), cost_table(ends)]
        if domain in histories and (gate := gate_table(histories[domain])) is not None:
            blocks.append(gate)
        if (prompts := prompt_table(inputs.domains[domain].rl or {})) is not None:
            blocks.append(prompts)
        section.blocks += [*blocks, quotes(steps[max(steps)])]
    return section
