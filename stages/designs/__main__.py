"""design: one step of a search over agent designs; `python -m flows.design` takes all of them.

Says, as JSON, what is to be evaluated next and in which folder `python -m stages.evaluate` is to do it; `--ended SECONDS` takes
up what was evaluated there, `--failed WHY` that it could not be. In the end: reports/design/<method>.json, read by the report,
and <method>.yaml, the best design, to be written into params.yaml by `python -m stages.params --apply`.
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
    """Write the results, and tell MLflow of them where they are new; what to say of them."""
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
    parser.add_argument("--ended", type=float, metavar="SECONDS", help="the evaluation under way has ended, after so long")
    parser.add_argument("--failed", default="", metavar="WHY", help="... and the design could not be run")
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
