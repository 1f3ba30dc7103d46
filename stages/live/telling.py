"""What running stages tell (stages.runtime.live), as the viewer reads it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.params import Params, load_params
from stages.records.episode import read_rows
from stages.reporting.episodes import token_text
from stages.reporting.hidden import load_chat
from stages.reporting.inputs import load_tokenizer
from stages.reporting.viewer.folder import inline, renderer, viewer_page
from stages.reporting.viewer.groups import Group
from stages.reporting.viewer.index import index_group, index_json
from stages.reporting.viewer.pack import pack_group, script, used_tokens
from stages.reporting.viewer.patterns import Pattern, patterns_of
from stages.runtime.live import EPISODES, FOLDER, State, read_history, states
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.agent.chat import Chat

POINTS = 400
"""The most points of a curve: of a longer history, every n-th row and the last."""


def thinned(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    every = -(-len(rows) // POINTS)
    return list(rows) if every < 2 else [*rows[:-1:every], rows[-1]]


def columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """The history by column, in order of appearance; None where a row lacks it or it is not finite."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [value if math.isfinite(value := row.get(name, math.nan)) else None for row in rows] for name in names}


@dataclass(frozen=True)
class LiveRun:
    """The checkout's running stages. Files that are being replaced while they are read are left out until the next look."""

    root: Path

    def params(self) -> Params | None:
        try:
            return load_params(self.root / "params.yaml")
        except (ParamsError, OSError):
            return None

    def episode_files(self, state: State) -> dict[str, Path]:
        """Source, as the viewer names it -> file, oldest first."""
        found = sorted((self.root / FOLDER / state.title / EPISODES).glob("*.parquet"))
        stage = state.title.partition("@")[0]
        return {f"{stage} step {int(path.stem)}, live": path for path in found}

    def groups(self) -> dict[str, Group]:
        """Key -> the episodes of one of the newest steps."""
        found: dict[str, Group] = {}
        for state in states(self.root):
            for source, path in self.episode_files(state).items():
                group = read_group(path, source, _changed(path))
                if group is not None:
                    found[group.key] = group
        return found

    def state(self) -> dict[str, Any]:
        """All stages with their curves, and the keys of the groups that `index` describes."""
        told = [
            {
                "title": state.title,
                "label": state.label,
                "phase": state.phase,
                "step": state.step,
                "total": state.total,
                "notes": list(state.notes),
                "sources": list(self.episode_files(state)),
                "history": columns(thinned(read_history(self.root / FOLDER / state.title))),
            }
            for state in states(self.root)
        ]
        return {"stages": told, "groups": sorted(map(address, self.groups().values()))}

    def index(self) -> dict[str, Any]:
        """The groups as in the viewer's index, with the patterns that occur in them."""
        groups, patterns = self.groups(), self.patterns()
        found = index_json([index_group(group, patterns) for group in groups.values()])
        known = {pattern.name: {"title": pattern.title, "about": pattern.about} for pattern in patterns}
        for told in found["groups"]:
            told["file"] = address(groups[told["key"]])
        return {**found, "patterns": known, "order": list(known)}

    def patterns(self) -> list[Pattern]:
        """Those of params.yaml; none while it is invalid."""
        params = self.params()
        try:
            return [] if params is None else patterns_of(params)
        except ParamsError:
            return []

    def script(self, key: str) -> str | None:
        """The file of a group, with the texts of its tokens; None for an unknown key."""
        group = self.groups().get(key)
        if group is None:
            return None
        tokenizer = self._tokenizer()
        words = {str(token): token_text(tokenizer, token) for token in sorted(used_tokens(group.rows))}
        return script("vocabulary", words) + pack_group(group, self._chat)

    def _folders(self) -> list[Path]:
        """Folders that may have the policy's tokenizer."""
        params = self.params()
        return [self.root / "data/models/sft", *([] if params is None else [self.root / params.model.path])]

    def _tokenizer(self) -> Any | None:
        return next((found for folder in self._folders() if (found := tokenizer_of(folder)) is not None), None)

    def _chat(self) -> Chat | None:
        params = self.params()
        thinking = None if params is None else params.model.thinking
        return next((found for folder in self._folders() if (found := load_chat(folder, thinking)) is not None), None)

    def page(self) -> str:
        """The viewer without a report: it holds only what runs."""
        params = self.params()
        domains = [] if params is None else params.domains
        scripts = {domain: text for domain in domains if (text := renderer(domain)) is not None}
        empty = {"outcomes": [], "tasks": {}, "groups": [], "patterns": {}, "order": [], "intervals": {}, "comparisons": []}
        index = {**empty, "outcomes": self.index()["outcomes"], "confidence": 0.95, "live": True}
        return viewer_page(index, [inline(scripts[domain]) for domain in sorted(scripts)])


def address(group: Group) -> str:
    """The address of a group's file, which differs for a later run's episodes of the same step."""
    written = hashlib.sha256(repr([row["token_ids"] for row in group.rows]).encode()).hexdigest()[:12]
    return f"/live/{group.key}.js?{written}"


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=32)
def read_group(path: Path, source: str, changed: int) -> Group | None:
    """The episodes of a file; None if it is gone or empty. `changed`: its time, which keeps a replaced file from being taken for
    the one that was read."""
    try:
        rows = read_rows(path)
    except (ValueError, OSError):
        return None
    ordered = sorted(rows, key=lambda row: row["episode_id"])
    return Group(ordered[0]["domain"], source, "training", ordered) if ordered else None


@lru_cache(maxsize=4)
def tokenizer_of(folder: Path) -> Any | None:
    return load_tokenizer(folder)
