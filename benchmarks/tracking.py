"""tracking_stage_seconds and tracking_outage_seconds: overhead of tracking for a stage, against a fixed limit.

The same process is timed with tracking off, on, and on with an unreachable server: a loop like a stage's, whose steps compute on
all threads and log 25 metrics each, with sample episodes, an artifact, and the follower beside it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.measure import Options, Result, Sample
from benchmarks.startup import environment, run
from stages.runtime.files import locked
from stages.tracking.spool import spools

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


GONE = "http://127.0.0.1:9"
"""Port 9 (discard): nothing listens there."""
MODES = {"off": {"BELLWETHER_TRACKING": "off"}, "on": {}, "gone": {"MLFLOW_TRACKING_URI": GONE}}


def once(options: Options, folder: Path, mode: str) -> Sample:
    steps = QUICK_STEPS if options.quick else STEPS
    command = [sys.executable, "-c", SCRIPT, str(options.root / "params.yaml"), str(steps), str(METRICS), str(EPISODES)]
    switch = {"BELLWETHER_TRACKING": "on", "PYTHONPATH": str(options.root), **MODES[mode]}
    sample, _ = run(
        ["env", "-u", "MLFLOW_TRACKING_URI", *(f"{name}={value}" for name, value in switch.items()), *command], folder
    )
    settle(options, folder, mode)
    return sample


def settle(options: Options, folder: Path, mode: str) -> None:
    """Wait for the follower and send its leftovers, so that neither disturbs the next run. In mode `gone` they are dropped."""
    own = {**environment(options.root), "BELLWETHER_TRACKING": "on"}
    own.pop("MLFLOW_TRACKING_URI", None)
    while waiting := spools(folder):
        with locked(waiting[0].path.with_suffix(".lock"), wait=True):  # held by the follower while it sends
            left = waiting[0].path.exists()
            if mode == "gone":
                waiting[0].remove()
        if left and mode != "gone":
            replay = [sys.executable, "-m", "stages.tracking", "--replay"]
            subprocess.run(replay, cwd=folder, env=own, capture_output=True, check=False)


def measure(options: Options) -> dict[str, Result]:
    folder = options.scratch / "tracked"
    folder.mkdir(parents=True, exist_ok=True)
    added: dict[str, list[Sample]] = {"on": [], "gone": []}
    for repeat in range(options.warm_ups + options.times):
        order = ("off", "on", "gone") if repeat % 2 else ("gone", "on", "off")
        taken = {mode: once(options, folder, mode) for mode in order}
        if repeat >= options.warm_ups:
            for mode, samples in added.items():
                samples.append(Sample(1.0, max(taken[mode].wall - taken["off"].wall, 1e-3), taken[mode].cpu - taken["off"].cpu))
    notes = {"points": (QUICK_STEPS if options.quick else STEPS) * METRICS}
    names = {"tracking_stage_seconds": "on", "tracking_outage_seconds": "gone"}
    return {
        name: Result("s", f"the limit of {LIMIT_S:g} s", "limit", added[mode], limit=LIMIT_S, notes=notes)
        for name, mode in names.items()
    }
