"""The viewer's index: what lists and filters need of every episode, column by column."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.agent.sample_episodes import outcome
from stages.reporting.blocks import rounded
from stages.reporting.viewer.groups import Group, Kind, Row
from stages.reporting.viewer.patterns import Pattern

OUTCOMES = ("success", "failure", "truncated")


@dataclass(frozen=True)
class Indexed:
    """One group without its tokens and texts. Columns have a value per episode."""

    key: str
    domain: str
    source: str
    kind: Kind
    tasks: Sequence[str]
    clusters: Mapping[str, str]
    hits: Mapping[str, Mapping[int, Sequence[int]]]
    """Pattern -> place of an episode -> the turns, from 1, in which it occurs; only episodes in which it does."""
    columns: Mapping[str, Any]
    """What the page gets; see `columns_of`."""

    def occurs(self, pattern: str) -> list[float]:
        """1 for each episode in which the pattern occurs, else 0."""
        found = self.hits[pattern]
        return [float(place in found) for place in range(len(self.tasks))]


def terms_of(row: Row) -> Mapping[str, float]:
    terms = row.get("reward_terms") or {}
    return json.loads(terms) if isinstance(terms, str) else terms


def short_id(row: Row, column: str = "episode_id") -> str:
    """The episode's id, or another's in `column`, without its task's at the start; "=" and the id if it does not start so."""
    name, task = row[column], row["task_id"]
    return name.removeprefix(task) if name.startswith(task) and name != task else f"={name}"


def role_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """`role` (places in `roles`) and `play` (shortened as `id` is; "" outside plays), if an episode has a role."""
    roles = sorted({row.get("role") or "" for row in rows})
    if not any(roles):
        return {}
    return {
        "roles": roles,
        "role": [roles.index(row.get("role") or "") for row in rows],
        "play": [short_id(row, "play") if row.get("play") else "" for row in rows],
    }


def columns_of(rows: Sequence[Row]) -> dict[str, Any]:
    """`outcome` (digits: places in OUTCOMES), `stop` (places in `stops`), numbers, reward `terms` by name (null: absent), and
    `role_columns`."""
    stops = sorted({row["stop_reason"] for row in rows})
    given = [terms_of(row) for row in rows]
    names = sorted({name for terms in given for name in terms})
    return {
        "id": [short_id(row) for row in rows],
        "outcome": "".join(str(OUTCOMES.index(outcome(row))) for row in rows),
        "stops": stops,
        "stop": [stops.index(row["stop_reason"]) for row in rows],
        "turns": [len(row["turns"]) for row in rows],
        "refused": [sum(not turn["accepted"] for turn in row["turns"]) for row in rows],
        "tokens": [len(row["token_ids"]) for row in rows],
        "reward": [rounded(row["reward"]) for row in rows],
        "terms": {name: [rounded(terms.get(name)) for terms in given] for name in names},
        "policy": sorted({row["policy_hash"] for row in rows}),
        "trained": any(row.get("advantages") is not None for row in rows),
        **role_columns(rows),
    }


def index_group(group: Group, patterns: Sequence[Pattern]) -> Indexed:
    """The group's columns and the places where each pattern that applies to its domain occurs."""
    hits = {}
    for pattern in patterns:
        if pattern.applies(group.domain):
            turns = [pattern.turns(row) for row in group.rows]
            hits[pattern.name] = {place: found for place, found in enumerate(turns) if found}
    tasks = [row["task_id"] for row in group.rows]
    names = (group.key, group.domain, group.source, group.kind)
    return Indexed(*names, tasks, group.clusters, hits, columns_of(group.rows))


def index_json(groups: Sequence[Indexed]) -> dict[str, Any]:
    """The index as the page embeds it; `task` holds places in the domain's `tasks`."""
    domains: dict[str, list[str]] = {}
    for group in groups:
        domains.setdefault(group.domain, []).extend(group.tasks)
    tasks = {domain: sorted(set(names)) for domain, names in domains.items()}
    places = {domain: {name: place for place, name in enumerate(names)} for domain, names in tasks.items()}
    packed = [
        {
            "key": group.key,
            "domain": group.domain,
            "source": group.source,
            "kind": group.kind,
            "task": [places[group.domain][task] for task in group.tasks],
            "hits": {name: {str(place): list(turns) for place, turns in found.items()} for name, found in group.hits.items()},
            **group.columns,
        }
        for group in groups
    ]
    return {"outcomes": list(OUTCOMES), "tasks": tasks, "groups": packed}
