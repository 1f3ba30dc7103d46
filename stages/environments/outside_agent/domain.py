"""The outside_agent domain: settings and tasks."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stages.environments.base_domain import RecipeDomain, parse_record
from stages.environments.outside_agent.environment import OutsideAgentEnvironment
from stages.environments.protocol import DomainSettings, Environment
from stages.records.task import Split, Task
from stages.runtime.validation import Checked, ParamsError


class OutsideAgentSettings(DomainSettings):
    """Settings of the outside_agent domain (per_domain.outside_agent.environment)."""

    command: str = ""
    """Starts the agent, e.g. `python my_agent.py`, without a shell. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY and
    BELLWETHER_TASK, the task's `input` as JSON."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 12
    """Requests of an episode; the agent is ended after the answer to the last."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Seconds without a request after which the agent is ended."""


class OutsideAgentRecord(Checked):
    """A line of data/raw/outside_agent.jsonl."""

    task_id: Annotated[str, Field(min_length=1)]
    split: Split
    input: Any
    """What the agent gets in BELLWETHER_TASK."""
    actions: list[str] = Field(default_factory=list)
    """Answers that solve the task, for demonstrations; may be empty."""
    cluster: str = ""
    """Tasks with a common cluster belong to one split."""


class OutsideAgentDomain(RecipeDomain[OutsideAgentSettings]):
    name = "outside_agent"
    Settings = OutsideAgentSettings

    def ready(self) -> None:
        """Raises ParamsError without a command that can be started."""
        words = shlex.split(self.settings.command)
        if not words or shutil.which(words[0]) is None:
            raise ParamsError(
                f"per_domain.outside_agent.environment.command is {self.settings.command!r}, which can't be started; set it to "
                f"the agent's command, such as python my_agent.py"
            )

    def recipes(self, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """Raises ValueError: only the agent's author knows its tasks."""
        raise ValueError(
            "outside_agent has no tasks of its own: write data/raw/outside_agent.jsonl with lines such as "
            '{"task_id": "a", "split": "train", "input": {"question": "..."}}, for the splits train, valid and test'
        )

    def check(self, record: Mapping[str, Any]) -> None:
        parse_record(OutsideAgentRecord, record, self.name)

    def task(self, record: Mapping[str, Any], worlds: dict[str, Any]) -> Task:
        made = parse_record(OutsideAgentRecord, record, self.name)
        spec = {"input": made.input, **({"actions": made.actions} if made.actions else {})}
        return Task(made.task_id, self.name, made.split, 0, "", spec, float(len(made.actions)), made.cluster or made.task_id)

    def make(self, folder: Path) -> OutsideAgentEnvironment:
        return OutsideAgentEnvironment(self.settings.command, self.settings.max_turns, self.settings.timeout_s)

    def expert(self, environment: Environment) -> str | None:
        if isinstance(environment, OutsideAgentEnvironment) and environment.next_actions:
            return environment.next_actions[0]
        return None

    def entities(self, task: Task) -> set[str]:
        """The cluster, or the input without one."""
        return {task.cluster if task.cluster != task.task_id else json.dumps(task.spec["input"], sort_keys=True)}
