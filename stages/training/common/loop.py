"""The training loop of sft, rl and pretraining, on accelerate.

A `Job` yields each step's optimiser updates; a `Learner` performs one update from micro-batches; `run_loop` drives them with
progress, history, checkpoints and exact resume. Each micro-batch's loss is its share of a sum whose denominators are computed
before the split, so neither the split nor the number of processes changes loss or gradient.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from stages.agent.policy import usable_device
from stages.algorithms.batch import LossTerms
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.files import atomic_text
from stages.runtime.resources import Resources
from stages.runtime.spans import span
from stages.runtime.unshardable import SPARSE
from stages.training.common.adapters import load_trained_state, trained_state
from stages.training.common.optimiser import Schedule
from stages.training.common.processes import Processes, gather_full, shard_like
from stages.training.common.repeatable import Backward
from stages.training.common.steering import Steering

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext
    from stages.runtime.team import Team
    from stages.training.common.sparse_updates import SparseUpdates

Sums = dict[str, float]
"""Statistics of one or more updates: maxima for keys that start with `max_`, sums for all others."""


def make_processes(resources: Resources, team: Team | None = None) -> Processes:
    """Accelerate with the device and precision of `resources`: one process unless started by `accelerate launch`, or `team`'s.

    Raises PolicyError for a device that is unavailable.
    """
    from accelerate import Accelerator

    device = usable_device(resources.device)
    if device.index is not None:
        torch.cuda.set_device(device)  # accelerate uses the current device
    mixed = "bf16" if resources.precision == "bfloat16" else "no"
    return Processes(Accelerator(cpu=resources.device == "cpu", mixed_precision=mixed), team)


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
    """One optimiser step of learner `learner`: `loss` yields each micro-batch's share of the loss, in one piece or more. Backward
    runs on each piece before the next is computed."""

    learner: str
    micro_batches: Sequence[Any]
    loss: Callable[[Any], Iterator[LossTerms]]
    on_tokens_trained: Callable[[Tensor, Tensor], None] | None = None
    """Called with the rows and mask of all trained tokens of all processes (`LossTerms.trained`), if the step was made."""
    on_sums: Callable[[Sums], None] | None = None
    """Called after the step with its statistics, which are the same in all processes."""
    role: str = ""
    """The role whose episodes it learns from, if they are not the step's main ones."""
    skips: Callable[[Sums], bool] | None = None
    """Whether to leave the weights as they are, by the statistics of the loss, which are the same in all processes."""
    on_tokens_skipped: Callable[[Tensor, Tensor], None] | None = None
    """`on_tokens_trained` of a step that was left out."""

    @property
    def label(self) -> str:
        """Under which the step's statistics are summed: the learner, and the role after an @."""
        return f"{self.learner}@{self.role}" if self.role else self.learner


