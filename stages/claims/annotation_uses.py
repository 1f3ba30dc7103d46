"""The board's verdicts on the uses of annotations, in the file that the report quotes them from."""

from __future__ import annotations

import json
from pathlib import Path

from stages.claims import board

SLUG = "annotation_uses"
FILE = Path("reports") / "annotation_uses.json"
"""Beside the board, since the report is an output of the lifecycle, and the board's own results are not."""
WITHOUT = ("none", "critic")
"""Arms that make no use of annotations, to measure gains against."""


def files(root: Path) -> dict[Path, str]:
    """FILE and what it should hold; {} where the board has no such experiment or it has not run to its end."""
    rows = [row for row in board.rows(root) if row.slug == SLUG]
    if not rows or any(row.result is None or not row.result["verdict"] for row in rows):
        return {}
    experiment = rows[0].experiment
    claims = [
        {
            "says": row.claim.says,
            "state": row.state,
            "difference": row.difference,
            "gain": row.claim.against in WITHOUT and row.claim.threshold > 0,
        }
        for row in rows
    ]
    assert experiment.budget is not None
    told = {
        "claims": claims,
        "environment": experiment.environment,
        "environment_steps": experiment.budget.environment_steps,
        "seeds": len(experiment.seeds),
    }
    return {FILE: json.dumps(told, indent=2, sort_keys=True, ensure_ascii=False) + "\n"}
