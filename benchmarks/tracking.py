"""tracking_stage_seconds: what tracking adds to a stage, against the limit that was set for it.

The same process is timed with tracking on and off: a loop like a stage's, whose steps compute on all threads and log 25 metrics
each, with sample episodes, a file, and the follower that sends all of it to a local store beside it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Options, Result, Sample
from benchmarks.startup import environment, run
from stages.tracking.spool import locked, spools

LIMIT_S = 3.0
STEPS, QUICK_STEPS, METRICS, EPISODES = 150, 3, 25, 8
SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from stages.params import load_params
from stages.tracking import open_tracker

steps, metrics, episodes = (int(value) for value in sys.argv[2:5])
root = Path.cwd()
tracker = open_tracker(root, "rl", "search", load_params(Path(sys.argv[1])))
work = np.random.default_rng(0).random((900, 900), dtype=np.float32)
for step in range(steps):
    np.linalg.norm(work @ work @ work @ work)
    for number in range(metrics):
        tracker.metric(f"metric_{number}", number / (step + 1), step)
turn = {"action": "search a", "observation": "b " * 100, "reward": 0.0, "accepted": True, "cost": 1.0, "start": 1, "end": 3}
row = {"task_id": "t", "domain": "search", "turns": [turn] * 6, "token_ids": [1] * 40, "logprob": [-0.5] * 40,
       "advantages": [0.5] * 40, "reward": 1.0, "truncated": False, "stop_reason": "terminated",
       "messages": [{"role": "user", "content": "a question"}]}
tracker.episodes([{**row, "episode_id": str(number)} for number in range(episodes)], "benchmark", episodes)
(root / "history.csv").write_text("step\\n")
tracker.artifact(root / "history.csv")
tracker.close("FINISHED")
"""


def once(options: Options, folder: Path, on: bool) -> Sample:
    steps = QUICK_STEPS if options.quick else STEPS
    command = [sys.executable, "-c", SCRIPT, str(options.root / "params.yaml"), str(steps), str(METRICS), str(EPISODES)]
    switch = {"BELLWETHER_TRACKING": "on" if on else "off", "PYTHONPATH": str(options.root)}
    sample, _ = run(
        ["env", "-u", "MLFLOW_TRACKING_URI", *(f"{name}={value}" for name, value in switch.items()), *command], folder
    )
    settle(options, folder)
    return sample


def settle(options: Options, folder: Path) -> None:
    """Wait for what the follower still sends, and send what it left: neither may fall into the next run."""
    own = {**environment(options.root), "BELLWETHER_TRACKING": "on"}
    own.pop("MLFLOW_TRACKING_URI", None)
    while waiting := spools(folder):
        with locked(waiting[0].path.with_suffix(".lock"), wait=True):  # the follower holds it as long as it sends
            left = waiting[0].path.exists()
        if left:
            subprocess.run(
                [sys.executable, "-m", "stages.tracking", "--replay"], cwd=folder, env=own, capture_output=True, check=False
            )


def measure(options: Options) -> dict[str, Result]:
    folder = options.scratch / "tracked"
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    for repeat in range(options.warm_ups + options.times):
        order = (False, True) if repeat % 2 else (True, False)
        pair = {on: once(options, folder, on) for on in order}
        if repeat >= options.warm_ups:
            samples.append(Sample(1.0, max(pair[True].wall - pair[False].wall, 1e-3), pair[True].cpu - pair[False].cpu))
    points = (QUICK_STEPS if options.quick else STEPS) * METRICS
    return {
        "tracking_stage_seconds": Result(
            "s", f"the limit of {LIMIT_S:g} s", "limit", samples, limit=LIMIT_S, notes={"points": points}
        )
    }
