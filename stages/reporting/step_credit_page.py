"""The page reports/claims/step_credit_exact.md and its figure: agreement with exact advantages, and speed of learning.

From reports/claims/step_credit_exact.json (python -m stages.claims.step_credit) and reports/claims/step_credit.json (the runs of
the experiment); written with the other generated pages by `python -m stages.reporting.documents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER, load_experiment
from stages.claims.results import result_path
from stages.claims.step_credit import RESULT, SLUG
from stages.records.episode import read_json
from stages.reporting.style import colour, drawing, new_figure, to_svg

PAGE = FOLDER / "step_credit_exact.md"
FIGURE = FOLDER / "step_credit.svg"
NAMES = {
    "outcome": "outcome broadcast",
    "salt": "SALT",
    "annotated": "annotated value model",
    "arpo_soft": "ARPO, soft",
    "arpo_hard": "ARPO, hard",
}
SPEED, END = "history.success.mean", "panel.success"
NOTHING = "–"


def learning(saved: Mapping[str, Any] | None, fixed: str, metric: str) -> dict[str, list[float]]:
    """`metric` of each arm's finished runs, by seed; none if the experiment has changed since."""
    found: dict[str, list[float]] = {}
    if saved is None or saved["fixed"] != fixed:
        return found
    for name, run in sorted(saved["runs"].items()):
        found.setdefault(name.split("/")[0], []).append(float(run["metrics"][metric]))
    return found


def _shares(values: list[float]) -> str:
    if not values:
        return NOTHING
    each = ", ".join(f"{100 * value:.1f}" for value in values)
    return f"{100 * sum(values) / len(values):.1f} % ({each})"


def table(exact: Mapping[str, Any], learnt: Mapping[str, list[float]], ends: Mapping[str, list[float]]) -> str:
    """One row per method; `learnt`, `ends`: success while training and on the panel afterwards."""
    lines = [
        "| method | correlation with the exact advantage (95 % interval) | right sign | merged steps | steps | calls | "
        "success while training: mean (per seed) | success on the panel afterwards: mean (per seed) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, label in NAMES.items():
        one = exact["methods"][name]
        cells = (
            label,
            f"{one['correlation']:.3f} ({one['low']:.3f} to {one['high']:.3f})",
            f"{100 * one['same_sign']:.0f} %",
            f"{100 * one['merged_steps']:.0f} %" if one["merged_steps"] else NOTHING,
            f"{one['steps']:,}",
            f"{one['calls']:,}",
            _shares(learnt.get(name, [])),
            _shares(ends.get(name, [])),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def figure(exact: Mapping[str, Any], learnt: Mapping[str, list[float]]) -> str:
    """Correlations with intervals, and next to them one dot per run's speed, as an SVG file."""
    with drawing():
        drawn, axes = new_figure((8.6, 2.7), columns=2, sharey=True)
        left, right = axes[0]
        for place, name in enumerate(NAMES):
            one = exact["methods"][name]
            left.barh(place, one["correlation"], height=0.6, color=colour("sft"))
            left.plot([one["low"], one["high"]], [place, place], color=colour("ink"), linewidth=1.4)
            values = [100 * value for value in learnt.get(name, [])]
            right.plot(values, [place] * len(values), "o", color=colour("domain0"), markersize=4.5)
            if values:
                right.plot([sum(values) / len(values)] * 2, [place - 0.3, place + 0.3], color=colour("ink"), linewidth=1.4)
        left.axvline(0, color=colour("muted"), linewidth=1)
        left.set_yticks(range(len(NAMES)), list(NAMES.values()))
        left.set_ylim(len(NAMES) - 0.4, -0.6)
        left.grid(axis="y", visible=False)
        left.set_xlabel("correlation with the exact advantage", loc="left")
        right.set_xlabel(
            "success while training, %: a dot per run" if learnt else "success while training: not run yet", loc="left"
        )
        return to_svg(drawn, "step-credit", "Step credit: agreement with exact advantages, and success", standalone=True).text


def files(root: Path) -> dict[Path, str]:
    """Page and figure by path relative to `root`; none before the advantages were compared."""
    if not (root / RESULT).exists():
        return {}
    exact, experiment = read_json(root / RESULT), load_experiment(root / FOLDER / f"{SLUG}.yaml")
    path = result_path(root, SLUG)
    saved = read_json(path) if path.exists() else None
    learnt, ends = (learning(saved, experiment.fixed, metric) for metric in (SPEED, END))
    text = (
        "# Which steps get the credit\n\n"
        f"`python -m stages.claims.step_credit` compared the advantages, `make claims METHOD={SLUG}` runs the training; written "
        "by `python -m stages.reporting.documents`.\n\n"
        f"The SFT policy played {exact['episodes']:,} episodes in groups of independent ones and as many in groups that "
        f"branch, on {exact['tasks']} training tasks of keydoor that it solves sometimes ({100 * exact['success']:.0f} % of the "
        "independent episodes). The exact advantage of a step is Q(s, a) − V(s) by dynamic programming, the turn limit "
        f"included, under the policy that the action counts of {exact['counted']:,} further episodes of the SFT policy give for "
        "each state. *Right sign*: of the steps whose exact advantage is above 0.02 in size, those whose advantage has its sign; "
        "0 has none. Intervals are over tasks. *ARPO, soft* is the outcome's advantage on the episodes that branch. A step that "
        "branches share counts in each of them; *calls* are the actions that were played, those once. Success while training is "
        "over the episodes of each method, in which groups that branch have more of what is uncertain: to compare those look at "
        f"the panel. Commit `{exact['commit'][:12]}`.\n\n"
        f"{table(exact, learnt, ends)}\n\n![Correlation with the exact advantages, and success while training]({FIGURE.name})\n"
    )
    return {PAGE: text, FIGURE: figure(exact, learnt)}
