"""Spools as stages write them, and the runs in MLflow."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stages.params import parse_params
from stages.tracking.header import Lifecycle
from stages.tracking.server import Server
from stages.tracking.spool import Spool

ROOT = Path(__file__).resolve().parents[1]
PARAMS = {"domains": ["search"], "per_domain": {"search": {"rl": {"steps": 7}}}}
TURNS = [
    {"action": "go", "observation": "a room", "reward": 0.0, "accepted": True, "cost": 1.0, "start": 2, "end": 4},
    {"action": "take", "observation": "taken", "reward": 1.0, "accepted": True, "cost": 1.0, "start": 5, "end": 6},
]
EPISODE = {
    "episode_id": "e1",
    "task_id": "task-1",
    "domain": "search",
    "token_ids": [1, 2, 3, 4, 5, 6],
    "logprob": [0.0, 0.0, -1.0, -0.5, 0.0, -0.25],
    "advantages": [0.0, 0.0, 0.5, 1.5, 0.0, 2.0],
    "turns": TURNS,
    "reward": 1.0,
    "reward_terms": '{"success": 1.0, "format": 0.5}',
    "truncated": False,
    "stop_reason": "terminated",
    "messages": [{"role": "user", "content": "take it"}],
}
"""Tokens 2 and 3 are the first action's, token 5 the second's."""


def attach(spool: Spool, event: dict[str, Any], name: str, text: str) -> None:
    """Append an event with a file, as a stage does."""
    folder = spool.files()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    spool.append({**event, "files": folder.name})


def spooled(root: Path, stage: str = "rl", domain: str | None = "search") -> Spool:
    """A stage's spool with its header, without a follower."""
    header = Lifecycle.now(root, parse_params(PARAMS)).header(stage, domain)
    return Spool.create(root, header)


def runs(server: Server) -> dict[str, Any]:
    found = {run.info.run_name: run for run in server.client.search_runs([server.experiment])}
    return {("lifecycle" if name.startswith("lifecycle") else name): run for name, run in found.items()}


STAGE = f"""
import os, sys
from pathlib import Path
from stages.params import parse_params
from stages.tracking import open_tracker
tracker = open_tracker(Path.cwd(), "rl", "search", parse_params({PARAMS!r}))
tracker.metric("loss", 1.0, 0)
print("started", flush=True)
if sys.argv[1] == "wait":
    sys.stdin.readline()
tracker.metric("loss", 0.5, 1)
tracker.close("FINISHED")
"""


def start_stage(root: Path, how: str, **environment: str) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        [sys.executable, "-c", STAGE, how],
        cwd=root,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def until(condition: Any, within_s: float = 240.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False
