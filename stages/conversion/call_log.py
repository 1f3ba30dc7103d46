"""S1: the log of calls of a served model, a line of JSON each, and the outcomes that clients report afterwards.

Human-facing calls are never written. Texts are masked before they are written.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.conversion.masking import Masker, load_key

VERSION = 1
"""Of the rows; those of other versions are left out."""
FIELDS = ("trace", "call", "prompt", "response", "latency_ms", "outcome", "provenance", "tokens")


class CallLog:
    """Appends calls to a file, from any thread; one that exists is continued. `masker`: None writes texts as they are. Raises
    ValueError for a log that was masked with another key."""

    def __init__(self, path: Path, masker: Masker | None) -> None:
        self.path, self.masker = path, masker
        self._lock = threading.Lock()
        self._calls: dict[str, int] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for call in read_calls(path) if path.exists() else ():
            self._calls[call["trace"]] = max(call["call"], self._calls.get(call["trace"], -1))
        self._vault = vault_of(path)
        if masker is not None and self._vault.exists():
            masker.vault |= json.loads(self._vault.read_text(encoding="utf-8"))
            try:
                masker.unmask(next(iter(masker.vault), ""))
            except ValueError as error:
                raise ValueError(f"{self._vault}: {error}; mask with that key, or log to another file") from error

    def _write(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n"
        with self._lock, self.path.open("a", encoding="utf-8") as handle:
            handle.write(line)

    def call(
        self,
        trace: str,
        prompt: Sequence[Mapping[str, str]],
        response: str,
        latency_ms: float,
        *,
        human: bool = False,
        provenance: str = "llm",
        tokens: int = 0,
    ) -> None:
        """Log one call of a trace (an agent's run on one task). human: the answer goes to a person; it is not logged."""
        if human:
            return
        with self._lock:
            number = self._calls[trace] = self._calls.get(trace, -1) + 1
        row = {"trace": trace, "prompt": [dict(message) for message in prompt], "response": response}
        if self.masker is not None:
            with self._lock:
                known = len(self.masker.vault)
                row = self.masker.mask_call(row)
                if len(self.masker.vault) > known:
                    self.masker.save(self._vault)
        more = {"call": number, "latency_ms": round(latency_ms, 1), "provenance": provenance, "tokens": tokens}
        self._write({"version": VERSION, **row, **more, "outcome": None})

    def outcome(self, trace: str, success: bool) -> None:
        """Log whether a trace's task was solved."""
        self._write({"version": VERSION, "trace": trace, "outcome": int(success)})


def read_calls(path: Path) -> list[dict[str, Any]]:
    """The calls of a log with the outcomes of their traces (None: not reported), in the order of (trace, call). Raises
    FileNotFoundError, and ValueError naming the line of a row that is none."""
    calls, outcomes = [], {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
            if row.get("version") != VERSION:
                continue
            if "prompt" in row:
                calls.append({name: row[name] for name in FIELDS})
            else:
                outcomes[str(row["trace"])] = int(row["outcome"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number} is not a row of a serving log ({error!r})") from error
    calls.sort(key=lambda call: (call["trace"], call["call"]))
    return [{**call, "outcome": outcomes.get(call["trace"])} for call in calls]


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
        row = {**call, "prompt": prompt, "response": masker.unmask(call["response"])}
        found.append(json.dumps(row, ensure_ascii=False, sort_keys=True))
    return found
