"""`python -m stages.tracking` brings MLflow up to date with this checkout: it sends what a server missed, ends the runs of
processes that are gone, and adds the stages that DVC did not have to execute to the lifecycle of this commit and parameters.
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
from stages.tracking.cached import noted, tell
from stages.tracking.follower import follow
from stages.tracking.header import STATES, Lifecycle
from stages.tracking.server import Server
from stages.tracking.spool import spools
from stages.tracking.sweep import replay, sweep


def changed_stages(root: Path) -> set[str] | None:
    """Stages that `dvc status` calls changed; None where it cannot say (another DVC command runs, or this is no checkout)."""
    command = [sys.executable, "-m", "dvc", "status", "--json", "dvc.yaml"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        print(f"tracking: dvc status: {done.stderr.strip()}; stages that were not executed are left out", file=sys.stderr)
        return None
    return set(json.loads(done.stdout))


def tell_states(root: Path, states: dict[str, str]) -> list[str]:
    """Spool runs for stages that were not executed: those of `states`, or else all that are up to date and not known yet."""
    lifecycle = Lifecycle.now(root, load_params(root / "params.yaml"))
    stages = locked_stages(root, lifecycle.params.domains)
    if states:
        skipped = {title: state for title, state in states.items() if state != "ran"}
        return tell(lifecycle, [stages[title] for title in skipped if title in stages], skipped)
    if not stages:
        return []
    changed = changed_stages(root)
    if changed is None:
        return []
    known = noted(lifecycle) | changed
    return tell(lifecycle, [stage for title, stage in stages.items() if title not in known], {})


def catch_up(root: Path, states: dict[str, str], tell_too: bool) -> int:
    """Exit code: 0 when nothing is left to send."""
    if tracking_is_off():
        print("tracking is switched off (BELLWETHER_TRACKING)")
        return 0
    try:
        told = tell_states(root, states) if tell_too else []
    except (ParamsError, OSError) as error:
        print(f"tracking: {error}", file=sys.stderr)
        return 1
    if told:
        print(f"not executed, added to the lifecycle: {', '.join(told)}")
    waiting = len(spools(root))
    try:
        server = Server(root)
        sent = replay(root, server)
        print(f"sent {sent} of {waiting} runs to {server.uri}" if waiting else "nothing to send")
        for name in sweep(server):
            print(f"marked KILLED: {name}, whose process is gone")
    except Exception as error:
        told_why = f"{type(error).__name__}: {error}"
        print(f"the tracking server does not answer: {told_why}\nNothing is lost; try again later", file=sys.stderr)
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
    choice.add_argument("--replay", action="store_true", help="send and sweep only; do not ask DVC which stages are up to date")
    choice.add_argument("--follow", type=Path, metavar="FILE", help="send FILE while the calling stage writes it")
    choice.add_argument(
        "--state",
        action="append",
        default=[],
        metavar="STAGE=STATE",
        help=f"what DVC did for a stage ({', '.join(STATES)}), from whoever drives it; several times",
    )
    options = parser.parse_args()
    if options.follow:
        return follow(options.follow)
    try:
        states = parse_states(options.state)
    except ValueError as error:
        parser.error(str(error))
    return catch_up(Path(os.environ.get("DVC_ROOT", ".")).absolute(), states, not options.replay)


if __name__ == "__main__":
    sys.exit(main())
