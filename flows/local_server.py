"""`python -m flows.local_server prefect --port 4200`: Prefect's server, which answers requests to 127.0.0.1 and localhost only.

This blocks DNS rebinding: a web page whose name is pointed at 127.0.0.1 has the server's origin in the browser, but its requests
still carry its name as their Host.
"""

from __future__ import annotations

import argparse
import sys

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware

from flows.auth import HOSTS
from stages.runtime.command import command, port_number


def prefect() -> Starlette:
    """Prefect's API and UI, as `prefect server start` serves them; its settings come from the environment."""
    from prefect.server.api.server import create_app

    return create_app(final=True)


SERVERS = {"prefect": prefect}


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.local_server", description="Serve to this machine's browsers only.")
    parser.add_argument("server", choices=sorted(SERVERS))
    parser.add_argument("--port", type=port_number, required=True)
    options = parser.parse_args()
    app = SERVERS[options.server]()
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(HOSTS), www_redirect=False)
    uvicorn.run(app, host=HOSTS[0], port=options.port, log_level="warning")
    return 0


if __name__ == "__main__":
    sys.exit(main())
