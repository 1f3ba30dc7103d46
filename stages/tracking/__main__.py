"""`python -m stages.tracking` synchronises MLflow with this checkout: it sends unsent events, marks runs of dead processes as
KILLED, and adds the stages that DVC did not execute to the current lifecycle.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.params import load_params
from stages.runtime.command import command
from stages.runtime.lineage import locked_stages
from stages.runtime.validation import ParamsError
from stages.tracking import tracking_is_off
from stages.tracking.cached import add_cached_runs, recorded
from stages.tracking.follower import follow
from stages.tracking.header import STATES, Lifecycle
from stages.tracking.server import Server
from stages.tracking.spool import spools
from stages.tracking.sweep import replay, sweep


def changed_stages(root: Path) -> set[str] | None:
    """Stages that `dvc status` reports as changed; None if it fails (another DVC command runs, or no DVC project)."""
    command = [sys.executable, "-m", "dvc", "status", "--json", "dvc.yaml"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        print(f"tracking: dvc status: {done.stderr.strip()}; skipping stages that were not executed", file=sys.stderr)
        return None
    return set(json.loads(done.stdout))


def add_not_executed(root: Path, states: dict[str, str]) -> list[str]:
    """Spool runs for stages that were not executed: those in `states`, or else all that are up to date and have no run yet."""
    lifecycle = Lifecycle.now(root, load_params(root / "params.yaml"))
    stages = locked_stages(root, lifecycle.params.domains)
    if states:
        skipped = {title: state for title, state in states.items() if state != "ran"}
        return add_cached_runs(lifecycle, [stages[title] for title in skipped if title in stages], skipped)
    changed = changed_stages(root) if stages else None
    if changed is None:
        return []
    known = recorded(lifecycle) | changed
    return add_cached_runs(lifecycle, [stage for title, stage in stages.items() if title not in known], {})


def synchronise(root: Path, states: dict[str, str], replay_only: bool) -> int:
    """Exit code: 0 when nothing is left to send."""
    if tracking_is_off():
        print("tracking is switched off (BELLWETHER_TRACKING)")
        return 0
    try:
        added = [] if replay_only else add_not_executed(root, states)
    except (ParamsError, OSError) as error:
        print(f"tracking: {error}", file=sys.stderr)
        return 1
    if added:
        print(f"not executed, added to the lifecycle: {', '.join(added)}")
    waiting = len(spools(root))
    try:
        server = Server(root)
        sent = replay(root, server)
        print(f"sent {sent} of {waiting} runs to {server.uri}" if waiting else "nothing to send")
        for name in sweep(server):
            print(f"marked KILLED: {name} (its process has exited)")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"tracking: the server is unreachable: {reason}\nNo events were lost; try again later", file=sys.stderr)
        return 1
    return 0 if not spools(root) else 1


def parse_states(values: Sequence[str]) -> dict[str, str]:
    """["merge=restored"] -> {"merge": "restored"}. Raises ValueError naming what is wrong."""
    states = {}
    for value in values:
        title, _, state = value.partition("=")
        if state not in STATES:
            raise ValueError(f"--state {value}: write STAGE=STATE with one of {', '.join(STATES)}")
        states[title] = state
    return states


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.tracking", description=__doc__)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--replay", action="store_true", help="only send and mark; do not ask DVC which stages are up to date")
    choice.add_argument("--follow", type=Path, metavar="ROOT", help="send what the stages of checkout ROOT write while they run")
    choice.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="STAGE=STATE",
        help=f"what DVC did with a stage ({', '.join(STATES)}); may be repeated",
    )
    options = parser.parse_args()
    if options.follow:
        return follow(options.follow)
    try:
        states = parse_states(options.state)
    except ValueError as error:
        parser.error(str(error))
    return synchronise(Path(os.environ.get("DVC_ROOT", ".")).absolute(), states, options.replay)


if __name__ == "__main__":
    sys.exit(main())
