"""Whether a model takes the alias `champion`: the paired test against the champion on the frozen panels.

Rule: better on at least one panel and worse on none, by `compare` (the confidence interval of the difference excludes zero and
the sign-flip test is significant). Without a champion, the model is compared with the SFT policy (`sft`) it was trained from.
Models evaluated on different panels are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Rows = Sequence[Mapping[str, Any]]
"""Evaluation rows of one model, on all its panels."""


@dataclass(frozen=True)
class Decision:
    promoted: bool
    lines: tuple[str, ...]
    """One line for each panel, and last the conclusion."""

    @property
    def conclusion(self) -> str:
        return self.lines[-1]


def rows_of(rows: Rows, model: str) -> list[Mapping[str, Any]]:
    """Raises ValueError if there are none."""
    found = [row for row in rows if row["model"] == model]
    if not found:
        raise ValueError(f"the evaluation has no rows of model {model!r}, only of {sorted({row['model'] for row in rows})}")
    return found


def panels_of(rows: Rows) -> dict[str, str]:
    """Domain -> hash of the panel the rows were played on."""
    return {row["domain"]: row["panel"] for row in sorted(rows, key=lambda row: row["domain"])}


def decide(challenger: Rows, holder: Rows, name: str, settings: Mapping[str, Any]) -> Decision:
    """`challenger` against `holder`, whom the lines call `name`; settings: confidence, resamples, seed."""
    from stages.evaluation.summary import compare_models

    ours, theirs = panels_of(challenger), panels_of(holder)
    if ours != theirs:
        differ = sorted(domain for domain in {*ours, *theirs} if ours.get(domain) != theirs.get(domain))
        none = "not played"
        details = ", ".join(f"{domain} {ours.get(domain, none)} here, {theirs.get(domain, none)} there" for domain in differ)
        return Decision(
            False, (f"not promoted: {name} was evaluated on other panels ({details}), so the two cannot be compared",)
        )
    verdicts, lines, tests = [], [], []
    for domain in ours:
        new, held = ([row for row in rows if row["domain"] == domain] for rows in (challenger, holder))
        found = compare_models(new, held, settings["confidence"], settings["resamples"], settings["seed"])
        verdicts.append(found["verdict"])
        interval = f"{100 * settings['confidence']:g} % CI {100 * found['low']:+z.1f} to {100 * found['high']:+z.1f}"
        tests.append(f"{domain}: p = {found['p']:.3f}, {interval} points")
        lines.append(
            f"{domain}: {100 * found['difference']:+z.1f} points against {name}, {found['verdict']} "
            f"({interval}, p = {found['p']:.3f}, n = {found['n']} tasks)"
        )
    if "worse" in verdicts:
        return Decision(False, (*lines, f"not promoted: worse than {name} on {_where(ours, verdicts, 'worse')}"))
    if "better" in verdicts:
        where = _where(ours, verdicts, "better")
        return Decision(True, (*lines, f"promoted: better than {name} on {where} and worse on no panel"))
    return Decision(False, (*lines, f"not promoted: no significant difference from {name} on any panel ({'; '.join(tests)})"))


def _where(panels: Mapping[str, str], verdicts: Sequence[str], which: str) -> str:
    return ", ".join(domain for domain, verdict in zip(panels, verdicts, strict=True) if verdict == which)
