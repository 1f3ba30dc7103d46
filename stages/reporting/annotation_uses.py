"""The board's verdicts on the uses of annotations, in the file that the report quotes them from."""

from __future__ import annotations

import json
from pathlib import Path

from stages.claims.experiment import FOLDER, load_experiment
from stages.reporting import board

SLUGS = ("annotation_uses", "step_q_search")
"""Experiments on one environment and with equally many seeds: what rl makes of annotations, and what evaluation does."""
ARMS = (("step_q", "regression_value_init"),)
"""Single arms of other experiments on that environment, whose claims are told too: what a Q-model makes of the value model."""
FILE = Path("reports") / "annotation_uses.json"
"""Beside the board, since the report is an output of the lifecycle, and the board's own results are not."""
WITHOUT = ("none", "critic", "logprob")
"""Arms that make no use of annotations at the same cost, to measure gains against."""
CHEAPER = ("sampling", "start")
"""Arms that make no use of them either, and cost less: a claim against them may hold without a gain."""


def files(root: Path) -> dict[Path, str]:
    """FILE and what it should hold: every claim with its state, those that have not been run among them."""
    claims = [
        {
            "checked": row.claim.checked if row.state == "not reproduced" else None,
            "difference": row.difference,
            "cheaper": row.claim.against in CHEAPER,
            "gain": row.claim.against in WITHOUT and row.claim.threshold > 0,
            "says": row.claim.says,
            "state": row.state,
        }
        for row in board.rows(root)
        if row.slug in SLUGS or (row.slug, row.claim.arm) in ARMS
    ]
    experiment = load_experiment(root / FOLDER / f"{SLUGS[0]}.yaml")
    assert experiment.budget is not None
    told = {
        "claims": claims,
        "environment": experiment.environment,
        "environment_steps": experiment.budget.environment_steps,
        "seeds": len(experiment.seeds),
    }
    return {FILE: json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n"}
