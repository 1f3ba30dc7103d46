"""Chapter on preferences: what each model prefers, how coherently, and what training changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.reporting.blocks import Block, Figures, Section, Table, Text, draw, number, percent
from stages.reporting.figures.utilities import utility_dots
from stages.reporting.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Iterator

INTRO = (
    "Models were asked which of two outcomes is better, and a utility was fitted to each outcome; utilities have mean 0 and "
    "standard deviation 1. A coherent model's choices follow from them. Coherence does not say whether preferences are good."
)
COLUMNS = (
    ("pairs", "pairs asked"),
    ("confidence", "confidence"),
    ("accuracy", "held-out accuracy"),
    ("log_loss", "log-loss"),
    ("soft_cycles", "cycles"),
    ("hard_cycles", "cycles of majorities"),
    ("order_consistency", "same in both orders"),
    ("lottery_r", "r of lotteries and expectations"),
)
SHARES = ("confidence", "accuracy", "soft_cycles", "hard_cycles", "order_consistency")
MOST = 40
"""Outcomes in table and figure, at most; beyond that the most and the least preferred ones."""


def _coherence(models: Mapping[str, Any]) -> Table:
    names = [(key, title) for key, title in COLUMNS if any(key in found for found in models.values())]
    rows = []
    for model, found in models.items():
        cells = [percent(found.get(key)) if key in SHARES else number(found.get(key)) for key, _ in names]
        rows.append([model, *cells])
    return Table("Coherence of choices", ("model", *(title for _, title in names)), rows)


def shown(utilities: Sequence[float], most: int = MOST) -> list[int]:
    """Outcomes in descending order of utility: all, or the first and last halves of `most`."""
    order = sorted(range(len(utilities)), key=lambda place: (-utilities[place], place))
    return order if len(order) <= most else [*order[: most - most // 2], *order[-(most // 2) :]]


def _utilities(outcomes: Sequence[str], models: Mapping[str, Any], reference: str) -> list[Block]:
    names = list(models)
    last = names[-1]
    order = shown(models[last]["mu"])
    rows = []
    for place in order:
        values = [number(round(models[name]["mu"][place], 2)) for name in names]
        change = models[last]["mu"][place] - models[reference]["mu"][place]
        rows.append([outcomes[place], *values, number(round(change, 2))])
    titles = ("outcome", *names, f"{last} less {reference}")
    dots = {name: [models[name]["mu"][place] for place in order] for name in names}
    caption = f"Utility of each outcome by model, in the order of {last}."
    figure = draw("utilities", caption, utility_dots, [outcomes[place] for place in order], dots)
    return [Figures([figure]), Table("Utilities", titles, rows, folded=True)]


def _moved(outcomes: Sequence[str], models: Mapping[str, Any], reference: str) -> Iterator[Text]:
    """A sentence per model on the outcomes whose utility changed most."""
    for name, found in models.items():
        if name == reference or found["mu"] == models[reference]["mu"]:
            continue
        changes = [one - other for one, other in zip(found["mu"], models[reference]["mu"], strict=True)]
        up, down = max(range(len(changes)), key=changes.__getitem__), min(range(len(changes)), key=changes.__getitem__)
        yield Text(
            f"{name} against {reference}: most preferred more, {outcomes[up]} ({changes[up]:+.2f}); less, {outcomes[down]} "
            f"({changes[down]:+.2f})."
        )


def _control(inputs: Inputs) -> list[Block]:
    found = (inputs.sft or {}).get("control")
    if not found:
        return []
    before, after = percent(found["agreement_before"]), percent(found["agreement_after"])
    return [
        Text(
            f"Control ({found['kind']}): after fine-tuning on {number(found['questions'])} pairs, choices agree with the "
            f"assembly on {after} of {number(found['held_out'])} held-out pairs, before on {before}."
        )
    ]


def utilities_section(inputs: Inputs) -> Section | None:
    """None unless models were asked, or sft controlled their preferences."""
    given, blocks = inputs.evaluation.get("utilities"), _control(inputs)
    if given:
        models, outcomes = given["models"], given["outcomes"]
        blocks.append(_coherence(models))
        if indifferent := [name for name, found in models.items() if found["indifferent"]]:
            text = f"All choices of {', '.join(indifferent)} are equally likely, so that its utilities mean nothing."
            blocks.append(Text(text, tone="note"))
        reference = "sft" if "sft" in models else next(iter(models))
        blocks += [*_moved(outcomes, models, reference), *_utilities(outcomes, models, reference)]
    return Section("utilities", "Preferences", INTRO, blocks) if blocks else None
