"""control: the lane's data sets, runs and page; reports/control/dvc.yaml runs them all.

`python -m stages.control data pendulum` makes a task's data sets, `run sac` all seeds of a method, `page` the page with learning
curves, comparisons and films. All read reports/control/params.yaml; `check` validates it and lists the methods. `time` says how
long each took here, and all together.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from stages import params
from stages.control.lane import timing
from stages.control.lane.settings import PARAMS, Lane, load_lane
from stages.control.one_run import REFUSED, exit_code
from stages.records.episode import read_json, write_json
from stages.runtime.command import command
from stages.runtime.cores import concurrent_runs
from stages.runtime.costs import measured, uptime
from stages.runtime.files import atomic_folder, atomic_text
from stages.runtime.parent import die_with_parent
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError, nearest
from stages.runtime.workers import quiet_environment
from stages.tracking import open_tracker

RUNS, RESULT, FILM = Path("reports/control/runs"), "result.json", "film.webp"
PAGE, RESULTS = Path("reports/control/page.html"), Path("reports/control/results.csv")
DATA, DATA_REPORTS = Path("data/control"), Path("reports/control/data")


def tracked(root: Path, name: str, settings: Any) -> Tracker:
    tracker = open_tracker(root, f"control.{name}", None, params.load_params(root / "params.yaml"))
    tracker.params({"control": settings.model_dump(mode="json")})
    return tracker


def make_data(root: Path, lane: Lane, name: str, began: float = 0.0) -> None:
    """Write data/control/<name>/<kind>-v0 and a summary of them. began: see `run_method`."""
    import shutil

    from stages.control.lane.runs import SCRATCH, code_of, digest
    from stages.control.offline.collecting import make
    from stages.control.offline.datasets import content_hash

    known(name, list(lane.data), "data set")
    settings = lane.data[name]
    scratch = root / SCRATCH / f"data-{name}-{digest(code_of(root))}"
    tracker = tracked(root, f"data.{name}", settings)
    status = "FAILED"
    try:
        with measured(root, timing.title(name, data=True), scratch.name, uptime() - began):
            made = make(root / DATA, name, settings, scratch)
        summary = {
            data.name: {
                "episodes": len(data.episodes),
                "steps": data.steps,
                "mean_return": data.mean_return,
                "sha256": content_hash(data.episodes),
            }
            for data in made
        }
        write_json(root / DATA_REPORTS / f"{name}.json", {"task": settings.off_policy.task, "sets": summary})
        for data in made:
            tracker.metric(f"data/{data.name}/mean_return", data.mean_return)
            print(f"control: {data.name}: {len(data.episodes)} episodes, mean return {data.mean_return:.1f}")
        status = "FINISHED"
    finally:
        tracker.close(status)
    shutil.rmtree(scratch, ignore_errors=True)


def run_method(root: Path, lane: Lane, name: str, workers: int, began: float = 0.0) -> None:
    """Write the folder reports/control/runs/<name>: result.json and, for tasks that can be drawn, film.webp. began: seconds that
    the process had run when the method's turn came; its time is counted from there."""
    import shutil

    from stages.control.lane.runs import one_thread, play_method, scratch_of

    known(name, list(lane.methods), "method")
    one_thread()
    scratch = scratch_of(root, lane, name)
    tracker = tracked(root, name, lane.methods[name])
    status = "FAILED"
    try:
        with measured(root, timing.title(name), scratch.name, uptime() - began):
            found = play_method(root, root / PARAMS, name, workers)
        tracker.metric("control/seconds", timing.seconds(root, timing.title(name)) or 0.0)
        film = found.pop("film")
        with atomic_folder(root / RUNS / name) as partial:
            write_json(partial / RESULT, found)
            if film:
                (partial / FILM).write_bytes(film)
        for place, step in enumerate(found["steps"]):
            returns = [run[place] for run in found["returns"]]
            tracker.metric("control/return", sum(returns) / len(returns), step)
        for figure, values in found["figures"].items():
            mean = sum(values) / len(values)
            tracker.metric(f"control/{figure}", mean)
            print(f"control: {name}: {figure} {mean:.4g} ({', '.join(f'{value:.4g}' for value in values)})")
        tracker.artifact(root / RUNS / name)
        status = "FINISHED"
    finally:
        tracker.close(status)
    shutil.rmtree(scratch, ignore_errors=True)


def known(name: str, names: list[str], what: str) -> None:
    if name not in names:
        raise ParamsError(f"there is no {what} {name} in {PARAMS}.{nearest(name, names)}")


def write_page(root: Path, lane: Lane) -> None:
    from stages.reporting.control_page import baselines, render_control_page, results_table

    missing = [name for name in lane.methods if not (root / RUNS / name / RESULT).exists()]
    if missing:
        raise ParamsError(f"not run yet: {', '.join(missing)}; python -m stages.control run {' '.join(missing)}")
    runs = {name: read_json(root / RUNS / name / RESULT) for name in lane.methods}
    drawn = {name: root / RUNS / name / FILM for name in lane.methods}
    films = {name: path.read_bytes() for name, path in drawn.items() if path.exists()}
    data = {name: read_json(root / DATA_REPORTS / f"{name}.json") for name in lane.data}
    atomic_text(root / PAGE, render_control_page(lane, runs, films, data))
    atomic_text(root / RESULTS, results_table(runs, baselines(lane, runs)))
    print(f"control: wrote {PAGE} and {RESULTS}")


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.control", description=(__doc__ or "").strip())
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("data", help="make data sets").add_argument("names", nargs="+", metavar="NAME")
    run = commands.add_parser("run", help="run methods with all seeds")
    run.add_argument("names", nargs="+", metavar="METHOD")
    run.add_argument("--workers", type=int, default=concurrent_runs("cpu"), help="runs at once; changes time alone")
    commands.add_parser("page", help="write the page")
    commands.add_parser("check", help="validate the settings")
    commands.add_parser("time", help="how long everything took here")
    options = parser.parse_args()
    die_with_parent()
    quiet_environment(1)
    return exit_code("control", lambda: act(Path.cwd(), options), (*REFUSED, ValueError))


def act(root: Path, options: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    lane = load_lane(root / PARAMS)
    if options.command == "check":
        print("\n".join(f"{name}: {method.problem}" for name, method in lane.methods.items()))
    elif options.command == "data":
        began = 0.0
        for name in options.names:
            make_data(root, lane, name, began)
            began = uptime()
    elif options.command == "run":
        began = 0.0
        for name in options.names:
            run_method(root, lane, name, options.workers, began)
            began = uptime()
    elif options.command == "time":
        print(timing.table(root, lane))
    else:
        with measured(root, timing.title(timing.PAGE), timing.PAGE, uptime()):
            write_page(root, lane)


if __name__ == "__main__":
    raise SystemExit(main())
