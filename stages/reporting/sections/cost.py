"""Chapter on the cost of the run: counted work, and measured time and memory of kept runs."""

from __future__ import annotations

from collections.abc import Sequence

from stages.merging.registry import get_merger
from stages.reporting.blocks import Section, Table, Text, number
from stages.reporting.inputs import Inputs
from stages.reporting.kept import Measured, Run, Work, newest, total
from stages.reporting.results import model_order
from stages.reporting.sections.changes import name_of
from stages.reporting.this_run import this_run
from stages.runtime.speed import duration, in_order, memory

INTRO = (
    "Counts do not depend on the machine. Time and memory come from kept runs (make keep), so that this page depends on its "
    "inputs alone."
)
COUNTS = (
    ("episodes", "episodes"),
    ("environment_steps", "environment steps"),
    ("steps", "steps"),
    ("sampled_tokens", "tokens sampled"),
    ("trained_tokens", "tokens trained on"),
)
SPECIALIST = ("rollout", "annotate", "rl")
"""The stages of a specialist after sft."""
LEARNT_BY = {"q": ("rollout", "annotate"), "value": SPECIALIST, "reward": SPECIALIST}
"""How a model's actions are chosen (`sft+q`) -> the stages that learn to choose."""


def cost_table(now: Run, measured: dict[str, Measured]) -> Table:
    """One row per stage, and the total; time and memory columns if anything was measured."""
    stages = in_order({**now.work, **measured})  # domains in their order
    rows = []
    for stage in stages:
        row = [stage, *(number(getattr(now.work.get(stage, Work()), name)) for name, _ in COUNTS)]
        if measured:
            found = measured.get(stage)
            row += [duration(found.seconds), memory(found.peak_bytes)] if found else ["–", "–"]
        rows.append(row)
    last = ["total", *(number(total(list(now.work.values()), name)) for name, _ in COUNTS)]
    if measured:
        last += [duration(sum(item.seconds for item in measured.values())), memory(max(m.peak_bytes for m in measured.values()))]
    header = ("stage", *(label for _, label in COUNTS), *(("time", "peak memory") if measured else ()))
    return Table("By stage", header, [*rows, last])


def stages_of(model: str, domains: Sequence[str], method: str) -> list[str]:
    """The stages that a model comes from, the search trees of specialists included, in order. method: of the merge. Where that
    trains the merged model, the linear average, which costs next to nothing, is not charged with the stage."""
    plain, _, way = model.partition("+")
    specialists = plain.startswith("merged") or "@" in plain
    kinds = SPECIALIST if specialists else LEARNT_BY.get(way, ())
    if plain == "merged" and not get_merger(method).from_specialists:
        kinds = tuple(kind for kind in kinds if kind != "rl")  # the stage merge plays itself
    own = [plain.partition("@")[2]] if "@" in plain else domains
    found = [] if plain == "base" and not kinds else [*(f"curate@{domain}" for domain in domains), "sft"]
    found += [f"{kind}@{domain}" for kind in kinds for domain in own]
    last = ["merge"] if plain == "merged" or (plain == "merged_linear" and not get_merger(method).trains) else []
    return [*found, *last]


def model_table(now: Run, measured: dict[str, Measured], domains: Sequence[str], method: str) -> Table:
    """What each evaluated model took: the sums over the stages that it comes from, beside its mean success."""
    rows = []
    for model in model_order(list(now.success), domains):
        shares = [now.success[model][domain].mean for domain in domains if domain in now.success[model]]
        stages = stages_of(model, domains, method)
        work = [now.work[stage] for stage in stages if stage in now.work]
        row = [model, f"{100 * sum(shares) / len(shares):.1f} %" if shares else "–"]
        row += [number(total(work, name)) for name, _ in COUNTS if name != "steps"]
        if measured:
            known = stages and all(stage in measured for stage in stages)
            row.append(duration(sum(measured[stage].seconds for stage in stages)) if known else "–")
        rows.append(row)
    counts = [label for name, label in COUNTS if name != "steps"]
    header = ("model", "success, mean of domains", *counts, *(("time of its stages",) if measured else ()))
    return Table("By model, from the base model on", header, rows)


def cost_section(inputs: Inputs) -> Section:
    section = Section("cost", "Cost", INTRO)
    now, method = this_run(inputs), (inputs.merge or {}).get("method", inputs.params.merge.method)
    own = newest(now, inputs.kept, identical=True)
    found = own or newest(now, inputs.kept, identical=False)
    measured = dict(found[1].measured) if found else {}
    section.blocks += [cost_table(now, measured), model_table(now, measured, inputs.params.domains, method)]
    if found and measured:
        machines = "; ".join(sorted({item.machine for item in measured.values()}))
        text = (
            f"Time and memory of {'this run' if own else name_of(*found)}, measured on {machines}. Time includes "
            "start-up; memory is that of the stage's largest process."
        )
        if lacking := [stage for stage in now.work if stage not in measured]:
            text += f" Not measured (restored from DVC's cache): {', '.join(lacking)}."
        section.blocks.append(Text(text))
    else:
        section.blocks.append(Text("No times yet: 'make keep' stores this run with its measurements.", tone="note"))
    return section
