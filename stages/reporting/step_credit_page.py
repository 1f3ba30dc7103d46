"""The page reports/claims/step_credit_exact.md and its figure: agreement with exact advantages, and learning speed.

From reports/claims/step_credit_exact.json (python -m stages.claims.step_credit) and reports/claims/step_credit.json (runs of the
experiment); written by `python -m stages.reporting.documents`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER, load_experiment
from stages.claims.results import result_path
from stages.claims.step_credit import RESULT, SLUG
from stages.records.episode import read_json
from stages.reporting.generated_blocks import markdown_table
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
    """`metric` of each arm's finished runs, by seed; {} if the experiment has changed since."""
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
    """One row per method; `learnt`, `ends`: success during training and on the panel afterwards."""
    header = (
        *("method", "correlation with the exact advantage (95 % CI)", "correct sign", "merged steps", "steps", "calls"),
        *("success during training: mean (per seed)", "success on the panel: mean (per seed)"),
    )
    rows = []
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
        rows.append(cells)
    return markdown_table(header, rows)


def figure(exact: Mapping[str, Any], learnt: Mapping[str, list[float]]) -> str:
    """Left: correlations with intervals. Right: success during training, a dot per run. As an SVG file."""
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
        label = "success during training, % (a dot per run)" if learnt else "success during training: not run yet"
        right.set_xlabel(label, loc="left")
        return to_svg(drawn, "step-credit", "Step credit: agreement with exact advantages, and success", standalone=True).text


def files(root: Path) -> dict[Path, str]:
    """Page and figure by path relative to `root`; {} before the advantages were compared."""
    if not (root / RESULT).exists():
        return {}
    exact, experiment = read_json(root / RESULT), load_experiment(root / FOLDER / f"{SLUG}.yaml")
    path = result_path(root, SLUG)
    saved = read_json(path) if path.exists() else None
    learnt, ends = (learning(saved, experiment.fixed, metric) for metric in (SPEED, END))
    text = (
        "# Which steps get the credit\n\n"
        f"`python -m stages.claims.step_credit` compares the advantages, `make claims METHOD={SLUG}` runs the training; written "
        "by `python -m stages.reporting.documents`.\n\n"
        f"The SFT policy played {exact['episodes']:,} episodes in independent groups and as many in branching groups, on "
        f"{exact['tasks']} training tasks of keydoor that it sometimes solves ({100 * exact['success']:.0f} % of the independent "
        "episodes). The exact advantage of a step is Q(s, a) − V(s), computed by dynamic programming with the turn limit, for "
        f"the policy estimated from action counts per state in {exact['counted']:,} further episodes of the SFT policy. *Correct "
        "sign*: share of steps with |exact advantage| > 0.02 whose estimated advantage has the same sign (0 has none). "
        "Intervals are over tasks. *ARPO, soft* is the outcome's advantage on branching episodes. *Steps* counts a step shared "
        "by several branches once per branch, *calls* once. Success during training is over each method's own episodes; "
        "branching oversamples uncertain states there, so compare success on the panel instead. "
        f"Commit `{exact['commit'][:12]}`.\n\n"
        f"{table(exact, learnt, ends)}\n\n![Correlation with the exact advantages, and success during training]({FIGURE.name})\n"
    )
    return {PAGE: text, FIGURE: figure(exact, learnt)}
