"""Lane control's results, in a file that the report reads: a summary of reports/control/results.csv."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.control.problems import PROBLEMS

LANE = Path("reports/control/results.csv")
"""As `stages.reporting.control_page.results_table` writes it."""
FILE = Path("reports") / "control.json"
"""Outside reports/control: an input of the report stage, which does not depend on the lane."""
END, IMPROVEMENT = "end of runs", "improvement over "
"""Figures of LANE whose lowest and highest are the ends of a 95 % interval; of all others they are over seeds."""
CURVE = "return at "
"""Begins the figures that are points of a learning curve."""


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Method -> its problem and task, and its figures: name -> mean, lowest, highest. Raises ValueError for another file."""
    found: dict[str, dict[str, Any]] = {}
    with path.open(encoding="utf-8", newline="") as handle:
        for line, row in enumerate(csv.DictReader(handle), start=2):
            try:
                figure = {name: float(row[name]) for name in ("mean", "lowest", "highest")}
                own = found.setdefault(row["method"], {"problem": row["problem"], "task": row["task"], "figures": {}})
                own["figures"][row["figure"]] = figure
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {line} is no figure of a method ({error}); run `make control` again") from error
    return found


def entry(method: str, results: Mapping[str, Any]) -> dict[str, Any]:
    """One method's line. Of one that is played: how its runs end, how probably one ends higher than one of its baseline, and the
    critics' over-estimation; of one on a problem that is evaluated exactly: the problem's main figures."""
    figures = results["figures"]
    played = any(name.startswith(CURVE) for name in figures)
    over = next((name for name in figures if name.startswith(IMPROVEMENT)), None)
    main = [name.partition(".")[2] for name in PROBLEMS[results["problem"]].metrics] if results["problem"] in PROBLEMS else []
    return {
        **{"method": method, "problem": results["problem"], "task": results["task"], "played": played},
        "end": figures.get(END, figures.get("return_end")) if played else None,
        "baseline": over.removeprefix(IMPROVEMENT) if over else None,
        "improvement": figures[over] if over else None,
        "overestimation": figures.get("overestimation") if played else None,
        "figures": {} if played else {name: figures[name] for name in main if name in figures},
    }


def files(root: Path) -> dict[Path, str]:
    """FILE and its content; nothing before the lane has run. Raises ValueError for a damaged file."""
    if not (root / LANE).exists():
        return {}
    methods = [entry(method, results) for method, results in read_results(root / LANE).items()]
    return {FILE: json.dumps({"methods": methods}, indent=1, ensure_ascii=False) + "\n"}
