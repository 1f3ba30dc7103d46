"""What each stage of the default run added, and what it cost: a block of docs/results.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER, load_experiment
from stages.reporting.blocks import number
from stages.reporting.board.rows import saved_results
from stages.reporting.generated_blocks import link, markdown_table
from stages.reporting.kept import Run, total
from stages.reporting.results import find_comparison, signed, success, worth
from stages.reporting.tree_life import ARMS, RATES, SLUGS, TOGETHER, judged_success
from stages.runtime.speed import duration

GAINS = {"sft": ("base", "sft"), "rl": ("sft", "rl@{domain}"), "merge": ("rl@{domain}", "merged")}
"""Stage -> the models before and after it."""
STAGES = ("curate", "sft", "rollout", "annotate", "rl", "merge", "evaluate")
NOTHING = "–"


def _gain(evaluation: Mapping[str, Any], stage: str, domain: str) -> str:
    """`24.2 → 49.8 % (+17.2 to +34.2)`: success before and after the stage, and the interval of the paired difference."""
    if stage not in GAINS:
        return NOTHING
    before, after = (model.format(domain=domain) for model in GAINS[stage])
    ends = [success(evaluation, model, domain) for model in (before, after)]
    found = find_comparison(evaluation, after, before, domain)
    if ends[0] is None or ends[1] is None or found is None:
        return NOTHING
    low, high = (signed(100 * found[end]) for end in ("low", "high"))
    return f"{100 * ends[0].mean:.1f} → {100 * ends[1].mean:.1f} % ({low} to {high})"


def run_of(evaluation: Mapping[str, Any], kept: Sequence[Run]) -> Run | None:
    """The newest kept run with this evaluation's results; None if there is none."""

    def same(run: Run) -> bool:
        return run.panels == evaluation["panels"] and all(
            run.success.get(model, {}).get(domain) is not None and run.success[model][domain].mean == row["success"]["mean"]
            for model, by_domain in evaluation["models"].items()
            for domain, row in by_domain.items()
        )

    return next((run for run in reversed(kept) if same(run)), None)


def _cost(run: Run | None, stage: str) -> list[str]:
    """Environment steps and time of a stage, all domains together."""
    if run is None:
        return [NOTHING, NOTHING]
    steps = total([work for name, work in run.work.items() if name.partition("@")[0] == stage], "environment_steps")
    times = [found.seconds for name, found in run.measured.items() if name.partition("@")[0] == stage]
    return [number(steps), duration(sum(times)) if times else NOTHING]


def _worth(root: Path, slug: str, document: Path) -> str:
    """What the stages without a gain of their own were worth in an experiment on the life; "" without its results."""
    path = root / FOLDER / f"{slug}.yaml"
    experiment = load_experiment(path) if path.exists() else None
    saved = None if experiment is None else saved_results(root, slug, experiment)
    if experiment is None or saved is None:
        return ""
    judged = judged_success(saved)
    of_rollout = judged.get(RATES)
    known = [judged[arm, TOGETHER] for arm, (_, trees) in ARMS.items() if trees and (arm, TOGETHER) in judged]
    if of_rollout is None or not known:
        return ""
    best = max(known, key=lambda claim: claim["difference"])
    return (
        f"On {experiment.environment}, choosing tasks by rollout's success rates is worth {worth(of_rollout)}, and the best "
        f"use of annotate's trees, {ARMS[best['arm']][0]}, {worth(best)} against playing their steps as episodes "
        f"([{slug}]({link(FOLDER / f'{slug}.md', document)}))."
    )


def _off(root: Path, document: Path) -> str:
    """Why the default run plays no rollouts and grows no trees; "" without results of the experiments on the life."""
    found = [text for slug in SLUGS if (text := _worth(root, slug, document))]
    if not found:
        return ""
    start = "`rollout` and `annotate` change no model themselves."
    return " ".join([start, *found, "So both are off by default; `rollout.tasks: 96` and `annotate.tasks: 48` switch them on."])


def block(root: Path, evaluation: Mapping[str, Any], domains: Sequence[str], kept: Sequence[Run], document: Path) -> str:
    """Markdown: a row per stage, with success before and after it on each domain, and its cost."""
    run = run_of(evaluation, kept)
    rows = [
        [f"`{stage}`", *(_gain(evaluation, stage, domain) for domain in domains), *_cost(run, stage)]
        for stage in STAGES
        if stage in GAINS or run is not None
    ]
    header = ("stage", *(f"{domain}: before → after (interval)" for domain in domains), "environment steps", "time")
    table = markdown_table(header, rows, "l" + "r" * (len(domains) + 2))
    return "\n\n".join(filter(None, (table, _off(root, document))))
