"""Replies of a server by request, so that a run repeats without the server.

One JSON file per request, named by the SHA-256 of the whole request (model, messages, sampling, schema) and holding it: nothing
but the same request can find a reply, and a person can read what was asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_text, locked


def request_key(request: Mapping[str, Any]) -> str:
    """64 hex digits of a request, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


class ReplyCache:
    """Replies below `folder`; None keeps none."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.json"

    def load(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was stored for this request. Raises ValueError, naming the file, for one that is damaged."""
        if self.folder is None or not (path := self.path(request_key(request))).is_file():
            return None
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            if stored["request"] != json.loads(json.dumps(request)):
                raise ValueError("it holds another request")
            return dict(stored["outcome"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a stored reply ({error}); delete it, and it is asked again") from error

    def store(self, request: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        if self.folder is None:
            return
        path = self.path(request_key(request))
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_text(
            path, json.dumps({"request": request, "outcome": outcome}, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
        )

    def once(self, request: Mapping[str, Any], ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What was stored for this request, or what `ask` returns. The processes of a stage ask the same: the first one asks, and
        the others wait for its reply."""
        stored = self.load(request)
        if stored is not None or self.folder is None:
            return stored if stored is not None else ask()
        path = self.path(request_key(request)).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, wait=True):
            stored = self.load(request)
            if stored is None:
                stored = ask()
                self.store(request, stored)
        return stored
