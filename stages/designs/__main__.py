"""design: one step of a search over agent designs; `python -m flows.design` runs all of them.

Prints, as JSON, the next design and the folder in which to run `python -m stages.evaluate`; `--ended SECONDS` collects its
result, `--failed WHY` records that the design was rejected. The last step writes reports/design/<method>.json, read by the
report, and <method>.yaml, the best design, which `python -m stages.params --apply` writes into params.yaml.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stages.designs.evaluations import DesignEvaluations
from stages.designs.session import RESULTS, Session
from stages.designs.settings import SearchParams, load_search
from stages.designs.space import Space
from stages.records.episode import read_json, write_json
from stages.runtime.command import command
from stages.runtime.files import atomic_text
from stages.runtime.parent import die_with_parent
from stages.runtime.stage import BAD_PARAMETERS, FAILED
from stages.runtime.validation import ParamsError
from stages.runtime.workers import quiet_environment
from stages.tracking import open_tracker


def finish(root: Path, session: Session, params: SearchParams) -> dict[str, Any]:
    """Write the results, and log them to MLflow if they are new; a summary of them."""
    results, path = session.results(), root / RESULTS / f"{params.design.method}.json"
    if not path.exists() or read_json(path) != results:
        write_json(path, results)
        atomic_text(path.with_suffix(".yaml"), results["overlay"])
        log(root, params, results, path)
    panel = results["panel"]
    return {
        "kind": "done",
        "result": str(path.relative_to(root)),
        "overlay": str(path.with_suffix(".yaml").relative_to(root)),
        "label": results["winner"]["label"],
        "panel": {name: panel[name] for name in ("default", "winner")},
        "domains": panel["domains"],
    }


def log(root: Path, params: SearchParams, results: Mapping[str, Any], path: Path) -> None:
    tracker = open_tracker(root, "design", None, params)
    tracker.params({"design": params.design.model_dump(mode="json")})
    for number, (node, best) in enumerate(zip(results["nodes"], results["best"], strict=True), start=1):
        tracker.metric("design/score", node["score"], number)
        tracker.metric("design/best", best, number)
    for name in ("default", "winner"):
        tracker.metric(f"design/panel/{name}", results["panel"][name])
    tracker.artifact(path)
    tracker.close("FINISHED")


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.designs", description=(__doc__ or "").strip())
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="overrides for this search, such as design.budget=20",
    )
    parser.add_argument("--ended", type=float, metavar="SECONDS", help="the pending evaluation has ended after SECONDS")
    parser.add_argument("--failed", default="", metavar="WHY", help="... because the stage rejected the design")
    options = parser.parse_args()
    die_with_parent()
    root = Path.cwd()
    try:
        values, params = load_search(root, options.set)
        quiet_environment(1, not params.model.path.startswith("hub:"))
        session = Session(DesignEvaluations.open(root, values, params, Space.of(params)))
        step = session.step(options.ended, options.failed)
        print(json.dumps(step if step is not None else finish(root, session, params)))
    except (ParamsError, ValueError, FileNotFoundError) as error:
        print(f"design: {error}", file=sys.stderr)
        return BAD_PARAMETERS
    except OSError as error:
        print(f"design: {error}", file=sys.stderr)
        return FAILED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
