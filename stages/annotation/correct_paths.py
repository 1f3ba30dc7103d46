"""The paths of stored trees that end in a success or a failure, as episodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from stages.annotation.labels import hard
from stages.annotation.nodes import Row, ended, forgotten, path_to, trees_of
from stages.records.actions import action_key
from stages.records.episode import Episode, Owner, TurnRecord
from stages.records.task import SUCCESS_TERM


def correct_paths(tree: Sequence[Row], count: int) -> list[list[int]]:
    """The nodes of at most `count` paths of one tree from the root to a successful end: those with the fewest turns, and of equal
    ones those found first."""
    ends = sorted((row["depth"], row["node"]) for row in tree if ended(row) and hard(row))
    return [path_to(tree, node) for _, node in ends[:count]]


def failed_paths(tree: Sequence[Row], count: int) -> list[list[int]]:
    """As `correct_paths`, of paths to an end that is not a success."""
    ends = sorted((row["depth"], row["node"]) for row in tree if ended(row) and not hard(row))
    return [path_to(tree, node) for _, node in ends[:count]]


def path_episode(tree: Sequence[Row], path: Sequence[int], domain: str) -> Episode:
    """A path from the root as an episode of the policy that grew the tree, token for token; a turn's cost is not stored and 0."""
    root, end = tree[path[0]], tree[path[-1]]
    task = root["task_id"]
    episode = Episode(f"{task}/tree-{path[-1]:04d}", task, domain, task, 0, "", "", 1.0, 1.0, 0)
    episode.append(root["context_ids"], Owner.PROMPT, -1)
    for turn, (before, node) in enumerate(pairwise(path)):
        row, start = tree[node], len(episode.token_ids)
        episode.append(row["token_ids"], row.get("owner") or Owner.POLICY, turn, row["logprob"])
        span = (tree[before]["state_key"], action_key(row["action"]), start, len(episode.token_ids))
        accepted = row.get("accepted", True)
        episode.turns.append(TurnRecord(row["action"], row["observation"], accepted, row["reward"], 0.0, *span))
        if node != path[-1]:
            episode.append(row["context_ids"], Owner.ENVIRONMENT, turn)
    episode.forgotten = forgotten(tree, path[:-1])
    episode.reward = sum(turn.reward for turn in episode.turns)
    episode.reward_terms = {SUCCESS_TERM: float(hard(end))}
    episode.terminated, episode.truncated = bool(end["terminal"]), bool(end["truncated"])
    return episode


def correct_episodes(rows: Sequence[Row], per_tree: int, domain: str) -> list[Episode]:
    """`correct_paths` of all trees as episodes, by task."""
    return [path_episode(tree, path, domain) for tree in trees_of(rows).values() for path in correct_paths(tree, per_tree)]


def failed_episodes(rows: Sequence[Row], per_tree: int, domain: str) -> list[Episode]:
    """`failed_paths` of all trees as episodes, by task."""
    return [path_episode(tree, path, domain) for tree in trees_of(rows).values() for path in failed_paths(tree, per_tree)]
