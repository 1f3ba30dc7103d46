"""Learnt values of states, for the viewer: what the step-value model of annotate (stages/values/step_value.py) expects.

V depends on the whole history. A state's value is read at the shortest history that leads to it in the run's episodes, so that
each is valued once, however often it is visited; histories that begin others are read within these.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from stages.reporting.blocks import rounded
from stages.reporting.viewer.groups import Group
from stages.reporting.viewer.pack import state_name
from stages.runtime.resources import Resources
from stages.runtime.workers import worker_pool

MODEL = "value_model"
"""Folder in data/annotated/<domain>."""
BESIDE = 1 << 16
"""Tokens of histories from which on a process of its own is worth its start."""
Histories = Mapping[str, Sequence[int]]


class ShortestHistories:
    """Domain -> state -> the tokens of the shortest history before a turn in it; the first of equally short ones."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, array[int]]] = {}

    def add(self, group: Group) -> None:
        """Take in a group's episodes; not those of a kept run, whose tokens may be another model's."""
        own = self.found.setdefault(group.domain, {})
        for row in group.rows if group.kind != "kept" else ():
            for turn in row["turns"]:
                name, start = state_name(row["task_id"], turn["state_key"]), turn["start"]
                if start and (name not in own or start < len(own[name])):
                    own[name] = array("i", row["token_ids"][:start])


def covering(histories: Histories) -> list[tuple[Sequence[int], list[tuple[int, str]]]]:
    """The histories that begin no other one, each with (index of a last token, state) of all that end within it."""
    paths: list[tuple[Sequence[int], list[tuple[int, str]]]] = []
    # In order, what begins others comes right before them.
    for name, tokens in sorted(histories.items(), key=lambda item: (list(item[1]), item[0]), reverse=True):
        if not paths or paths[-1][0][: len(tokens)] != tokens:
            paths.append((tokens, []))
        paths[-1][1].append((len(tokens) - 1, name))
    return paths


def learnt_values(folder: Path, histories: Histories, tokens_per_batch: int) -> dict[str, float]:
    """State -> value, sorted by name; {} without a model in `folder` or histories. Raises FileNotFoundError for an incomplete
    model."""
    if not folder.exists() or not histories:
        return {}
    from stages.values.step_value import StepValueModel, ValuePath, predict

    paths = sorted(covering(histories), key=lambda path: len(path[0]))
    ones = [[1.0] * len(ends) for _, ends in paths]
    asked = [
        ValuePath("", list(tokens), [end for end, _ in ends], one, one) for (tokens, ends), one in zip(paths, ones, strict=True)
    ]
    predicted, _, _ = predict(StepValueModel.load(folder), asked, tokens_per_batch)
    names = [name for _, ends in paths for _, name in ends]
    return {name: rounded(value, 3) or 0.0 for name, value in sorted(zip(names, predicted.tolist(), strict=True))}


@contextmanager
def values_beside(
    annotated: Path, histories: Mapping[str, Histories], resources: Resources
) -> Iterator[Callable[[], dict[str, dict[str, float]]]]:
    """Compute the `learnt_values` of each domain while the block runs, in a process beside this one if `resources.workers` allows
    two and it has enough to do. Yields a function that waits for them and raises what they raise."""
    tokens_per_batch = resources.tokens_per_batch
    with_model = {domain: own for domain, own in histories.items() if (annotated / domain / MODEL).exists()}
    asked = {domain: (annotated / domain / MODEL, own, tokens_per_batch) for domain, own in with_model.items()}
    if resources.workers < 2 or sum(len(tokens) for own in with_model.values() for tokens in own.values()) < BESIDE:
        yield lambda: {domain: learnt_values(*arguments) for domain, arguments in asked.items()}
        return
    pool = worker_pool(1)
    try:
        pending = {domain: pool.submit(learnt_values, *arguments) for domain, arguments in asked.items()}
        yield lambda: {domain: future.result() for domain, future in pending.items()}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an error in the block is reported at once
