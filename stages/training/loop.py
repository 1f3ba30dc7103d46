"""The one training loop, used by sft and rl, on accelerate.

A `Job` says what each step's optimiser updates are; a `Learner` does one update from micro-batches; `run_loop` drives them with
progress, history, checkpoints and exact resume. Losses come as shares of a sum whose denominators were taken before the split
(see algorithms/aggregation), so neither the micro-batch split nor the number of processes changes loss or gradient.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from stages.agent.policy import usable_device
from stages.algorithms.contract import LossTerms
from stages.checkpoints import Checkpoints
from stages.params import Resources
from stages.training.adapters import load_trained_state, trained_state
from stages.training.optimiser import Schedule

if TYPE_CHECKING:
    from accelerate import Accelerator

    from stages.runtime import StageContext

Sums = dict[str, float]
"""Statistics of one or more updates: keys that start with `max_` are maxima, all others sums."""


def make_accelerator(resources: Resources) -> Accelerator:
    """Accelerate for `resources`: device and mixed precision; one process unless started by `accelerate launch`. Raises
    PolicyError for a device that is not there."""
    from accelerate import Accelerator

    device = usable_device(resources.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # accelerate takes the current one
    mixed = "bf16" if resources.precision == "bfloat16" else "no"
    return Accelerator(cpu=resources.device == "cpu", mixed_precision=mixed)


def merge_sums(into: Sums, new: Mapping[str, Any]) -> None:
    """Add `new` to `into`; `max_` keys take the larger."""
    for key, value in new.items():
        number = float(value)
        if key.startswith("max_"):
            into[key] = max(into.get(key, -math.inf), number)
        else:
            into[key] = into.get(key, 0.0) + number


@dataclass(frozen=True)
class Update:
    """One optimiser step of learner `learner`: `loss` turns each micro-batch into its share of the loss, in one piece or more.
    Backward is run on each piece before the next is asked for."""

    learner: str
    micro_batches: Sequence[Any]
    loss: Callable[[Any], Iterator[LossTerms]]


class Learner:
    """A module and its optimiser. The module stays in evaluation mode: dropout would part sampling from training log-probs."""

    def __init__(
        self,
        module: nn.Module,
        optimiser: torch.optim.Optimizer,
        schedule: Schedule,
        max_grad_norm: float,
        accelerator: Accelerator,
    ) -> None:
        self.module = module.to(accelerator.device).eval()
        self.optimiser, self.schedule = optimiser, schedule
        self.max_grad_norm, self.accelerator = max_grad_norm, accelerator
        self.updates = 0

    @property
    def learning_rate(self) -> float:
        """Of the update to come."""
        return self.schedule(self.updates)

    def update(self, micro_batches: Sequence[Any], loss: Callable[[Any], Iterator[LossTerms]]) -> Sums:
        """One optimiser step over all micro-batches; statistics with `grad_norm` (before clipping) and `updates` added.

        With several processes each takes every n-th micro-batch, and gradients and statistics are summed over them. Raises
        ValueError if the gradient is not finite (the weights are then unchanged).
        """
        accelerator, sums = self.accelerator, Sums()
        self.optimiser.zero_grad(set_to_none=True)
        for micro in micro_batches[accelerator.process_index :: accelerator.num_processes]:
            pieces = loss(micro)
            while True:
                with accelerator.autocast():
                    terms = next(pieces, None)
                if terms is None:
                    break
                accelerator.backward(terms.loss)
                merge_sums(sums, terms.sums)
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        if accelerator.num_processes > 1:
            sums = _sum_over_processes(accelerator, parameters, sums)
        norm = float(nn.utils.clip_grad_norm_(parameters, self.max_grad_norm))
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradient of update {self.updates + 1} is not finite (norm {norm}, loss {sums.get('loss')}); lower "
                f"learning_rate or max_grad_norm, or use resources.precision: float32"
            )
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate
        self.optimiser.step()
        self.updates += 1
        merge_sums(sums, {"grad_norm": norm, "updates": 1})
        return sums

    def state_dict(self) -> dict[str, Any]:
        return {"module": trained_state(self.module), "optimiser": self.optimiser.state_dict(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        load_trained_state(self.module, state["module"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.updates = state["updates"]


def _sum_over_processes(accelerator: Accelerator, parameters: Sequence[nn.Parameter], sums: Sums) -> Sums:
    """Sum gradients in place, and statistics, over all processes; every process must have the same statistics' names."""
    from accelerate.utils import gather_object

    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.distributed.all_reduce(parameter.grad)
    total = Sums()
    for part in gather_object([sums]):
        merge_sums(total, part)
    return total


class Job(Protocol):
    """What the loop trains."""

    @property
    def learners(self) -> Mapping[str, Learner]: ...

    def updates(self, step: int) -> Iterator[Update]:
        """The optimiser steps of loop step `step`, from 0; the next is asked for when the one before is done."""
        ...

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        """Called after the step's updates with their statistics by learner; returns the step's row of the history."""
        ...

    def finished(self) -> bool:
        """Whether to stop before the last step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that `updates` and `finish` remember between steps, learners aside."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def run_loop(
    context: StageContext, checkpoints: Checkpoints, job: Job, steps: int, checkpoint_every: int, label: str
) -> list[dict[str, float]]:
    """Train for at most `steps` steps, from the last checkpoint with the same inputs if there is one; the history, a row a step.

    A run that was killed and started again ends in the same weights, history and job state, bit for bit.
    """
    history: list[dict[str, float]] = []
    saved = checkpoints.load("training")
    if saved is not None:
        history = saved["history"]
        for name, learner in job.learners.items():
            learner.load_state_dict(saved["learners"][name])
        job.load_state_dict(saved["job"])
    with context.progress(label, steps) as bar:
        bar.restore(len(history))
        for step in range(len(history), steps):
            sums: dict[str, Sums] = {}
            for update in job.updates(step):
                learner = job.learners[update.learner]
                merge_sums(sums.setdefault(update.learner, Sums()), learner.update(update.micro_batches, update.loss))
            row = {"step": float(step + 1), **job.finish(step, sums)}
            history.append(row)
            for name, value in row.items():
                context.metric(name, value, step + 1)
            bar.advance(1, ", ".join(f"{name} {row[name]:.4g}" for name in list(row)[1:4]))
            if job.finished():
                break
            if (step + 1) % checkpoint_every == 0 and step + 1 < steps:
                learners = {name: learner.state_dict() for name, learner in job.learners.items()}
                checkpoints.save("training", {"history": history, "learners": learners, "job": job.state_dict()})
    return history


def write_history(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """The history as CSV, one row per step: the columns of all rows in order of appearance, empty where a row has none."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in history:
        writer.writerow([f"{row[name]:.7g}" if name in row else "" for name in columns])
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text.getvalue(), encoding="utf-8")
    os.replace(partial, path)