class Learner:
    """A module and its optimiser. The module stays in evaluation mode: with dropout, sampling and training log-probs differ."""

    def __init__(
        self,
        module: nn.Module,
        optimiser: torch.optim.Optimizer,
        schedule: Schedule,
        max_grad_norm: float,
        processes: Processes,
        sparse: SparseUpdates | None = None,
    ) -> None:
        """Raises ValueError for sparse updates under FSDP, which shards the weights."""
        if sparse is not None and processes.sharded:
            raise ValueError(SPARSE)
        self.module = module.eval()
        self.optimiser, self.schedule = optimiser, schedule
        self.max_grad_norm, self.processes, self.sparse = max_grad_norm, processes, sparse
        self.backward = Backward(processes.device, processes.sharded)
        self.updates = 0

    @property
    def learning_rate(self) -> float:
        """Of the next update."""
        return self.schedule(self.updates)

    @span("training")
    def update(
        self,
        micro_batches: Sequence[Any],
        loss: Callable[[Any], Iterator[LossTerms]],
        on_tokens_trained: Callable[[Tensor, Tensor], None] | None = None,
        skips: Callable[[Sums], bool] | None = None,
        on_tokens_skipped: Callable[[Tensor, Tensor], None] | None = None,
    ) -> Sums:
        """One optimiser step over all micro-batches; returns their statistics, `grad_norm` (before clipping) and `updates`.
        skips: see `Update.skips`; the statistics then have `skipped`, in any case.

        With several processes, each takes every n-th micro-batch, and gradients and statistics are summed. Raises ValueError if
        the gradient is not finite; the weights are then unchanged.
        """
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        try:
            own = self._accumulate(parameters, micro_batches, loss)
        except RuntimeError as error:
            if not self.backward.relents(error):
                raise
            own = self._accumulate(parameters, micro_batches, loss)
        sums, tokens = Sums(), list[tuple[Tensor, Tensor]]()
        for _, statistics, trained in sorted(self.processes.gather(own), key=lambda item: item[0]):
            merge_sums(sums, statistics)
            tokens += [] if trained is None else [trained]
        if self.sparse is not None:
            self.sparse.before(parameters)
        norm = float(gather_full(nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)))
        if not math.isfinite(norm):
            raise ValueError(
                f"the gradient of update {self.updates + 1} is not finite (norm {norm}, loss {sums.get('loss')}); lower "
                f"learning_rate or max_grad_norm, or use resources.precision: float32"
            )
        if skips is not None:
            merge_sums(sums, {"skipped": skips(sums)})
        skipped = bool(sums.get("skipped"))
        tell = on_tokens_skipped if skipped else on_tokens_trained
        for rows, mask in tokens if tell is not None else ():
            tell(rows, mask)
        if skipped:
            merge_sums(sums, {"grad_norm": norm, "updates": 1})
            return sums
        for group in self.optimiser.param_groups:
            group["lr"] = self.learning_rate
        with span("training.optimiser"):
            self.optimiser.step()
            if self.sparse is not None:
                self.sparse.after(parameters)
        self.updates += 1
        merge_sums(sums, {"grad_norm": norm, "updates": 1})
        return sums

    def _accumulate(
        self, parameters: Sequence[nn.Parameter], micro_batches: Sequence[Any], loss: Callable[[Any], Iterator[LossTerms]]
    ) -> list[tuple[int, Sums, tuple[Tensor, Tensor] | None]]:
        """The gradient over all micro-batches, from none; returns (place, statistics, trained rows and mask) of each piece of
        this process."""
        processes = self.processes
        self.optimiser.zero_grad(set_to_none=True)
        gradients = processes.gradient_sum(parameters)
        own: list[tuple[int, Sums, tuple[Tensor, Tensor] | None]] = []
        for round_, (micro, active) in enumerate(processes.shard(micro_batches)):
            place = round_ * processes.count + processes.index
            for terms in self._backward(loss(micro), active):
                trained = None if terms.trained is None else (terms.trained[0].cpu(), terms.trained[1].cpu())
                own.append((place, {name: float(value) for name, value in terms.sums.items()}, trained))
            gradients.add(True)
        for _ in range(processes.waiting_rounds(len(micro_batches))):
            gradients.add(False)
        gradients.finish()
        return own

    def _backward(self, pieces: Iterator[LossTerms], active: bool) -> Iterator[LossTerms]:
        """Run backward on each piece of a micro-batch's loss; yields the pieces' terms if the micro-batch is `active`."""
        accelerator, sharded = self.processes.accelerator, self.processes.sharded
        found: list[LossTerms] = []

        def forward() -> Tensor | None:
            found[:] = [terms] if (terms := next(pieces, None)) is not None else []
            return found[0].loss if found else None

        while (loss := self.processes.forward(self.module, forward)) is not None:
            # FSDP averages over processes; an inactive micro-batch only keeps the number of passes equal.
            with span("training.backward"):
                self.backward(accelerator.backward, loss * (self.processes.count * active) if sharded else loss)
            if active:
                yield found[0]

    def state_dict(self) -> dict[str, Any]:
        """Unsharded tensors, however many processes train. Every process must make this call."""
        state = {"module": trained_state(self.module), "optimiser": self.optimiser.state_dict()}
        sparse = {} if self.sparse is None else {"sparse": self.sparse.state_dict()}
        return {**(gather_full(state) if self.processes.sharded else state), "updates": self.updates, **sparse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        module, optimiser = state["module"], state["optimiser"]
        if self.processes.sharded:
            present = self.module.state_dict()
            module = {name: shard_like(value, present[name]) for name, value in module.items()}
            parameters = [parameter for group in self.optimiser.param_groups for parameter in group["params"]]
            moments = {
                index: {name: shard_like(value, parameters[index]) for name, value in entry.items()}
                for index, entry in optimiser["state"].items()
            }
            optimiser = {**optimiser, "state": moments}
        load_trained_state(self.module, module)
        self.optimiser.load_state_dict(optimiser)
        self.updates = state["updates"]
        if self.sparse is not None:
            self.sparse.load_state_dict(state["sparse"])


class Job(Protocol):
    """What the loop trains."""

    learners: Mapping[str, Learner]

    def updates(self, step: int) -> Iterator[Update]:
        """The optimiser steps of loop step `step`, from 0; each is performed before the next is requested."""
        ...

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        """Called after the step's updates with their statistics by `Update.label`; returns the step's row of the history."""
        ...

    def finished(self) -> bool:
        """Whether to stop before the last step."""
        return False

    def newest(self) -> Sequence[Mapping[str, Any]]:
        """The last step's episodes for those who watch: rows of EPISODE_SCHEMA with `step` and `advantages`; none by default."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """The state that `updates` and `finish` keep between steps, learners excluded."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def run_loop(
    context: StageContext,
    checkpoints: Checkpoints,
    job: Job,
    steps: int,
    checkpoint_every: int,
    label: str = "training",
    prefix: str = "",
) -> list[dict[str, float]]:
    """Train for at most `steps` steps, resuming from a checkpoint with the same inputs; returns the history, one row per step.

    label: of the progress and of the checkpoint, different for each loop of a stage; prefix: of the metrics' names.

    A run that was killed and resumed ends with the same weights, history and job state, bit for bit. With several processes, the
    first writes checkpoints and all read them.

    Raises StoppedError, with a checkpoint saved, if someone asked to stop after a step (stages.runtime.live).
    """
    history: list[dict[str, float]] = []
    saved = checkpoints.load(label)
    if saved is not None:
        history = saved["history"]
        for name, learner in job.learners.items():
            learner.load_state_dict(saved["learners"][name])
        job.load_state_dict(saved["job"])

    def save() -> None:
        learners = {name: learner.state_dict() for name, learner in job.learners.items()}
        if context.main:
            checkpoints.save(label, {"history": history, "learners": learners, "job": job.state_dict()})

    processes = next((learner.processes for learner in job.learners.values()), None)
    steering = Steering(context, processes, label, steps, history)
    with context.progress(label, steps) as bar:
        bar.restore(len(history))
        for step in range(len(history), steps):
            sums: dict[str, Sums] = {}
            for update in job.updates(step):
                learner = job.learners[update.learner]
                told = (update.on_tokens_trained, update.skips, update.on_tokens_skipped)
                new = learner.update(update.micro_batches, update.loss, *told)
                if update.on_sums is not None:
                    update.on_sums(new)
                merge_sums(sums.setdefault(update.label, Sums()), new)
            row = {"step": float(step + 1), **job.finish(step, sums)}
            history.append(row)
            for name, value in row.items():
                context.metric(prefix + name, value, step + 1)
            bar.advance(1, ", ".join(f"{name} {row[name]:.4g}" for name in list(row)[1:4]))
            steering.tell(row, job.newest)
            if job.finished():
                break
            if step + 1 < steps:
                if (step + 1) % checkpoint_every == 0:
                    save()
                steering.obey(step + 1, save)
    steering.finish()
    return history


def write_history(path: Path, history: Sequence[Mapping[str, float]]) -> None:
    """Write the history as CSV, one row per step, with the columns of all rows in order of appearance."""
    columns = list(dict.fromkeys(name for row in history for name in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in history:
        writer.writerow([f"{row[name]:.7g}" if name in row else "" for name in columns])
    atomic_text(path, text.getvalue())
