"""Chapter on changes since an earlier run: parameters, code, success."""

from __future__ import annotations

from collections.abc import Sequence

from stages.agent.model_names import evaluated_domains
from stages.reporting.blocks import Block, Figures, Link, Section, Table, Text, draw, percent
from stages.reporting.changes import SuccessChange, code_changes, parameter_changes, set_before_alone, success_changes
from stages.reporting.figures.outcome import differences
from stages.reporting.inputs import Inputs
from stages.reporting.kept import FILE, Run, newest
from stages.reporting.results import comparison_cells
from stages.reporting.sections.outcome import confidence_of
from stages.reporting.this_run import this_run
from stages.reporting.viewer.groups import run_before
from stages.reporting.viewer.links import side_by_side

INTRO = "This run compared with the newest kept run before it. Success is tested pairwise on the same tasks."
FEW = 5
"""Rows that a table of code, or of parameters without a value now, may have and stay unfolded."""
NOTHING_KEPT = f"There is no earlier run in {FILE} to compare with. Run 'make keep' to add this one."


def name_of(number: int, run: Run) -> str:
    """ "run 2 (“ties”, commit 8ba630a)"."""
    facts = [f"“{run.note}”"] if run.note else []
    facts += [f"commit {run.commit}"] if run.commit else []
    return f"run {number}" + (f" ({', '.join(facts)})" if facts else "")


def _episodes(change: SuccessChange, inputs: Inputs) -> str:
    """A link to the episodes of both runs side by side; empty if either's are not stored."""
    before = run_before(inputs, change.domain)
    if before is None or change.before is None or (change.model, change.domain) not in inputs.stored:
        return ""
    return Link("side by side", side_by_side(change.domain, change.model, before.source(change.model)))


def _row(change: SuccessChange) -> list[str]:
    cells = [change.domain, change.model]
    cells += [percent(item.mean if item else None) for item in (change.before, change.now)]
    if change.test is None:
        return [*cells, "–", "–", "–", change.why]
    return [*cells, *comparison_cells(vars(change.test))]


def parameter_tables(changes: Sequence[tuple[str, str, str]]) -> list[Block]:
    """What has a value now, so that an edit is not lost among an earlier version's parameters, then the others."""
    set_now = [list(change) for change in changes if not set_before_alone(change)]
    gone = [list(change[:2]) for change in changes if set_before_alone(change)]
    tables: list[Block] = []
    if set_now:
        tables.append(Table("Parameters", ("parameter", "before", "now"), set_now, text_columns=3))
    if gone:
        title, folded = f"Parameters with a value in the earlier run alone ({len(gone)})", len(gone) > FEW
        tables.append(Table(title, ("parameter", "before"), gone, text_columns=2, folded=folded))
    return tables


def success_blocks(changes: Sequence[SuccessChange], inputs: Inputs) -> list[Block]:
    confidence, domains = confidence_of(inputs), evaluated_domains(inputs.params)
    if changes and all(change.equal for change in changes):
        return [Text("Success is identical on every task for every model.")]
    equal = [f"{change.model} on {change.domain}" for change in changes if change.equal]
    differing = [change for change in changes if not change.equal]
    header = ("domain", "model", "before", "now", "points", f"{100 * confidence:g} % interval", "p", "verdict", "episodes")
    rows = [[*_row(change), _episodes(change, inputs)] for change in differing]
    blocks: list[Block] = [Table("Success, before and now", header, rows, text_columns=2, left=(7, 8), grouped=True)]
    tested = [
        {**vars(change.test), "domain": change.domain, "a": f"{change.model} now", "b": "before"}
        for change in differing
        if change.test is not None
    ]
    if tested:
        caption = "Success now minus before, on the same tasks. Filled marks: the interval excludes zero."
        blocks.insert(0, Figures([draw("changes", caption, differences, tested, domains)]))
    if equal:
        blocks.append(Text(f"Identical on every task: {', '.join(equal)}."))
    return blocks


def changes_section(inputs: Inputs) -> Section:
    section = Section("changes", "Changes", INTRO)
    now = this_run(inputs)
    found, own = newest(now, inputs.kept, identical=False), newest(now, inputs.kept, identical=True)
    kept_as = f"Kept as {name_of(*own)}. " if own else ""
    if found is None:
        section.blocks.append(Text(kept_as + ("No other run is kept." if own else NOTHING_KEPT), tone="note"))
        return section
    before = found[1]
    section.blocks.append(Text(f"{kept_as}Compared with {name_of(*found)}."))
    parameters, code = parameter_changes(before, now), code_changes(before, now)
    section.blocks += parameter_tables(parameters)
    if code:
        rows = [list(item) for item in code]
        title, folded = f"Code that affects results ({len(rows)})", len(rows) > FEW
        section.blocks.append(Table(title, ("part", "change"), rows, text_columns=2, folded=folded))
    if same := [name for name, differs in (("parameters", parameters), ("code that affects results", code)) if not differs]:
        section.blocks.append(Text(f"Unchanged: {', '.join(same)}."))
    changes = success_changes(before, now, inputs.outcomes)
    section.blocks += success_blocks(changes, inputs)
    return section
