"""The contract of environments that a learnt model can continue. Light to import.

A domain that supports it (`annotate.evaluation.model_rollouts`) has two methods more: `features(tasks) -> Features`, numbers for
its states and actions, and `imagined(folder, features, model) -> Environment`, an environment that goes on by `model` once
`Imagined(snapshot)` is restored, and plays as always after a plain snapshot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from stages.environments.protocol import Environment
from stages.records.task import Task

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class Imagined:
    """A snapshot from which the learnt model goes on."""

    state: Any


class NextState(Protocol):
    """A learnt model of the dynamics."""

    def following(self, state: Vector, action: Vector) -> Vector:
        """The next state [S] after an action [A]."""
        ...


class Features(Protocol):
    """Numbers for what changes in an episode, for what is done, and for what stays as it is."""

    states: int
    actions: int
    context: int
    """Last entries of an action's vector, which describe the world and the time rather than the action."""

    def state(self, task: Task, snapshot: Any) -> Vector:
        """[states]."""
        ...

    def action(self, task: Task, snapshot: Any, text: str) -> Vector:
        """[actions]: what the text would do, and the context."""
        ...

    def same(self, task: Task, snapshot: Any, predicted: Vector) -> bool:
        """Whether the predicted state, decoded, is that of the snapshot."""
        ...


@runtime_checkable
class Imaginable(Protocol):
    """A domain whose environments a learnt model can continue."""

    def features(self, tasks: Sequence[Task]) -> Features: ...

    def imagined(self, folder: Path, features: Features, model: NextState) -> Environment: ...
