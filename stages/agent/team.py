"""A team of agents that play an environment together: who speaks when, what each reads, and the file that says so beside a
team's weights. Light to import; stages/agent/team_play.py plays it.

In each round the members speak in their order, and the last one's text is the action. A member reads the task, what the
environment answers, and the texts of the members that it sees, since its own last one (Dep of MARFT, arXiv 2504.16129).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, ValidationError, field_validator

from stages.agent.prompts import check_prompt, load_prompt
from stages.records.task import opening
from stages.runtime.files import atomic_text
from stages.runtime.validation import Section, explain

FILE = "team.json"
"""In the folder of the acting member's weights."""
AGENTS = "agents"
"""Its subfolder with those of the others, by role."""
TASK = "{task}"


class Member(Section):
    """An agent of a team."""

    role: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Its name, which stands before its text where others read it."""
    sees: list[str] = Field(default=[])
    """The other members whose texts it reads."""
    speaks: Literal["every", "first"] = "every"
    """In every round, or in the first one alone; the last member, whose texts are the actions, speaks in every one."""
    prompt: str = ""
    """A file of data/raw/prompts with the field {task}, which is the task as this member reads it; empty: the task alone."""

    @field_validator("prompt")
    @classmethod
    def _prompt(cls, name: str) -> str:
        return check_prompt(name, ["task"], []) if name else name

    @property
    def template(self) -> str:
        """The text around the task, with `{task}` once."""
        return load_prompt(self.prompt).fill(task=TASK) if self.prompt else TASK


def problem(members: Sequence[Member]) -> str | None:
    """Why these are no team, with the remedy; None if they are one."""
    roles = [member.role for member in members]
    if twice := next((role for role in roles if roles.count(role) > 1), None):
        return f"has two members with the role {twice}; name each role once"
    for member in members:
        if unknown := sorted(set(member.sees) - (set(roles) - {member.role})):
            others = ", ".join(role for role in roles if role != member.role) or "nobody"
            return f"lets {member.role} see {unknown[0]}, which is no other member ({others}); remove it"
    if members and members[-1].speaks != "every":
        return f"ends with {members[-1].role}, whose texts are the actions and who speaks in every round; set its speaks to every"
    return None


class Speaker(Protocol):
    """A member, as a setting or as stored."""

    @property
    def role(self) -> str: ...
    @property
    def sees(self) -> list[str]: ...
    @property
    def speaks(self) -> str: ...
    @property
    def template(self) -> str: ...


class Conversation:
    """What the members of a team have to read in a play."""

    def __init__(self, team: Sequence[Speaker], task: str, observation: str) -> None:
        """task: its prompt; observation: the environment's first one."""
        self._team = team
        self._unread = {one.role: [opening(one.template.replace(TASK, task), observation)] for one in team}

    def say(self, role: str, text: str) -> None:
        """A member's text, for those who see it."""
        for member in self._team:
            if role in member.sees:
                self._unread[member.role].append(f"{role}: {text}")

    def observe(self, text: str) -> None:
        """What the environment answers, for all."""
        for unread in self._unread.values():
            unread.append(text)

    def read(self, role: str) -> str:
        """All that a member has not read yet."""
        text, self._unread[role] = "\n".join(self._unread[role]), []
        return text


class StoredMember(Section):
    """A member as a file of a team describes it."""

    role: str
    sees: list[str]
    speaks: Literal["every", "first"]
    template: str

    @classmethod
    def of(cls, member: Member) -> StoredMember:
        return cls(role=member.role, sees=member.sees, speaks=member.speaks, template=member.template)


class StoredTeam(Section):
    """The contents of FILE."""

    domain: str
    """The one that the team is played in; elsewhere the acting member plays alone."""
    own_weights: bool
    """Whether each member has weights of its own; False: all have those of the acting one."""
    members: list[StoredMember]


def write_team(folder: Path, domain: str, own_weights: bool, members: Sequence[Member]) -> None:
    """Store the team whose acting member's weights are in `folder`."""
    stored = StoredTeam(domain=domain, own_weights=own_weights, members=[StoredMember.of(member) for member in members])
    atomic_text(folder / FILE, json.dumps(stored.model_dump(), sort_keys=True, indent=1) + "\n")


def read_team(folder: Path, domain: str) -> StoredTeam | None:
    """The team that the policy in `folder` is played in, in a domain; None if it plays alone. Raises ValueError for a damaged
    file."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        stored: Any = json.loads(path.read_text(encoding="utf-8"))
        team = StoredTeam.model_validate(stored)
    except ValueError as error:
        why = explain(error, StoredTeam, FILE) if isinstance(error, ValidationError) else error
        raise ValueError(f"{path} describes no team ({why}); run rl@{domain} again") from error
    return team if team.domain == domain else None


def member_folder(folder: Path, team: StoredTeam, role: str) -> Path:
    """The folder of a member's weights, for the acting member's `folder`."""
    return folder / AGENTS / role if team.own_weights and role != team.members[-1].role else folder
