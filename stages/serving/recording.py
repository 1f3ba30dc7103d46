"""Records what the policy drew for outside agents: each chat completion with its token ids and log-probabilities, and the rewards
that agents report afterwards. `python -m stages.serving.episodes` turns a recording into episodes.

A recording is a file of JSON lines: calls, and outcomes of traces (an agent's runs, `metadata.trace` of its requests). It has the
texts as they were said, since masked ones could not be trained on: the file is readable for its owner alone, and calls for people
are not recorded.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.engine.engine import Sampling, Turn
from stages.runtime.files import append_lines

VERSION = 1
"""Of the rows."""


@dataclass(frozen=True)
class Call:
    """One answer of the policy."""

    policy_hash: str
    temperature: float
    top_p: float
    top_k: int
    prompt_ids: tuple[int, ...]
    """All that the policy read."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    asked: str
    """The newest message."""
    answered: str

    @property
    def sampling(self) -> tuple[float, float, int]:
        return self.temperature, self.top_p, self.top_k


@dataclass
class Trace:
    """An agent's run on a task: its calls in the order in which they were answered."""

    name: str
    task: str = ""
    """The task's name, if the agent gave one."""
    calls: list[Call] = field(default_factory=list)
    reward: float | None = None
    """None: not reported, so that the run is not finished."""
    success: bool | None = None


class Recording:
    """Appends to a file, from any thread; one that exists is continued. Raises ValueError for a file that is no recording."""

    def __init__(self, path: Path, policy_hash: str) -> None:
        self.path, self.policy_hash = path, policy_hash
        self._lock = threading.Lock()
        if path.exists():
            read_recording(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_APPEND | os.O_CREAT, 0o600))
        path.chmod(0o600)

    def _write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        lines = [json.dumps({"version": VERSION, **row}, ensure_ascii=False, sort_keys=True).encode() for row in rows]
        with self._lock:
            append_lines(self.path, lines)

    def calls(
        self,
        trace: str,
        task: str,
        sampling: Sampling,
        prompt_ids: Sequence[int],
        asked: str,
        answers: Sequence[tuple[str, Turn]],
    ) -> None:
        """Record the answers (texts and turns) to one request, whose newest message is `asked`."""
        common = {
            "trace": trace,
            "task": task,
            "policy_hash": self.policy_hash,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "prompt_ids": list(prompt_ids),
            "asked": asked,
        }
        rows = [
            {**common, "answered": text, "token_ids": list(turn.token_ids), "logprobs": list(turn.logprobs)}
            for text, turn in answers
        ]
        self._write(rows)

    def outcome(self, trace: str, reward: float, success: bool | None) -> None:
        """Record a trace's reward, from 0 to 1; the last one counts. success: whether the task was solved, if that is not whether
        the reward is 1."""
        self._write([{"trace": trace, "reward": reward, "success": success}])


def read_recording(path: Path) -> list[Trace]:
    """The traces of a recording, sorted by name. Raises FileNotFoundError, and ValueError naming a line that is no row of one."""
    traces: dict[str, Trace] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            if row["version"] != VERSION:
                raise ValueError(f"version {row['version']}; this release reads {VERSION}")
            trace = traces.setdefault(row["trace"], Trace(row["trace"]))
            if "prompt_ids" in row:
                trace.task = trace.task or row["task"]
                sampling = (row["policy_hash"], row["temperature"], row["top_p"], row["top_k"])
                tokens = (tuple(row["prompt_ids"]), tuple(row["token_ids"]), tuple(row["logprobs"]))
                trace.calls.append(Call(*sampling, *tokens, row["asked"], row["answered"]))
            else:
                trace.reward, trace.success = float(row["reward"]), row["success"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is not a row of a recording ({error!r}); record to another file") from error
    return [trace for _, trace in sorted(traces.items())]
