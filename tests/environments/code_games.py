"""A hand-made task of the code domain, and environments whose programs run in a given sandbox."""

from __future__ import annotations

from pathlib import Path

from stages.environments.code import CodeDomain, CodeSettings
from stages.environments.code.environment import Judge
from stages.environments.protocol import Environment
from stages.records.task import Task
from stages.sandbox import Sandbox


def make(settings: CodeSettings, sandbox: Sandbox) -> tuple[CodeDomain, Environment]:
    """A domain whose programs run in `sandbox`, and its environment."""
    domain = CodeDomain(settings)
    domain.__dict__["_judge"] = Judge(sandbox)
    return domain, domain.make(Path())


def hand_task(**changes) -> Task:
    """The sum of the numbers above 3, with tests that catch most mistakes."""
    spec = {
        "family": "by hand",
        "text": "",
        "entry": "f",
        "parameters": ["a"],
        "context": "",
        "shown": ["assert f([4, 2]) == 4"],
        "hidden": ["assert f([3, 5]) == 5", "assert f([]) == 0"],
        "references": [{"style": "expression", "source": "sum(b for b in a if b>3)"}],
        "near_misses": [
            {"mistake": "boundary", "source": "sum(b for b in a if b>=3)", "outcome": "fail"},
            {"mistake": "bracket", "source": "sum(b for b in a if b>3", "outcome": "compile_error"},
        ],
    }
    return Task("hand", "code", "train", 0, "f(a): the sum of the numbers in a above 3", {**spec, **changes}, 2.0)
