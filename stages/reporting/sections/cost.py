"""Chapter on what the run cost: work, which is part of the outcome, and time, which is known of runs that were kept."""

from __future__ import annotations

from stages.reporting.blocks import Section, Table, Text, number
from stages.reporting.inputs import Inputs
from stages.reporting.kept import Measured, Run, Work, itself, previous
from stages.reporting.sections.changes import name_of
from stages.reporting.this_run import this_run

INTRO = (
    "Work is counted and does not depend on the machine. Time and memory are measured while a stage runs; this page, which is "
    "the same bytes for the same inputs, knows them of runs that were kept (make keep)."
)
ORDER = ("curate", "sft", "rollout", "annotate", "rl", "merge", "evaluate")
COUNTS = (
    ("episodes", "episodes"),
    ("steps", "steps"),
    ("sampled_tokens", "tokens sampled"),
    ("trained_tokens", "tokens trained on"),
)


def duration(seconds: float) -> str:
    """ "41 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def memory(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def _total(items: list[Work], name: str) -> int | None:
    values = [value for item in items if (value := getattr(item, name)) is not None]
    return sum(values) if values else None


def cost_table(now: Run, measured: dict[str, Measured]) -> Table:
    """Stages in order, and their sum; columns of time and memory where something was measured."""
    stages = sorted({**now.work, **measured}, key=lambda stage: ORDER.index(stage.split("@")[0]))  # domains in their order
    rows = []
    for stage in stages:
        row = [stage, *(number(getattr(now.work.get(stage, Work()), name)) for name, _ in COUNTS)]
        if measured:
            found = measured.get(stage)
            row += [duration(found.seconds), memory(found.peak_bytes)] if found else ["–", "–"]
        rows.append(row)
    total = ["all", *(number(_total(list(now.work.values()), name)) for name, _ in COUNTS)]
    if measured:
        total += [duration(sum(item.seconds for item in measured.values())), memory(max(m.peak_bytes for m in measured.values()))]
    header = ("stage", *(label for _, label in COUNTS), *(("time", "peak memory") if measured else ()))
    return Table("By stage", header, [*rows, total])


def cost_section(inputs: Inputs) -> Section:
    section = Section("cost", "What it cost", INTRO)
    now = this_run(inputs)
    own, before = itself(now, inputs.kept), previous(now, inputs.kept)
    found = own or before
    measured = dict(found[1].measured) if found else {}
    section.blocks.append(cost_table(now, measured))
    if found and measured:
        machines = "; ".join(sorted({item.machine for item in measured.values()}))
        whose = "when this run was made" if own else f"when {name_of(*found)} was made, which this run is compared with"
        said = (
            f"Time and memory as measured {whose}, on {machines}. Time is that of the stage's own work, without the start of its "
            "process; memory is that of its largest process."
        )
        if lacking := [stage for stage in now.work if stage not in measured]:
            said += f" Restored from DVC's cache, so not measured: {', '.join(lacking)}."
        section.blocks.append(Text(said))
    else:
        section.blocks.append(Text("No times yet: make keep keeps this run with what was measured.", tone="note"))
    return section
