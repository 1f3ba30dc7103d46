"""/v1/outcomes: agents report how their runs ended, for the log and the recording of calls."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from stages.conversion.call_log import CallLog
from stages.serving.recording import Recording
from stages.serving.schemas import OutcomeReport


def add_outcomes(app: FastAPI, log: CallLog | None, recording: Recording | None) -> None:
    @app.post("/v1/outcomes")
    async def outcomes(body: OutcomeReport) -> Response:
        if log is None and recording is None:
            options = "--conversion SETTINGS, --log FILE or --record FILE"
            raise HTTPException(404, f"calls are not logged here; start the server with {options}")
        if recording is not None:
            both = body.reward is not None and body.success is not None
            recording.outcome(body.trace, body.earned, body.success if both else None)
        if log is not None:
            try:
                log.outcome(body.trace, body.solved)
            except ValueError as error:
                raise HTTPException(404, str(error)) from error
        return JSONResponse({"status": "ok"})
