"""The search tree of one task: a trie of everything the policy did, with the tree's statistics and the policy's own kept apart.

A node is the history after an action; the root is the task's start. Two kinds of counts:
  N, W               visits by the search and their summed returns. Selection steers them, so W/N is neither Q of the policy nor
                     Q*: it moves from the first to the second as visits grow.
  n_rollouts,        rollouts that the policy alone brought here: those started here or above and led here by its own draws.
  n_success          Nothing is selected by outcome, so n_success / n_rollouts estimates Q of the policy.
Invariants, exact: N(root) = number of visits made; N(node) = sum of its children's N + visits that ended at the node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from stages.annotation.selection import Arm, select
from stages.environments.protocol import SUCCESS_TERM, succeeded
from stages.params import Selection

Backup = Literal["mean", "max", "discounted_max"]


@dataclass(frozen=True)
class Edge:
    """One turn: the action as the policy wrote it and what the environment made of it."""

    action: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    observation: str
    context_ids: tuple[int, ...]
    """Tokens between the action and the policy's next turn; () where the episode ended."""
    reward: float
    terminal: bool
    truncated: bool
    state_key: str
    success: float | None = None
    """The environment's term of that name, where it reports one (see `stages.environments.protocol.succeeded`)."""

    def solves(self, total: float) -> bool:
        """Whether an episode of return `total` that ends with this turn has solved the task."""
        return succeeded(total, {} if self.success is None else {SUCCESS_TERM: self.success})


@dataclass
class Node:
    index: int
    parent: int
    depth: int
    edge: Edge
    path: str
    """Child ordinals from the root, e.g. "0.2.1"; names the node in random keys."""
    iteration: int
    total: float
    """Sum of rewards from the root to here."""
    N: int = 0
    W: float = 0.0
    n_success: int = 0
    n_rollouts: int = 0
    value: float = 0.0
    known: bool = False
    """Nothing is left to learn below: the episode ended here, or the node is expanded and all its children are known."""
    children: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.edge.terminal or self.edge.truncated

    @property
    def succeeded(self) -> bool:
        """Whether an episode that ends here has solved the task."""
        return self.edge.solves(self.total)

    @property
    def prior(self) -> float:
        """Length-normalised log-probability of the action under the policy, in nats per token; 0 for the root."""
        return sum(self.edge.logprobs) / len(self.edge.logprobs) if self.edge.logprobs else 0.0


def backed_up(
    backup: Backup, gamma: float, reward: float, n: int, w: float, children: Sequence[tuple[int, float]], expanded: bool
) -> float:
    """A node's value from its own counts and its children's (visits, value).

    mean: W/N. max: the best child's value once the node is expanded, W/N before. discounted_max (QLASS, 2502.02584):
    r + gamma * best child's value once expanded, r + gamma * their visit-weighted mean before; r where the episode ended. The
    first two are in units of the episode's return, the third of the return from this action on.
    """
    if backup == "discounted_max":
        if not children:
            return reward
        if expanded:
            return reward + gamma * max(value for _, value in children)
        return reward + gamma * sum(visits * value for visits, value in children) / sum(visits for visits, _ in children)
    if backup == "max" and expanded and children:
        return max(value for _, value in children)
    return w / n if n else 0.0


