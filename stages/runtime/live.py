"""What a training stage tells while it runs, and the requests that it takes: files in `.bellwether/live/<stage>`, outside DVC's
outputs.

`state.json`: what runs and how far it is; `history.jsonl`: a row per step; `episodes`: those of the newest steps;
`request.json`: pause, resume or stop. Requests take effect between steps and change no output: a paused run goes on where it was,
a stopped one leaves a checkpoint, from which the stage resumes.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_text
from stages.runtime.process import process_identity

FOLDER = Path(".bellwether") / "live"
STATE, HISTORY, REQUEST, EPISODES = "state.json", "history.jsonl", "request.json", "episodes"
PAUSE, RESUME, STOP = "pause", "resume", "stop"
REQUESTS = (PAUSE, RESUME, STOP)
KEPT_STEPS = 4
"""Steps whose episodes are kept."""
EPISODES_EVERY_S = 1.0
"""The least time between two writes of episodes: steps of tiny tasks take milliseconds."""
POLL_S = 0.2
"""How often a paused stage looks for a request."""


class StoppedError(Exception):
    """A stage was stopped after a step, as requested. Running it again goes on from there."""


@dataclass(frozen=True)
class State:
    """`label`: what the stage does (training, warm_start); `phase`: running, paused, stopped or finished."""

    title: str
    label: str
    total: int
    step: int = 0
    phase: str = "running"
    pid: int = 0
    process: str = ""
    notes: tuple[str, ...] = ()
    """Requests that took effect."""

    @property
    def alive(self) -> bool:
        return bool(self.process) and process_identity(self.pid) == self.process


def read_state(folder: Path) -> State | None:
    """The state of a stage's folder; None without a readable one. A stage that was killed is `stopped`."""
    try:
        held = json.loads((folder / STATE).read_text(encoding="utf-8"))
        state = State(**{**held, "notes": tuple(held["notes"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return replace(state, phase="stopped") if state.phase in ("running", "paused") and not state.alive else state


def states(root: Path) -> list[State]:
    """The stages that have run in a checkout, those that run first."""
    found = [state for path in sorted((root / FOLDER).glob("*")) if (state := read_state(path)) is not None]
    return sorted(found, key=lambda state: state.phase not in ("running", "paused"))


def request(root: Path, title: str, wanted: str, by: str) -> str:
    """Ask a running stage to pause, resume or stop; `by`: who asks, for its record. Returns what will happen.

    Raises ValueError for another request, and if no such stage runs.
    """
    if wanted not in REQUESTS:
        raise ValueError(f"unknown request '{wanted}'; known: {', '.join(REQUESTS)}")
    running = [state for state in states(root) if state.phase in ("running", "paused")]
    if title not in {state.title for state in running}:
        known = ", ".join(state.title for state in running)
        raise ValueError(f"{title} does not run" + (f"; running: {known}" if known else ""))
    _write_request(root / FOLDER / title, wanted, by)
    return {PAUSE: "pauses after this step", RESUME: "goes on", STOP: "stops after this step and leaves a checkpoint"}[wanted]


def _write_request(folder: Path, wanted: str, by: str) -> None:
    atomic_text(folder / REQUEST, json.dumps({"wanted": wanted, "by": by}), durable=False)


class Live:
    """The files of one stage. Errors of writing, such as a full disk, are ignored: what is told is not needed."""

    def __init__(self, root: Path, title: str) -> None:
        self.folder = root / FOLDER / title
        self.state = State(title, "", 0)
        self.wrote_episodes = float("-inf")

    def begin(self, label: str, total: int, history: Sequence[Mapping[str, float]]) -> None:
        """Replace what an earlier run told. Requests to it are void, but one made during the last step of this process's previous
        loop, which came too late for that loop, is left for this one to obey."""
        earlier, pid = read_state(self.folder), os.getpid()
        previous = ("finished", pid, process_identity(pid))
        own = earlier is not None and (earlier.phase, earlier.pid, earlier.process) == previous
        held = self.wanted() if own else ("", "")
        with suppress(OSError):
            shutil.rmtree(self.folder, ignore_errors=True)
            (self.folder / EPISODES).mkdir(parents=True)
            atomic_text(self.folder / HISTORY, "".join(json.dumps(dict(row)) + "\n" for row in history), durable=False)
            if held[0]:
                _write_request(self.folder, *held)
        self._tell(State(self.state.title, label, total, len(history), "running", pid, process_identity(pid)))

    def _tell(self, state: State) -> None:
        self.state = state
        with suppress(OSError):
            atomic_text(self.folder / STATE, json.dumps(asdict(state)), durable=False)

    def step(self, row: Mapping[str, float]) -> None:
        """Add a step's row of the history."""
        with suppress(OSError), (self.folder / HISTORY).open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(dict(row)) + "\n")
        self._tell(replace(self.state, step=self.state.step + 1))

    def episodes_file(self) -> Path | None:
        """Where to write the step's episodes; None if it is too early. Earlier steps' are removed."""
        now = time.monotonic()
        if now - self.wrote_episodes < EPISODES_EVERY_S:
            return None
        self.wrote_episodes = now
        for old in sorted((self.folder / EPISODES).glob("*.parquet"))[: 1 - KEPT_STEPS]:
            old.unlink(missing_ok=True)
        return self.folder / EPISODES / f"{self.state.step:08d}.parquet"

    def wanted(self) -> tuple[str, str]:
        """(request, by whom); two empty texts if there is none."""
        try:
            held = json.loads((self.folder / REQUEST).read_text(encoding="utf-8"))
            return (str(held["wanted"]), str(held["by"])) if held["wanted"] in REQUESTS else ("", "")
        except (OSError, ValueError, TypeError, KeyError):
            return "", ""

    def note(self, text: str, phase: str) -> None:
        """Record a request that takes effect."""
        self._tell(replace(self.state, phase=phase, notes=(*self.state.notes, text)))
        if phase == "running":
            self.forget()

    def forget(self) -> None:
        """A request is done."""
        with suppress(OSError):
            (self.folder / REQUEST).unlink(missing_ok=True)

    def end(self, phase: str) -> None:
        self._tell(replace(self.state, phase=phase))


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Complete rows of a stage's history."""
    try:
        lines = (folder / HISTORY).read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return []
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows
