"""`python -m flows.local_server prefect --port 4200` (or `report`): a server that answers requests to
127.0.0.1 and localhost only.

This blocks DNS rebinding: a web page whose name is pointed at 127.0.0.1 has the server's origin in the browser, but its requests
still carry its name as their Host.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from flows.auth import HOSTS
from flows.process import ROOT
from stages.runtime.command import command

REPORT = "report.html"


def prefect() -> Starlette:
    """Prefect's API and UI, as `prefect server start` serves them; its settings come from the environment."""
    from prefect.server.api.server import create_app

    return create_app(final=True)


def report(folder: Path = ROOT / "reports") -> Starlette:
    """The folder of the report; follows links into DVC's cache."""
    files = StaticFiles(directory=folder, follow_symlink=True)
    return Starlette(routes=[Route("/", lambda _: RedirectResponse(f"/{REPORT}")), Mount("/", files)])


SERVERS = {"prefect": prefect, "report": report}


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.local_server", description="Serve to this machine's browsers only.")
    parser.add_argument("server", choices=sorted(SERVERS))
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    app = SERVERS[options.server]()
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
    uvicorn.run(app, host=HOSTS[0], port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
