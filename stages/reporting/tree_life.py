"""What each use of annotate's trees bought in the experiments on the life: success, environment steps and seconds, by arm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from stages.claims.experiment import FOLDER, load_experiment
from stages.claims.results import Results
from stages.reporting.board.rows import saved_results

SLUGS = ("lifecycle", "lifecycle_textworld", "lifecycle_keydoor")
"""Experiments with the same arms, each on its environment."""
ALONE, TOGETHER = "rl", "rl_more"
"""The arm without trees, and the one that plays the trees' environment steps as further episodes."""
ARMS = {
    ALONE: ("RL without trees", False),
    TOGETHER: ("RL that plays the trees' steps as further episodes", False),
    "filtered_bc": ("cloning successes of its own episodes, with the trees' steps", False),
    "paths": ("cloning the trees' correct paths before RL", True),
    "step_dpo": ("step-DPO on the trees' pairs before RL", True),
    "credit": ("step credit from the trees' value model", True),
    "paths_credit": ("correct paths and step credit", True),
}
"""Arm -> what it does, and whether it needs the trees beside its own episodes."""
RATES = (ALONE, "without_rollout")
"""The arms whose difference is what the success rates that rollout measured are worth."""
REACHED = "history.steps_to_success."


def judged_success(saved: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(arm, the arm it is compared with) -> the judged claim on success afterwards."""
    return {
        (claim["arm"], claim["against"]): claim
        for claim in saved["claims"]
        if claim["metric"] == "panel.success" and claim["difference"] is not None
    }


def bought(root: Path, slug: str) -> dict[str, Any] | None:
    """Means over the seeds that all arms have; None without the experiment or such seeds. A number is None if a run lacks it.

    `tree_steps`: environment steps of the trees, by which the budget of `TOGETHER` is larger. `steps`: environment steps of RL
    until the success of `target` per cent. `seconds`: of processors, for RL and the evaluation. `rates`: what `RATES` differ by,
    where that has been judged.
    """
    path = root / FOLDER / f"{slug}.yaml"
    experiment = load_experiment(path) if path.exists() else None
    saved = None if experiment is None else saved_results(root, slug, experiment)
    if experiment is None or experiment.budget is None or saved is None:
        return None
    results = Results.load(root, slug)
    seeds = [seed for seed in experiment.seeds if all(f"{arm}/{seed}" in results.outcomes for arm in ARMS)]
    target = next((name for name in experiment.measured if name.startswith(REACHED)), None)
    if not seeds or target is None:
        return None

    def mean(arm: str, metric: str) -> float | None:
        found = [results.value(f"{arm}/{seed}", metric) for seed in seeds]
        known = [one for one in found if one is not None]
        return round(fmean(known), 6) if len(known) == len(found) else None

    rates = judged_success(saved).get(RATES)
    played = [mean(arm, "report.environment_steps") for arm in (ALONE, TOGETHER)]
    return {
        "slug": slug,
        "environment": experiment.environment,
        "environment_steps": experiment.budget.environment_steps,
        "seeds": len(seeds),
        "target": int(target.removeprefix(REACHED)),
        "tree_steps": None if played[0] is None or played[1] is None else round(played[1] - played[0]),
        "rates": rates and {name: rates[name] for name in ("difference", "low", "high", "effect")},
        "arms": [
            {
                "use": use,
                "trees": trees,
                "success": mean(arm, "panel.success"),
                "curve": mean(arm, "history.success.mean"),
                "steps": mean(arm, target),
                "seconds": round(fmean(results.outcomes[f"{arm}/{seed}"]["seconds"] for seed in seeds), 1),
            }
            for arm, (use, trees) in ARMS.items()
        ],
    }
