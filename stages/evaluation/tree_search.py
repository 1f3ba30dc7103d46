"""Plays panels by tree search at test time (`<model>+search`): the search chooses the actions, then they are played and recorded
like those of any model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stages.agent.active_episode import EpisodeRequest
from stages.agent.recorded_engine import RecordedEngine
from stages.agent.rollout import Labels, collect, turn_key
from stages.annotation.moves import moves
from stages.annotation.search import Search
from stages.annotation.settings import Annotate, Selection
from stages.engine.engine import Engine, Sampling, Turn
from stages.records.episode import Episode
from stages.records.task import Task
from stages.seeding import key64

if TYPE_CHECKING:
    from stages.agent.chat import Chat
    from stages.agent.environment_pool import EnvironmentPool
    from stages.annotation.tree import Tree
    from stages.evaluation.settings import TreeSearch

AT_ONCE = 128
"""Trees grown together, each with an environment and caches of its own."""


def tree_settings(search: TreeSearch, max_turns: int | None) -> Annotate:
    """Trees of simulated episodes under UCT."""
    return Annotate(
        expand_k=search.expand_k,
        max_depth=max_turns,
        selection=Selection(c=search.c),
        returns=search.returns,
        sampling=search.sampling,
    )


def play_by_search(
    engine: Engine,
    chat: Chat,
    pool: EnvironmentPool,
    requests: Sequence[EpisodeRequest],
    search: TreeSearch,
    labels: Labels,
    **limits: Any,
) -> tuple[list[Episode], dict[str, dict[str, int]]]:
    """The episodes of all requests, sorted by id, and for each the `tokens` that were sampled beside its own, and the
    `environment_steps` of search and episode. limits: `max_length`, `max_turns` and `width` of `collect`. Attempts at a task
    search with different draws."""
    turns: dict[int, Turn] = {}
    spent: dict[str, dict[str, int]] = {}
    by_attempt: dict[int, dict[str, EpisodeRequest]] = {}
    for request in requests:
        by_attempt.setdefault(request.attempt, {})[request.task.task_id] = request
    for attempt, of_attempt in sorted(by_attempt.items()):
        tasks = [of_attempt[task_id].task for task_id in sorted(of_attempt)]
        for start in range(0, len(tasks), AT_ONCE):
            seed = key64(labels.seed, labels.stream, "search", attempt)
            part = tasks[start : start + AT_ONCE]
            for tree, path in searched(engine, chat, pool, part, search, seed, limits["max_length"], limits["max_turns"]):
                request = of_attempt[tree.task_id]
                own = recorded(tree, path)
                turns |= {turn_key(labels, tree.task_id, attempt, number): turn for number, turn in enumerate(own)}
                spent[request.episode_id] = {
                    "tokens": tree.counters["policy_tokens"] - sum(len(turn.token_ids) for turn in own),
                    "environment_steps": tree.counters["environment_steps"] + len(own),
                }
    sampling = Sampling(**search.sampling.model_dump())
    return collect(RecordedEngine(turns), chat, pool, requests, sampling, labels, **limits), spent


def searched(
    engine: Engine,
    chat: Chat,
    pool: EnvironmentPool,
    tasks: Sequence[Task],
    search: TreeSearch,
    seed: int,
    max_length: int,
    max_turns: int | None,
) -> list[tuple[Tree, list[int]]]:
    """Each task's tree, and the nodes of the episode to play."""
    paths: dict[str, list[int]] = {task.task_id: [] for task in tasks}

    def plan(tree: Tree) -> Any:
        return moves(tree, search.iterations, paths[tree.task_id])

    trees = Search(engine, chat, pool, tree_settings(search, max_turns), seed, max_length, plan=plan).grow(tasks)
    return [(tree, paths[tree.task_id]) for tree in trees]


def recorded(tree: Tree, path: Sequence[int]) -> list[Turn]:
    """The turns of a path, of session 0."""
    edges = [tree.nodes[node].edge for node in path]
    return [Turn(0, edge.token_ids, edge.logprobs, edge.stop_reason, owners=edge.owners) for edge in edges]