class Tree:
    """Grown by `descend` and `insert` in turn. `expand_k`: draws of the policy's next action that make a node expanded."""

    def __init__(self, task_id: str, root: Edge, expand_k: int, backup: Backup = "mean", gamma: float = 1.0) -> None:
        self.task_id, self.expand_k, self.backup, self.gamma = task_id, expand_k, backup, gamma
        self.nodes = [Node(0, -1, 0, root, "", 0, 0.0)]
        self.iterations = 0
        self.counters = {"environment_steps": 0, "replayed_steps": 0, "reused_steps": 0, "policy_tokens": 0, "known_ends": 0}
        """Counts of the search: environment steps made, those of them made again to get back to a state, steps spared because the
        tree knew their outcome, tokens sampled, and iterations that led to an end known already."""
        self._by_action: dict[tuple[int, tuple[int, ...]], int] = {}

    @property
    def solved(self) -> bool:
        return any(node.ended and node.succeeded for node in self.nodes)

    def child(self, index: int, token_ids: Sequence[int]) -> int | None:
        """The child of a node by exactly this action, or None."""
        return self._by_action.get((index, tuple(token_ids)))

    def path(self, index: int) -> list[int]:
        """Indices from the root to a node, both included."""
        found = [index]
        while found[-1]:
            found.append(self.nodes[found[-1]].parent)
        return found[::-1]

    def expanded(self, node: Node) -> bool:
        """Whether the policy has drawn its next action here `expand_k` times (every rollout through a node is a draw)."""
        return not node.ended and node.n_rollouts >= self.expand_k

    def descend(self, selection: Selection) -> int:
        """The node to go on from: down the best-scored children while nodes are expanded.

        Children with nothing left to learn are passed over, so that no iteration is spent on a known end while others are open.
        Once everything is known the descent is plain UCT (or PUCT) and leads to an end.
        """
        node = self.nodes[0]
        while self.expanded(node):
            children = [self.nodes[index] for index in node.children]
            if not node.known:
                children = [child for child in children if not child.known]
            arms = [Arm(child.value, child.N, child.prior) for child in children]
            node = children[select(arms, node.N, selection)]
        return node.index

    def insert(self, start: int, edges: Sequence[Edge], iteration: int) -> int:
        """Enter one rollout of the policy from `start` and back it up; the index of the last node.

        Without edges (`start` is an end known already) the visit counts for the tree, not as a rollout.
        """
        first, current = start, start
        for edge in edges:
            known = self.child(current, edge.token_ids)
            current = self._add(current, edge, iteration) if known is None else known
        below = set(self.path(current)[self.nodes[first].depth :]) if edges else set()
        final, success = self.nodes[current].total, self.nodes[current].succeeded
        for index in reversed(self.path(current)):
            node = self.nodes[index]
            node.N += 1
            node.W += final
            if index in below:
                node.n_rollouts += 1
                node.n_success += success
            node.value = self._value(node)
            node.known = node.ended or (self.expanded(node) and all(self.nodes[child].known for child in node.children))
        return current

    def _add(self, parent: int, edge: Edge, iteration: int) -> int:
        above = self.nodes[parent]
        ordinal = str(len(above.children))
        path = f"{above.path}.{ordinal}" if above.path else ordinal
        node = Node(len(self.nodes), parent, above.depth + 1, edge, path, iteration, above.total + edge.reward)
        self.nodes.append(node)
        above.children.append(node.index)
        self._by_action[parent, edge.token_ids] = node.index
        return node.index

    def _value(self, node: Node) -> float:
        children = [(self.nodes[index].N, self.nodes[index].value) for index in node.children]
        return backed_up(self.backup, self.gamma, node.edge.reward, node.N, node.W, children, self.expanded(node))

    def rows(self) -> list[dict[str, Any]]:
        """Rows of NODE_SCHEMA, by node."""
        return [
            {
                "task_id": self.task_id,
                "node": node.index,
                "parent": node.parent,
                "depth": node.depth,
                "action": node.edge.action,
                "token_ids": list(node.edge.token_ids),
                "logprob": list(node.edge.logprobs),
                "prior": node.prior,
                "N": node.N,
                "W": node.W,
                "n_success": node.n_success,
                "n_rollouts": node.n_rollouts,
                "reward": node.edge.reward,
                "terminal": node.edge.terminal,
                "truncated": node.edge.truncated,
                "state_key": node.edge.state_key,
                "iteration": node.iteration,
                "observation": node.edge.observation,
                "context_ids": list(node.edge.context_ids),
            }
            for node in self.nodes
        ]


Row = Mapping[str, Any]


def trees_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Node rows by task, tasks in order of name, nodes in order. Raises ValueError if a tree's nodes aren't 0, 1, 2, ..."""
    trees: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["task_id"], row["node"])):
        trees.setdefault(row["task_id"], []).append(row)
    for task, tree in trees.items():
        if [row["node"] for row in tree] != list(range(len(tree))):
            raise ValueError(f"nodes of task {task} are not numbered 0 to {len(tree) - 1} without gaps; run annotate again")
    return trees


def children_of(tree: Sequence[Row]) -> list[list[int]]:
    """Children of each node of one tree, in order of creation."""
    children: list[list[int]] = [[] for _ in tree]
    for row in tree[1:]:
        children[row["parent"]].append(row["node"])
    return children


def tree_values(tree: Sequence[Row], expand_k: int, backup: Backup, gamma: float) -> list[float]:
    """Every node's value under a backup rule, from its stored row alone; equal to the live search's values, bit for bit."""
    children = children_of(tree)
    values = [0.0] * len(tree)
    for row in reversed(tree):  # a child is numbered after its parent
        node = row["node"]
        expanded = not (row["terminal"] or row["truncated"]) and row["n_rollouts"] >= expand_k
        below = [(tree[child]["N"], values[child]) for child in children[node]]
        values[node] = backed_up(backup, gamma, row["reward"], row["N"], row["W"], below, expanded)
    return values
