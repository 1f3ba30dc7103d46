"""The board's verdicts on the uses of annotations, and what each bought, in a file that the report reads."""

from __future__ import annotations

import json
from pathlib import Path

from stages.claims.experiment import FOLDER, load_experiment
from stages.reporting import tree_life
from stages.reporting.board.rows import rows, seeds_done

SLUGS = ("annotation_uses", "step_q_search")
"""Experiments on one environment with the same number of seeds: uses of annotations in rl and in evaluation."""
ARMS = (("step_q", "regression_value_init"),)
"""(experiment, arm) of further claims on that environment: a Q-model initialised from the value model."""
FILE = Path("reports") / "annotation_uses.json"
"""Outside reports/claims: an input of the report stage, which does not depend on the board."""
WITHOUT = ("none", "critic", "logprob")
"""Baseline arms of equal cost without annotations: a reproduced claim against one of these is a gain."""
CHEAPER = ("sampling", "start")
"""Baseline arms without annotations that cost less: a reproduced claim against one of these is not yet a gain."""


def files(root: Path) -> dict[Path, str]:
    """FILE and its content: every claim with its state."""
    found = [row for row in rows(root) if row.slug in SLUGS or (row.slug, row.claim.arm) in ARMS]
    claims = [
        {
            "checked": row.claim.checked if row.state == "not reproduced" else None,
            "difference": row.difference,
            "cheaper": row.claim.against in CHEAPER,
            "gain": row.claim.against in WITHOUT and row.claim.kind == "superiority",
            "says": row.claim.says,
            "state": row.state,
        }
        for row in found
    ]
    experiment = load_experiment(root / FOLDER / f"{SLUGS[0]}.yaml")
    assert experiment.budget is not None
    content = {
        "claims": claims,
        "environment": experiment.environment,
        "environment_steps": experiment.budget.environment_steps,
        "lives": [life for slug in tree_life.SLUGS if (life := tree_life.bought(root, slug))],
        "seeds": max((row.result["seeds"] or seeds_done(row.experiment, row.result) for row in found if row.result), default=0),
    }
    return {FILE: json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"}
