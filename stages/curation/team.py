"""Scripted conversations of a team (stages/agent/team.py), for the warm-up of models that do not know the roles: all members say
what the expert does next, and each reads what it would read in a play."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from stages.agent.team import Conversation, Speaker
from stages.environments.protocol import Domain, Environment
from stages.records.task import Task, succeeded
from stages.seeding import permutation


def conversation(
    domain: Domain, environment: Environment, task: Task, team: Sequence[Speaker]
) -> dict[str, list[dict[str, str]]] | None:
    """The messages of each role while the expert solves the task; None if it does not."""
    talk = Conversation(team, task.prompt, environment.reset(task).text)
    messages: dict[str, list[dict[str, str]]] = {member.role: [] for member in team}
    total, first = 0.0, True
    while (action := domain.expert(environment)) is not None:
        for member in team:
            if member.speaks == "every" or first:
                read = {"role": "user", "content": talk.read(member.role)}
                messages[member.role] += [read, {"role": "assistant", "content": action}]
                talk.say(member.role, action)
        first = False
        step = environment.step(action)
        total += step.reward
        if step.done:
            return messages if succeeded(total, step.terms) else None
        talk.observe(step.observation.text)
    return None


def conversations(
    domain: Domain, folder: Path, tasks: Sequence[Task], team: Sequence[Speaker], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """`count` records for `curate.imports`, those of all members of a play together; fewer if there are not enough tasks."""
    with closing(domain.make(folder)) as environment:
        ordered = permutation(list(tasks), "team.demonstrations", seed)
        plays = (conversation(domain, environment, task, team) for task in ordered)
        said = (messages for play in plays if play is not None for messages in play.values())
        yield from ({"domain": domain.name, "messages": messages} for messages in islice(said, count))
