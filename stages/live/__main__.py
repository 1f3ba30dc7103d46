"""Watches and steers running stages of this checkout:

status            what runs, and how far it is
pause STAGE       wait after the current step (rl@search; without STAGE, the one that runs)
resume STAGE      go on
stop STAGE        stop after the current step, with a checkpoint from which `dvc repro` goes on
serve             the report, the viewer and a page of what runs, on 127.0.0.1
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from stages.runtime.command import command, port_number
from stages.runtime.live import REQUESTS, request, states
from stages.runtime.parent import die_with_parent

HOST, PORT = "127.0.0.1", 5001
BY = "from the command line"


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stages.live", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    commands.add_parser("status")
    for name in REQUESTS:
        commands.add_parser(name).add_argument("stage", nargs="?", help="such as rl@search; may be absent if only one runs")
    serve = commands.add_parser("serve")
    serve.add_argument("--port", type=port_number, default=PORT)
    serve.add_argument("--with-parent", type=int, metavar="PID", help="end with this process, which starts the server")
    return parser


def status(root: Path) -> int:
    """Print a line per stage."""
    found = states(root)
    for state in found:
        print(f"{state.title}: {state.phase}, {state.label} step {state.step} of {state.total}")
        for note in state.notes:
            print(f"  {note}")
    if not found:
        print("live: no stage has trained here yet")
    return 0


def the_running(root: Path) -> str:
    """The only stage that runs. Raises ValueError if there is none or more than one."""
    running = [state.title for state in states(root) if state.phase in ("running", "paused")]
    if len(running) != 1:
        raise ValueError(f"several stages run; name one: {', '.join(running)}" if running else "no stage is training")
    return running[0]


def serve(root: Path, port: int) -> int:
    import uvicorn

    from stages.live.app import make_app

    print(f"live: report and running stages on http://{HOST}:{port} (Ctrl-C to stop)", flush=True)
    uvicorn.run(make_app(root), host=HOST, port=port, log_level="warning", lifespan="off", ws="none")
    return 0


@command
def main() -> int:
    options, root = command_line().parse_args(), Path.cwd()
    if options.what == "status":
        return status(root)
    if options.what == "serve":
        if options.with_parent:
            die_with_parent()
            if os.getppid() != options.with_parent:
                return 0
        return serve(root, options.port)
    try:
        title = options.stage or the_running(root)
        print(f"live: {title} {request(root, title, options.what, BY)}")
    except ValueError as error:
        print(f"live: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
