"""Reads the states for the step-value model in chunks, each a checkpoint, so that the processes of annotate share the work.

A chunk is some batches, which are the same for any number of processes, and so are the states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.annotation.fit_models import rollout_paths, value_data, value_model
from stages.annotation.settings import Annotate
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.spans import span
from stages.values.head_fitting import States
from stages.values.step_value import StepValueModel, ValuePath, joined, read_run, state_runs

if TYPE_CHECKING:
    from torch import Tensor

    from stages.agent.policy import Policy
    from stages.runtime.stage import StageContext

CHUNK = 8
"""Batches."""


class SharedReading:
    """A `step_value.Reading` from checkpoints; what they lack is read, and saved. read: called with the tokens of each batch."""

    def __init__(self, context: StageContext, read: Callable[[int], object] = int) -> None:
        self.context, self.checkpoints, self.read = context, Checkpoints(context), read

    def __call__(self, model: StepValueModel, paths: Sequence[ValuePath], micro_tokens: int) -> States:
        return joined(self.share(model, paths, micro_tokens), state_runs(paths, micro_tokens))

    def share(self, model: StepValueModel, paths: Sequence[ValuePath], micro_tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What `read_run` reads of this process's share of the batches."""
        runs = state_runs(paths, micro_tokens)
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for number, start in self.context.share(list(enumerate(range(0, len(runs), CHUNK)))):
            name = f"states-{micro_tokens}-{number:05d}"  # resources.tokens_per_batch may change before the stage is resumed
            chunk = self.checkpoints.load(name)
            if chunk is None:
                chunk = [self._read(model, run) for run in runs[start : start + CHUNK]]
                self.checkpoints.save(name, chunk)
            parts += chunk
        return parts

    def _read(self, model: StepValueModel, run: Sequence[ValuePath]) -> tuple[Tensor, Tensor, Tensor]:
        found = read_run(model, run)
        self.read(sum(len(path.token_ids) for path in run))
        return found


@span("training")
def read_share(context: StageContext, policy: Policy, rows: Sequence[Mapping[str, Any]], params: Annotate) -> None:
    """Leave this process's share of what the step-value model's head is fitted to as checkpoints. rows: all trees' nodes."""
    if params.value_model.trains != "head":
        return
    train, _, played, _ = value_data(rows, rollout_paths(context, params), params, context.params.seed)
    paths = [*train, *played]
    model = value_model(context, policy, params).eval()
    with context.progress("reading states", sum(len(path.token_ids) for path in paths), "token") as bar:
        SharedReading(context, bar.advance).share(model, paths, context.params.resources.tokens_per_batch)
