"""Training in rounds: updates and an evaluation each. A run can be saved between rounds, and goes on from there to the bit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from stages.control.learnt import Learnt
from stages.runtime.files import atomic_file
from stages.runtime.validation import ParamsError

FORMAT = 2
"""Of checkpoints."""


class Rounds(ABC):
    """What the loops of lane control have in common. One whose state is more than its agent's extends `state` and `restore`."""

    settings: Any
    """With `checkpoint` and `evaluate_every`."""
    agent: Any
    """A torch module with an `optimiser`, a number of `updates` and a `greedy` policy."""
    generator: torch.Generator
    made_with = "settings"
    """What a checkpoint must have in common with the run that loads it."""

    def __init__(self) -> None:
        self.returns: list[float] = []
        """Mean return of each evaluation."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """Whether no round is left."""

    @abstractmethod
    def round(self) -> None:
        """Train for `evaluate_every` steps and evaluate."""

    def train(self) -> None:
        """From the checkpoint, if there is one, to the end. Raises ParamsError if weights diverged."""
        path = Path(self.settings.checkpoint) if self.settings.checkpoint else None
        if path and path.exists():
            self.load(path)
        while not self.done:
            self.round()
            self.refuse_divergence()
            if path:
                self.save(path)

    def refuse_divergence(self) -> None:
        """Raise ParamsError if a weight is not finite."""
        if not all(bool(torch.isfinite(weights).all()) for weights in self.agent.parameters()):
            raise ParamsError(
                f"learning_rate {self.settings.learning_rate:g}: weights are not finite after {self.agent.updates} updates; "
                "lower it, or the size of rewards"
            )

    def identity(self) -> str:
        """The settings, and what else the run follows from."""
        return self.settings.model_dump_json(exclude={"checkpoint"})

    def state(self) -> dict[str, Any]:
        """What `restore` needs to go on exactly."""
        return {
            "agent": self.agent.state_dict(),
            "optimiser": self.agent.optimiser.state_dict(),
            "updates": self.agent.updates,
            "generator": self.generator.get_state(),
            "returns": self.returns,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.agent.load_state_dict(state["agent"])
        self.agent.optimiser.load_state_dict(state["optimiser"])
        self.agent.updates, self.returns = state["updates"], state["returns"]
        self.generator.set_state(state["generator"])

    def save(self, path: Path) -> None:
        """Write `state` atomically."""
        with atomic_file(path) as partial:
            torch.save({"format": FORMAT, "settings": self.identity(), **self.state()}, partial)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote. Raises ParamsError if that is damaged, of another run, or of another version."""
        try:
            state = torch.load(path, weights_only=True)
        except OSError:
            raise
        except Exception as error:  # of torch's reader of pickles: of any kind, by what the bytes happen to be
            raise ParamsError(f"checkpoint: {path} is no saved run, or damaged; remove it, or name another file") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise ParamsError(f"checkpoint: {path} was written by another version of Bellwether; remove it")
        if state["settings"] != self.identity():
            raise ParamsError(
                f"checkpoint: {path} is of a run with other {self.made_with}; remove it, or use these again: {state['settings']}"
            )
        self.restore(state)

    def learnt(self, **figures: float) -> Learnt:
        """What the finished run leaves; its checkpoint is removed. return_end: of the last evaluation; return_mean: over all
        evaluations, the area under the learning curve."""
        if self.settings.checkpoint:
            Path(self.settings.checkpoint).unlink()
        means = {"return_end": self.returns[-1], "return_mean": fmean(self.returns)}
        steps = [self.settings.evaluate_every * (number + 1) for number in range(len(self.returns))]
        return Learnt({**means, **figures}, steps, self.returns, self.agent.greedy)
