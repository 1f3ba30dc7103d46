"""The episodes of a run by domain and source: what the viewer shows and the patterns are counted in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stages.evaluation.stored_episodes import FILE, played_groups
from stages.reporting.inputs import ROLLOUTS, Inputs
from stages.reporting.results import model_order

Row = Mapping[str, Any]
Kind = Literal["panel", "rollout", "training"]
"""Who played: a model on the frozen panel, the SFT policy on training tasks, or RL in one of its steps."""


@dataclass(frozen=True)
class Group:
    """Episodes of one domain and source. `source`: a model of the evaluation, or a name such as "rl step 1"."""

    domain: str
    source: str
    kind: Kind
    rows: Sequence[Row]
    """Of EPISODE_SCHEMA and further columns of the source, sorted by episode."""
    clusters: Mapping[str, str] = field(default_factory=dict)
    """Task -> cluster; tasks that are absent are clusters of their own."""

    @property
    def key(self) -> str:
        """Names the group in links and files: a-z, A-Z, 0-9, '.', '_' and '-'."""
        return group_key(self.domain, self.source)


def file_name(text: str) -> str:
    """`text` with each character that is unsafe in a file name or address replaced by its code, so that names stay distinct."""
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "_") else f"-{ord(letter):x}" for letter in text)


def group_key(domain: str, source: str) -> str:
    return f"{file_name(domain)}.{file_name(source)}"


def groups_of(root: Path, inputs: Inputs) -> Iterator[Group]:
    """All groups of the run, one in memory at a time: per domain the SFT rollouts, the stored steps of RL in order, and the
    evaluated models."""
    clusters: dict[str, dict[str, str]] = {}
    for row in inputs.outcomes:
        clusters.setdefault(row["domain"], {})[row["task_id"]] = row["cluster"]
    models = model_order(list(inputs.evaluation["models"]), inputs.params.domains)
    for domain, given in inputs.domains.items():
        for source, rows in given.episodes.items():
            if rows:
                kind: Kind = "rollout" if source == ROLLOUTS else "training"
                yield Group(domain, source, kind, sorted(rows, key=lambda row: row["episode_id"]))
        for model, played in played_groups(root / FILE, domain, models):
            ordered = sorted(played, key=lambda row: (row["task_id"], row["attempt"]))
            yield Group(domain, model, "panel", ordered, clusters.get(domain, {}))


def group_count(root: Path, inputs: Inputs) -> int:
    """Number of groups that `groups_of` yields."""
    sources = sum(bool(rows) for given in inputs.domains.values() for rows in given.episodes.values())
    played = sum(domain in by_domain for by_domain in inputs.evaluation["models"].values() for domain in inputs.domains)
    return sources + (played if (root / FILE).exists() else 0)
