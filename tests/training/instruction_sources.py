"""Sources of instructions on the toy domain, as INSPO makes them, and the policies that play for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stages.agent.instructions import QUESTION
from stages.algorithms.population import Turn
from stages.algorithms.resolve import resolve_section
from stages.algorithms.settings import Rl
from stages.algorithms.sources.instructions import Instructions
from stages.algorithms.task_source import SourceInputs
from stages.records.episode import Episode
from training.toys import letter_tasks

RL: dict[str, Any] = {
    "algorithm": "inspo",
    "steps": 4,
    "tasks_per_step": 4,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}
EVOLVING: dict[str, Any] = {
    "seeds": [QUESTION, f"Be brief. {QUESTION}"],
    "population": 4,
    "evolve_every": 2,
    "min_trials": 3,
    "candidates": 4,
    "verify": {"questions": 3},
}


def turn(action: str, accepted: bool = True) -> Turn:
    return Turn(action, action, "seen", accepted)


def source_of(play: Any = None, root: Path = Path(), **settings: Any) -> Instructions:
    tasks = {task.task_id: replace(task, spec={"answer": "Rome"}) for task in letter_tasks(16) if task.split == "train"}
    section = resolve_section(Rl.model_validate({**RL, "tasks": {"settings": settings}}), 128)[1]
    measured = dict.fromkeys(tasks, 0.5)
    domain: Any = SimpleNamespace(name="toy")
    return Instructions(SourceInputs(section, domain, tasks, Path(), dict.fromkeys(tasks, 1.0), measured, (0, "rl"), play, root))


def episodes_of(source: Instructions, rewards: dict[int, float], size: int = 2) -> list[Episode]:
    """Played episodes of the drawn tasks, whose reward depends on the instruction."""
    return [
        Episode(f"{task_id}/{place}", task_id, "toy", task_id, 0, "", "", 1.0, 1.0, 0, reward=rewards[number])
        for task_id, (_, number) in source.drawn.items()
        for place in range(size)
    ]


def playing(asked: list[Any], good: str) -> Any:
    """A policy whose episodes succeed where the prompt contains `good`."""

    def play(requests: Any, sampling: Any) -> list[Episode]:
        asked.extend(requests)
        return [
            Episode(one.episode_id, one.task.task_id, "toy", "", 0, "", "", 1.0, 1.0, 0, reward=float(good in one.task.prompt))
            for one in requests
        ]

    return play
