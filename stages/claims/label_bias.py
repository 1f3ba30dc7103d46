"""Are step labels too high or too low? Trees in worlds where Q is known (stages/claims/known_tree.py), beside exact values.

`python -m stages.claims.label_bias` grows trees as section `annotate` of params.yaml says, one in each of many worlds, in forests
of `--tasks` trees, which are labelled together as the stage labels a domain's. It prints, by depth, the mean of label - Q
over the labelled actions that do not end the episode, and the root mean squared difference: of the labels' q, and of q_rollout,
the plain mean of the same rollouts. Intervals are 95 %, with forests as the units that are independent of each other.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.annotation.labels import label_rows
from stages.annotation.nodes import ended, trees_of
from stages.annotation.search import Search
from stages.claims.known_tree import Chat, FakeEngine, Pool, actions_in, task, value
from stages.runtime.command import command

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

COLUMNS = {"counted": "q_rollout", "label": "q"}
"""Estimate -> its column of labels.parquet."""
TASKS = 48
"""Trees of a forest where annotate.tasks is 0."""


@dataclass(frozen=True)
class Bias:
    """Labels at one depth: mean difference from Q with the half-width of its interval, root mean squared difference."""

    labels: int
    mean: float
    half: float
    rmse: float


def grow(params: Annotate, worlds: Sequence[int], seed: int, kind: str = "coin") -> list[dict[str, Any]]:
    """Node rows of one tree in each world of `kind` (coin or sure); tasks are named by their worlds."""
    search = Search(FakeEngine(width=len(worlds)), Chat(), Pool(), params, seed, 10_000)
    return [row for tree in search.grow([task(f"{world:06d}", world, kind) for world in worlds]) for row in tree.rows()]


def differences(rows: Sequence[Mapping[str, Any]], params: Annotate, kind: str = "coin") -> dict[tuple[str, int], list[float]]:
    """(estimate, depth) -> label - Q of every labelled action of one forest that does not end its episode."""
    trees, found = trees_of(rows), defaultdict(list)
    for label in label_rows(rows, params):
        tree = trees[label["task_id"]]
        if not label["node"] or ended(tree[label["node"]]):
            continue
        exact = value(int(label["task_id"]), actions_in(tree, label["node"]), kind=kind)
        for name, column in COLUMNS.items():
            found[name, label["depth"]].append(label[column] - exact)
    return found


def pooled(forests: Iterable[Mapping[tuple[str, int], Sequence[float]]]) -> dict[tuple[str, int], Bias]:
    """The bias over all forests: a ratio of sums, with an interval from the forests' residuals."""
    forests = list(forests)
    found = {}
    for key in sorted({key for forest in forests for key in forest}):
        parts = [np.array(forest.get(key, ()), dtype=np.float64) for forest in forests]
        count = sum(map(len, parts))
        mean = float(sum(part.sum() for part in parts) / count)
        residuals = sum(float((part - mean).sum()) ** 2 for part in parts)
        half = 1.96 * residuals**0.5 / count
        found[key] = Bias(count, mean, half, float((sum((part**2).sum() for part in parts) / count) ** 0.5))
    return found


def measure(params: Annotate, worlds: int, seed: int = 0, kind: str = "coin") -> dict[tuple[str, int], Bias]:
    """The bias of labels of trees in `worlds` worlds, different ones per seed; an incomplete forest is dropped."""
    starts = range(0, worlds - params.tasks + 1, params.tasks)
    first = 1_000_000 * seed
    forests = (grow(params, range(first + start, first + start + params.tasks), seed, kind) for start in starts)
    return pooled(differences(rows, params, kind) for rows in forests)


def table(biases: Mapping[tuple[str, int], Bias]) -> str:
    """The results of `measure`, one line per depth."""
    lines = ["depth  labels   " + "   ".join(f"{name + ': label - Q (95 %)':<32}{'rmse':>6}" for name in COLUMNS)]
    for depth in sorted({depth for _, depth in biases}):
        parts = []
        for name in COLUMNS:
            bias = biases[name, depth]
            interval = f"{bias.mean:+.4f} ({bias.mean - bias.half:+.4f} to {bias.mean + bias.half:+.4f})"
            parts.append(f"{interval:<32}{bias.rmse:6.3f}")
        lines.append(f"{depth:>5}{biases['label', depth].labels:>8}   " + "   ".join(parts))
    return "\n".join(lines)


@command
def main() -> int:
    from stages.params import load_params

    parser = argparse.ArgumentParser(prog="python -m stages.claims.label_bias", description=(__doc__ or "").strip())
    parser.add_argument("--worlds", type=int, default=1920, help="worlds, one tree each (default: 1920)")
    parser.add_argument("--tasks", type=int, help=f"trees of a forest (default: annotate.tasks, or {TASKS} where that is 0)")
    parser.add_argument("--iterations", type=int, help="of a tree (default: annotate.iterations)")
    parser.add_argument("--min-visits", type=int, help="of a labelled node (default: annotate.labels.min_visits)")
    parser.add_argument("--seed", type=int, default=0, help="which worlds, and what the trees draw (default: 0)")
    parser.add_argument("--kind", choices=("coin", "sure"), default="coin", help="of world: ends by chance or by the leaf")
    options = parser.parse_args()
    params = load_params().annotate
    visits = options.min_visits or params.labels.min_visits
    counts = {"tasks": options.tasks or params.tasks or TASKS, "iterations": options.iterations or params.iterations}
    params = params.model_copy(update={**counts, "labels": params.labels.model_copy(update={"min_visits": visits})})
    print(table(measure(params, options.worlds, options.seed, options.kind)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
