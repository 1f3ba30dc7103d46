"""Chapter on speed: how long the stages of a kept run took, and what their processes did."""

from __future__ import annotations

from stages.reporting.blocks import Figures, Section, Table, Text, draw
from stages.reporting.figures.speed import COLOURS, stacked_parts
from stages.reporting.inputs import Inputs
from stages.reporting.kept import newest
from stages.reporting.sections.changes import name_of
from stages.reporting.this_run import this_run
from stages.runtime.speed import HEADER, in_order, row

INTRO = (
    "Measured on the machine that ran the stages, and stored by make keep. start: imports, reading inputs and loading models; "
    "environment: resets and steps, or waiting for them; engine: generation; training: forward and backward passes, optimisers; "
    "waiting: for the stage's other processes; files: checkpoints. The longest colour is the next bottleneck."
)
MEASURES = HEADER.index("start")


def speed_section(inputs: Inputs) -> Section | None:
    """The newest kept run with measured spans, this run's own first; None if there is none."""
    now = this_run(inputs)
    own = newest(now, inputs.kept, identical=True)
    found = own or newest(now, inputs.kept, identical=False)
    measured = {name: item for name, item in found[1].measured.items() if item.spans} if found else {}
    if not found or not measured:
        return None
    ordered = {name: measured[name] for name in in_order({**now.work, **measured}) if name in measured}  # domains in their order
    section = Section("speed", "Speed", INTRO)
    caption = "Time of each stage by what its processes did, and use of the cores"
    drawing = draw("speed-parts", caption, stacked_parts, ordered)
    section.blocks.append(Figures([drawing], [(tint, part) for part, tint in COLOURS.items()]))
    rows = [row(name, item) for name, item in ordered.items()]
    section.blocks.append(Table("Rates", HEADER[:MEASURES], [line[:MEASURES] for line in rows]))
    shares = [[line[0], *line[MEASURES:]] for line in rows]
    section.blocks.append(Table("Shares of the processes' time", (HEADER[0], *HEADER[MEASURES:]), shares))
    machines = "; ".join(sorted({item.machine for item in ordered.values()}))
    text = (
        f"Speed of {'this run' if own else name_of(*found)}, measured on {machines}. Rates are per second of the stage. Steps "
        "that the environment remembers are not run again; the time saved, of all processes, is what they would have taken. "
        "Memory is that of all processes together. For the runs in this checkout: python -m stages.runtime.speed."
    )
    section.blocks.append(Text(text))
    return section
