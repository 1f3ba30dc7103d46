"""S1: the log of calls of a served model, a line of JSON each, and the outcomes that clients report afterwards.

Human-facing calls are never written. Texts and names of traces are masked before they are written. Rows are deleted after
`collect.retention_days`, by the server and by rounds.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

from stages.conversion.masking import PLACEHOLDER, Masker, load_key
from stages.conversion.settings import Collect
from stages.runtime.files import append_lines, atomic_bytes, atomic_text, locked

VERSION = 2
"""Of the rows; those of other versions are left out."""
FIELDS = ("trace", "call", "day", "prompt", "response", "latency_ms", "outcome", "provenance", "fallback", "tokens")


def today() -> date:
    """The day in UTC."""
    return datetime.now(UTC).date()


class CallLog:
    """Appends calls to a file, from any thread; one that exists is continued. `masker`: None writes texts as they are. Raises
    ValueError for a log that was masked with another key."""

    def __init__(
        self, path: Path, masker: Masker | None, collect: Collect | None = None, clock: Callable[[], date] = today
    ) -> None:
        self.path, self.masker, self.collect, self._clock = path, masker, collect or Collect(), clock
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._vault = vault_of(path)
        if masker is not None and self._vault.exists():
            masker.vault |= json.loads(self._vault.read_text(encoding="utf-8"))
            try:
                masker.unmask(next(iter(masker.vault), ""))
            except ValueError as error:
                raise ValueError(f"{self._vault}: {error}; mask with that key, or log to another file") from error
        for call in read_calls(path) if path.exists() else ():
            self._calls[call["trace"]] = max(call["call"], self._calls.get(call["trace"], -1))
        self._day, self._saved = date.min, 0
        with self._writing():
            pass

    @contextmanager
    def _writing(self) -> Iterator[str]:
        """Hold the log, whose old rows are deleted once a day; yields the day."""
        with self._lock, locked(_lock_of(self.path), wait=True):
            if (day := self._clock()) != self._day:
                _expire(self.path, self.collect.retention_days, day)
                self._day = day
                if self.masker is not None:  # without the values that were deleted here or by a round
                    self.masker.vault = self._values()
                    self._saved = len(self.masker.vault)
            yield day.isoformat()

    def _values(self) -> dict[str, str]:
        return json.loads(self._vault.read_text(encoding="utf-8")) if self._vault.exists() else {}

    def _write(self, row: Mapping[str, Any]) -> None:
        if self.masker is not None and len(self.masker.vault) > self._saved:
            self.masker.vault = self._values() | self.masker.vault  # another server may log here, too
            self.masker.save(self._vault)
            self._saved = len(self.masker.vault)
        append_lines(self.path, [json.dumps({"version": VERSION, **row}, ensure_ascii=False, sort_keys=True).encode()])

    def call(
        self,
        trace: str,
        prompt: Sequence[Mapping[str, str]],
        response: str,
        latency_ms: float,
        *,
        human: bool = False,
        provenance: str = "llm",
        fallback: str = "",
        tokens: int = 0,
    ) -> None:
        """Log one call of a trace (an agent's run on one task). human: the answer goes to a person; it is not logged.
        `provenance`: llm, verified or specialist <k>; `fallback`: why a router left the call to the large model."""
        if human:
            return
        row: dict[str, Any] = {"trace": str(trace), "prompt": [dict(message) for message in prompt], "response": response}
        latency = round(latency_ms, 1) if "latency_ms" in self.collect.fields else None
        with self._writing() as day:
            if self.masker is not None:
                row = self.masker.mask_call(row)
            number = self._calls[row["trace"]] = self._calls.get(row["trace"], -1) + 1
            more = {"call": number, "day": day, "latency_ms": latency, "tokens": tokens, "outcome": None}
            self._write({**row, **more, "provenance": provenance, "fallback": fallback})

    def outcome(self, trace: str, success: bool) -> None:
        """Log whether a trace's task was solved. Raises ValueError if outcomes are not kept."""
        if "outcome" not in self.collect.fields:
            raise ValueError("outcomes are not kept here: collect.fields of the conversion's settings lacks outcome")
        with self._writing() as day:
            name = trace if self.masker is None else self.masker.trace(trace)
            self._write({"trace": name, "day": day, "outcome": int(success)})


def _rows(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """The lines of a log and their rows; None: of another version. Raises ValueError naming the line of a row that is none."""
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            if row.get("version") != VERSION:
                yield line, None
            elif "prompt" in row:
                yield line, {name: row[name] for name in FIELDS}
            else:
                yield line, {"trace": str(row["trace"]), "day": str(row["day"]), "outcome": int(row["outcome"])}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is not a row of a serving log ({error!r})") from error


def read_calls(path: Path) -> list[dict[str, Any]]:
    """The calls of a log with the outcomes of their traces (None: not reported), in the order of (trace, call). Raises
    FileNotFoundError, and ValueError naming the line of a row that is none."""
    rows = [row for _, row in _rows(path) if row is not None]
    outcomes = {row["trace"]: row["outcome"] for row in rows if "prompt" not in row}
    calls = sorted((row for row in rows if "prompt" in row), key=lambda call: (call["trace"], call["call"]))
    return [{**call, "outcome": outcomes.get(call["trace"])} for call in calls]


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _expire(path: Path, days: int | None, day: date) -> int:
    """See `expire`; the caller holds the log."""
    if days is None or not path.exists():
        return 0
    oldest = (day - timedelta(days=days)).isoformat()
    rows = list(_rows(path))
    kept = [line for line, row in rows if row is not None and row["day"] >= oldest]
    if len(kept) == len(rows):
        return 0
    atomic_bytes(path, b"".join(line + b"\n" for line in kept))
    if (vault := vault_of(path)).exists():
        used = {found.group() for line in kept for found in PLACEHOLDER.finditer(line.decode())}
        values = json.loads(vault.read_text(encoding="utf-8"))
        left = {name: value for name, value in values.items() if name in used}
        atomic_text(vault, json.dumps(left, sort_keys=True, indent=1) + "\n")
    return len(rows) - len(kept)


def expire(path: Path, days: int | None, day: date) -> int:
    """Delete the rows that are more than `days` days older than `day` (None: none) and those of other versions, which can't be
    dated, with the values of the vault that no other row needs. Returns their number; without any, no file changes. Raises
    ValueError naming the line of a row that is none."""
    if days is None or not path.exists():
        return 0
    oldest = (day - timedelta(days=days)).isoformat()
    if all(row is not None and row["day"] >= oldest for _, row in _rows(path)):
        return 0
    with locked(_lock_of(path), wait=True):
        return _expire(path, days, day)


def vault_of(path: Path) -> Path:
    """Where the values that are masked in a log are."""
    return path.with_suffix(".vault.json")


def unmasked_lines(path: Path, key: Path) -> list[str]:
    """The calls of a log as lines of JSON, with personal data in place of its placeholders. Raises ValueError if the key or the
    vault is missing, or the key is another."""
    for file in (key, vault_of(path)):
        if not file.exists():
            raise ValueError(f"{file} does not exist; personal data is restored with the key and the vault of the log")
    masker = Masker(load_key(key), (), vault=json.loads(vault_of(path).read_text(encoding="utf-8")))
    found = []
    for call in read_calls(path):
        prompt = [{**message, "content": masker.unmask(message["content"])} for message in call["prompt"]]
        row = {**call, "trace": masker.unmask(call["trace"]), "prompt": prompt, "response": masker.unmask(call["response"])}
        found.append(json.dumps(row, ensure_ascii=False, sort_keys=True))
    return found
