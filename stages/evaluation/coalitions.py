"""Which coalitions of teams evaluate plays for evaluate.attribution, as jobs beside those of the models themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

from stages.agent.instructions import instructed
from stages.agent.scaffold import Scaffold
from stages.agent.team import read_team
from stages.curation.panel import Panel
from stages.evaluation.panels import Job
from stages.evaluation.replaced import Replaced, coalition_name
from stages.evaluation.settings import Attribution
from stages.records.task import Task
from stages.seeding import key64


def coalition_jobs(
    jobs: Mapping[str, Sequence[Job]], attribution: Attribution, panels: Mapping[str, Panel], scaffold: Scaffold, seed: int
) -> dict[str, list[Job]]:
    """Name of a coalition -> its jobs: of every plain model in `jobs`, in the domains that it plays in a team, all coalitions of
    the players but the full one, which is the model itself. Raises ValueError if no model plays in a team with such players."""
    found: dict[str, list[Job]] = {}
    for model, of_model in jobs.items():
        for job in of_model if "+" not in model else ():
            team = read_team(job.folder, job.domain)
            for active, away in splits(attribution.players_of([one.role for one in team.members])) if team else ():
                donors = _donors(job, panels[job.domain], scaffold, seed) if attribution.replacement == "random" else ()
                own = Replaced(away, attribution.replacement, donors)
                found.setdefault(coalition_name(model, active), []).append(
                    replace(job, replaced=own, policy_hash=coalition_hash(job.policy_hash, own))
                )
    if not found:
        named = f" with {', '.join(attribution.players)}" if attribution.players else ""
        raise ValueError(
            f"evaluate.attribution: none of the evaluated models ({', '.join(jobs)}) plays in a team{named}; add the specialist "
            "of a domain with rl.team to evaluate.models, or set attribution to null"
        )
    return found


def splits(players: Sequence[str]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(active, replaced) of every coalition but the full one, small ones first."""
    for size in range(len(players)):
        for active in combinations(players, size):
            yield active, tuple(role for role in players if role not in active)


def coalition_hash(policy_hash: str, replaced: Replaced) -> str:
    """16 hex digits that name a team's model together with who is replaced by what."""
    return hashlib.sha256(f"{policy_hash}-{'-'.join(replaced.roles)}-{replaced.by}".encode()).hexdigest()[:16]


def _donors(job: Job, panel: Panel, scaffold: Scaffold, seed: int) -> tuple[Task, ...]:
    """For each of the job's tasks one of another cluster of the panel, the same for all coalitions and whatever the job's size.
    Raises ValueError if a task has none."""
    found = []
    for task in job.tasks:
        others = [one for one in panel.tasks if one.unit != task.unit]
        if not others:
            raise ValueError(
                f"evaluate.attribution.replacement: random takes messages from tasks of other clusters, and the panel of "
                f"{job.domain} has one cluster; set replacement to noop or random_player"
            )
        drawn = others[key64(seed, "attribution", task.task_id) % len(others)]
        found.append(scaffold.brief(instructed(drawn, job.instruction)))
    return tuple(found)
