"""The server of the report and of what runs, for this machine's browsers only.

/                        the report, or without one what runs
/report.html, /episodes  the folder reports
/live/                   the viewer with what runs; state.json, index.json and a file per group beside it
/live/request            POST {"title", "wanted"}: pause, resume or stop a stage
/live/trace.json         the episode's trace in MLflow
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from stages.live.telling import LiveRun
from stages.live.traces import trace_address
from stages.runtime.live import request as ask
from stages.serving.request_guard import RequestGuard

REPORT = "report.html"
MAX_BODY = 10_000
BY = "from the page"
NO_STORE = {"Cache-Control": "no-store"}


def refused(message: str, status: int) -> JSONResponse:
    return JSONResponse({"error": message}, status_code=status, headers=NO_STORE)


def own_page(request: Request) -> bool:
    """Whether a request comes from this server's own page, or from a program, which sends no Origin."""
    origin = request.headers.get("origin")
    return origin is None or origin.partition("://")[2] == request.headers.get("host")


def make_app(root: Path) -> Starlette:
    """The application for a checkout. Follows links from `reports` into DVC's cache."""
    run = LiveRun(root)
    (root / "reports").mkdir(exist_ok=True)

    async def start(request: Request) -> Response:
        return RedirectResponse(f"/{REPORT}" if (root / "reports" / REPORT).exists() else "/live/")

    async def page(request: Request) -> Response:
        return HTMLResponse(await run_in_threadpool(run.page), headers=NO_STORE)

    async def state(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(run.state), headers=NO_STORE)

    async def index(request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(run.index), headers=NO_STORE)

    async def group(request: Request) -> Response:
        text = await run_in_threadpool(run.script, request.path_params["key"])
        if text is None:
            return refused("these episodes are no longer kept; newer ones are", 404)
        return Response(text, media_type="text/javascript", headers=NO_STORE)

    async def trace(request: Request) -> Response:
        given = request.query_params
        found = await run_in_threadpool(trace_address, given.get("episode", ""), given.get("source", ""))
        return JSONResponse({"address": found}, headers=NO_STORE)

    async def control(request: Request) -> Response:
        if not own_page(request):
            return refused("requests from other pages are not allowed", 403)
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            return refused("the request must be JSON", 415)
        try:
            given: Any = json.loads(await request.body())
            told = await run_in_threadpool(ask, root, str(given["title"]), str(given["wanted"]), BY)
        except (ValueError, KeyError, TypeError) as error:
            return refused(str(error), 400)
        return JSONResponse({"told": told}, headers=NO_STORE)

    files = StaticFiles(directory=root / "reports", follow_symlink=True)
    routes = [
        Route("/", start),
        Route("/live", lambda request: RedirectResponse("/live/")),
        Route("/live/", page),
        Route("/live/state.json", state),
        Route("/live/index.json", index),
        Route("/live/trace.json", trace),
        Route("/live/request", control, methods=["POST"]),
        Route("/live/{key}.js", group),
        Mount("/", files),
    ]
    return Starlette(routes=routes, middleware=[Middleware(RequestGuard, max_body=MAX_BODY)])
