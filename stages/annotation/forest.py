"""Chooses tasks and grows their search trees, in chunks, with a checkpoint per tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from stages.annotation.derived import uses_value_model
from stages.annotation.settings import Annotate
from stages.environments.learnt import Imaginable
from stages.environments.protocol import Domain
from stages.records.episode import read_rows
from stages.records.task import Task
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.shards import Shard
from stages.runtime.stage import StageContext
from stages.seeding import key64, permutation

if TYPE_CHECKING:
    from stages.agent.player import Player
    from stages.annotation.model_rollouts import LearntDynamics
    from stages.annotation.search import Reader, Search
    from stages.annotation.tree import Tree


@dataclass(frozen=True)
class Forest:
    """Finished trees as node rows, and each tree's costs."""

    rows: list[dict[str, Any]]
    costs: list[dict[str, Any]]
    """Per tree: task_id, iterations and the counters of `Tree`."""

    @classmethod
    def of(cls, trees: Sequence[Tree]) -> Forest:
        rows = [row for tree in trees for row in tree.rows()]
        return cls(rows, [{"task_id": tree.task_id, "iterations": tree.iterations, **tree.counters} for tree in trees])

    @property
    def total_costs(self) -> dict[str, int]:
        """The sums of `costs` over the trees."""
        return {name: sum(cost[name] for cost in self.costs) for name in self.costs[0] if name != "task_id"}

    def __add__(self, other: Forest) -> Forest:
        return Forest(self.rows + other.rows, self.costs + other.costs)


def choose_tasks(tasks: Sequence[Task], difficulty: Mapping[str, float], count: int, seed: int) -> list[Task]:
    """`count` of the tasks, sorted by id: first those the policy sometimes solves (0 < success rate < 1), then those never tried,
    then the rest; shuffled within each group."""

    def rank(task: Task) -> int:
        share = difficulty.get(task.task_id)
        return 1 if share is None else (0 if 0.0 < share < 1.0 else 2)

    shuffled = permutation(sorted(tasks, key=lambda task: task.task_id), seed, "annotate_tasks")
    return sorted(sorted(shuffled, key=rank)[:count], key=lambda task: task.task_id)


def grow_forest(
    search: Search, tasks: Sequence[Task], chunk: int, checkpoints: Checkpoints, bar: Any, shard: Shard | None = None
) -> Forest:
    """Grow one tree per task, `chunk` at a time. Each finished tree is a checkpoint and is not grown again; trees do not depend
    on those that grow beside them. A shard grows the trees of its own tasks."""
    forest = Forest([], [])
    tasks = [task for number, task in enumerate(tasks) if shard is None or shard.owns(number)]
    for start in range(0, len(tasks), chunk):
        part = tasks[start : start + chunk]
        grown: dict[str, Forest | None] = {task.task_id: checkpoints.load(_checkpoint(task.task_id)) for task in part}
        missing = [task for task in part if grown[task.task_id] is None]
        if len(missing) < len(part):
            bar.restore(len(part) - len(missing))

        def finished(tree: Tree, grown: dict[str, Forest | None] = grown) -> None:
            grown[tree.task_id] = Forest.of([tree])
            checkpoints.save(_checkpoint(tree.task_id), grown[tree.task_id])
            bar.advance(1, f"{len(tree.nodes)} nodes")

        if missing:
            search.grow(missing, on_tree=finished)
        forest = sum((one for one in grown.values() if one is not None), start=forest)
    return forest


def grown(context: StageContext, tasks: Sequence[Task]) -> Forest:
    """The trees of `tasks`, all of which are checkpoints."""
    checkpoints = Checkpoints(context, classes=(Forest,))
    return sum((checkpoints.load(_checkpoint(task.task_id)) for task in tasks), start=Forest([], []))


def _checkpoint(task_id: str) -> str:
    """The name of a tree's checkpoint, hashed, since task ids may contain characters that file names may not."""
    return f"tree-{key64('tree', task_id):016x}"


def leaf_evaluator(context: StageContext, player: Player, params: Annotate, checkpoints: Checkpoints) -> Reader | None:
    """The value model that evaluates leaves, fitted on the episodes of rollout; None if only rollouts evaluate them.

    Raises ValueError for an engine without hidden states.
    """
    if not uses_value_model(params.evaluation):
        return None
    from stages.agent.policy import load_policy
    from stages.annotation.leaf_values import HeadEvaluator, episode_paths, fit_leaf_model, fitted_weights, leaf_model
    from stages.engine.local_engine import make_engine

    resources = context.params.resources
    own = params.evaluation.backbone == "own"
    if not own and not hasattr(player.engine, "read"):
        raise ValueError(
            f"annotate.evaluation.backbone: policy needs hidden states, which resources.engine.kind: "
            f"{resources.engine.kind} does not return; set backbone to own"
        )
    policy = player.policy or load_policy(context.data / "models" / "sft", device=resources.device, precision=resources.precision)
    weights = checkpoints.load("leaf-values")
    model = leaf_model(policy.model, params, weights)
    if weights is None:
        gamma = params.gamma if params.backup == "discounted_max" else 1.0  # as the tree adds a leaf's value
        paths = episode_paths(read_rows(context.data / "rollouts" / str(context.domain) / "episodes.parquet"), gamma)
        with context.progress("fitting leaf values", 1, "model"):
            fit_leaf_model(model, paths, params, context.params.seed, resources.tokens_per_batch)
        checkpoints.save("leaf-values", fitted_weights(model, params))
    model.eval()
    engine = make_engine(model.backbone, [], resources.slots, context.params.model.max_length) if own else player.engine
    return HeadEvaluator(engine, model)


def search_trees(
    context: StageContext,
    domain: Domain,
    player: Player,
    tasks: Sequence[Task],
    params: Annotate,
    dynamics: LearntDynamics | None = None,
) -> Forest:
    """The trees of all tasks, grown with the policy; dynamics: what rollouts are played in, if not in the environment."""
    from stages.agent.environment_pool import EnvironmentPool, processes_beside
    from stages.annotation.search import Search

    assert context.domain is not None
    worlds = context.data / "curated" / context.domain / "worlds"
    max_length, checkpoints = context.params.model.max_length, Checkpoints(context, classes=(Forest,))
    processes = processes_beside(context.params.resources)
    evaluator = leaf_evaluator(context, player, params, checkpoints)
    make = partial(domain.make, worlds)
    if dynamics is not None:
        assert isinstance(domain, Imaginable)
        make = partial(domain.imagined, worlds, dynamics.features, dynamics.model)
    with EnvironmentPool(make, processes) as pool, context.progress("growing", len(tasks), "tree") as bar:
        search = Search(player.engine, player.chat, pool, params, context.params.seed, max_length, reader=evaluator)
        return grow_forest(search, tasks, params.chunk, checkpoints, bar, context.shard)
