"""Teams some of whose members are replaced (evaluate.attribution): who, by what, and how such a model is named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stages.evaluation.settings import Replacement
from stages.records.task import Task


@dataclass(frozen=True)
class Replaced:
    """Members of a team that do not speak for themselves."""

    roles: tuple[str, ...]
    by: Replacement
    donors: tuple[Task, ...] = ()
    """random: for each task of the job the other task that messages are taken from, ready to be played."""


def coalition_name(model: str, active: Sequence[str]) -> str:
    """The name of a team's model with only these players active: `rl@search[planner+critic]`."""
    return f"{model}[{'+'.join(active)}]"


def coalition_of(name: str, model: str) -> tuple[str, ...] | None:
    """The active players of a coalition of `model` by its name; None if it is no such name."""
    found = re.fullmatch(re.escape(model) + r"\[(.*)\]", name)
    return None if found is None else tuple(role for role in found[1].split("+") if role)
