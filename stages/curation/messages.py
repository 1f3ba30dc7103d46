"""What curation prints about records and tasks."""

from __future__ import annotations

import sys
from collections.abc import Iterable

MOST_WARNINGS = 40


def warn(title: str, lines: Iterable[object], report: str) -> None:
    """Print the first MOST_WARNINGS lines to standard error, after the stage's title (`curate@search`), and the number of others,
    whose reasons `report` counts."""
    found = list(lines)
    left = len(found) - MOST_WARNINGS
    for line in [*found[:MOST_WARNINGS], *([f"{left} more; {report} counts reasons"] if left > 0 else [])]:
        print(f"{title}: {line}", file=sys.stderr)
