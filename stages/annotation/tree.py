"""The search tree of one task: a trie of the policy's actions, with the search's statistics separate from the policy's.

A node is the history after an action; the root is the task's start. Two kinds of counts:
  N, W               visits by the search and their summed returns. Selection steers them, so W/N is neither Q of the policy nor
                     Q*: it moves from the first to the second as visits grow.
  n_rollouts,        rollouts whose path to this node was sampled by the policy alone, from here or above. Their mean return from
  n_success, R       the node on estimates V of the policy (rule omega measures states along failed rollouts). Their number does
                     depend on the first returns: stages/annotation/pooling.py.
Exact invariants: N(root) = number of visits; N(node) = sum of its children's N + visits that ended at the node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stages.annotation import derived
from stages.annotation.backup import backed_up, mix_critic
from stages.annotation.selection import Arm, exploration, select, virtual
from stages.records.actions import action_key
from stages.records.episode import Owner
from stages.records.task import SUCCESS_TERM, succeeded
from stages.seeding import stream

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate
    from stages.engine.engine import Turn


@dataclass(frozen=True)
class Edge:
    """One turn: the policy's action and the environment's response."""

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
    accepted: bool = True
    """Whether the environment understood the action."""
    imagined: bool = False
    """Whether a learnt model responded in place of the environment."""
    success: float | None = None
    """The environment's reward term of that name, if it reports one (see `stages.records.task.succeeded`)."""
    owners: tuple[int, ...] = ()
    """Per token, who wrote it; empty: the policy wrote all."""
    stop_reason: str = "stop"
    """Of the policy's turn (`stages.engine.engine.Turn`)."""
    forgets: int = 0
    """How many turns ago the observation was made that later turns do not see (`stages.environments.protocol.Step.forgets`)."""

    def solves(self, total: float) -> bool:
        """Whether an episode of return `total` that ends with this turn solves the task."""
        return succeeded(total, {} if self.success is None else {SUCCESS_TERM: self.success})


def evidence_owners(turn: Turn) -> tuple[int, ...]:
    """`Edge.owners` of a turn that the environment takes for its own observation: evidence, except for tokens that the policy did
    not write."""
    owners = turn.owners or [Owner.POLICY] * len(turn.token_ids)
    return tuple(int(Owner.EVIDENCE) if owner == Owner.POLICY else owner for owner in owners)


@dataclass
class Node:
    index: int
    parent: int
    depth: int
    edge: Edge
    path: str
    """Child indices from the root, e.g. "0.2.1"; part of the keys of random streams."""
    iteration: int
    total: float
    """Sum of rewards from the root to here."""
    N: int = 0
    W: float = 0.0
    W2: float = 0.0
    """Sum of squared returns."""
    n_success: int = 0
    n_rollouts: int = 0
    R: float = 0.0
    """Sum over these rollouts of the discounted return after this node; `R2`: of its squares."""
    R2: float = 0.0
    value: float = 0.0
    model_value: float | None = None
    """The value model's estimate of the episode's return, in the tree's units; the return itself at a drawn end; else None."""
    drawn: bool = False
    """Eager expansion: whether its children were drawn."""
    pending: int = 0
    """Visits in progress."""
    exhausted: bool = False
    """Nothing new can be found below: a backed-up end, or an expanded node whose children are all exhausted."""
    children: list[int] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.edge.terminal or self.edge.truncated

    @property
    def succeeded(self) -> bool:
        """Whether an episode that ends here solves the task."""
        return self.edge.solves(self.total)

    @property
    def prior(self) -> float:
        """Mean log-probability per token of the action under the policy, in nats; 0 for the root."""
        return sum(self.edge.logprobs) / len(self.edge.logprobs) if self.edge.logprobs else 0.0


class Tree:
    """Grown by alternating `descend` with `insert`, or with `draw` and `back_up`. `seed`: for selection's random draws."""

    def __init__(self, task_id: str, root: Edge, params: Annotate, seed: int = 0) -> None:
        self.task_id, self.params, self.seed = task_id, params, seed
        self.nodes = [Node(0, -1, 0, root, "", 0, 0.0)]
        self.iterations = 0
        self.first_success: int | None = None
        """The iteration of the first success, or None."""
        self.counters = no_costs(params)
        """environment_steps include replayed_steps, made again to return to a state; reused_steps: outcomes read from the tree
        instead; policy_tokens: sampled; known_ends: iterations that led to a known end. Eager expansion also counts the draws
        that it drops, and a value model its evaluations."""
        self._by_action: dict[tuple[int, tuple[int, ...]], int] = {}

    def child(self, index: int, token_ids: Sequence[int]) -> int | None:
        """The child of a node by exactly this action, or None."""
        return self._by_action.get((index, tuple(token_ids)))

    def path(self, index: int) -> list[int]:
        """Indices from the root to a node, both included."""
        found = [index]
        while found[-1]:
            found.append(self.nodes[found[-1]].parent)
        return found[::-1]

    def expanded(self, node: Node, under_way: int = 0) -> bool:
        """Whether the policy has drawn its next action here `expand_k` times: under lazy expansion every rollout through a node
        is a draw, including the `under_way` ones; under eager expansion all are drawn at once."""
        if self.params.expansion.kind == "eager":
            return node.drawn
        return not node.ended and node.n_rollouts + under_way >= self.params.expand_k

    # ---- going down ---------------------------------------------------------------------------------------------------------

    def descend(self, number: int = 0, top: int = 0) -> int:
        """The leaf to evaluate: down the best-scored children from the node `top` while nodes are expanded. `number`: index among
        the leaves chosen together.

        Exhausted children are skipped, so no iteration is spent on a known end while others are open. Once `top` is exhausted,
        the descent follows the plain rule to an end.
        """
        node = self.nodes[top]
        while self.expanded(node, node.pending):
            children = [self.nodes[index] for index in node.children]
            if not node.exhausted:
                children = [child for child in children if not child.exhausted]
            if not children:
                break
            node = self.choose(node, children, number)
        return node.index

    def choose(self, node: Node, children: Sequence[Node], number: int = 0) -> Node:
        """The child that selection prefers."""
        params = self.params
        arms = [virtual(params, arm, child.pending) for arm, child in zip(self.arms(children), children, strict=True)]
        drawing = params.selection.rule == "random" or derived.unvisited_rule(params) == "random"
        key = (self.seed, "annotate", self.task_id, "select", self.iterations, number, node.path)
        c = exploration(params, self.iterations)
        place = select(arms, node.N + node.pending, params, c, stream(*key) if drawing else None)
        return children[place]

    def arms(self, children: Sequence[Node]) -> list[Arm]:
        """Siblings as selection sees them, with a critic's ranks mixed into their Q."""
        evaluation = self.params.evaluation
        q = [child.value if child.N else self.predicted_value(child.index) for child in children]
        if evaluation.critic != "none":
            q = mix_critic(q, [child.prior for child in children], [child.model_value for child in children], self.params)
        return [Arm(value, child.N, child.prior, child.ended) for value, child in zip(q, children, strict=True)]

    def pend(self, index: int, visits: int) -> None:
        """Add `visits` in progress to a node and its ancestors; negative when they are finished."""
        for node in self.path(index):
            self.nodes[node].pending += visits

    # ---- growing ------------------------------------------------------------------------------------------------------------

    def insert(self, start: int, edges: Sequence[Edge], iteration: int, model_value: float | None = None) -> int:
        """Insert one rollout of the policy from `start` and back it up; returns the index of its last node in the tree.

        Without edges (`start` is a known end) it is a visit but not a rollout. The backed-up return is mixed with `model_value`,
        if given.
        """
        final, last = self.nodes[start].total, self.nodes[start].edge
        current, depth = start, self.nodes[start].depth
        for edge in edges:
            final, last = final + edge.reward, edge
            if self.params.evaluation.keep_rollouts:
                known = self.child(current, edge.token_ids)
                current = self._add(current, edge, iteration) if known is None else known
        below = self.path(current)[depth:] if edges else []
        solved = last.solves(final)
        for index, to_go in zip(below, returns_to_go([edge.reward for edge in edges], self.params.gamma), strict=False):
            node = self.nodes[index]
            node.n_rollouts += 1
            node.n_success += solved
            node.R += to_go
            node.R2 += to_go * to_go
        if solved and not last.imagined and self.first_success is None:
            self.first_success = iteration
        value = self.scaled_return(final, last.truncated)
        share = self.params.evaluation.value_share
        self.back_up(current, value if model_value is None else (1 - share) * value + share * model_value)
        return current

    def scaled_return(self, total: float, cut: bool) -> float:
        """An episode's return in the tree's units; `annotate.cut_return`, if set, for an episode that a limit `cut`."""
        return self.params.cut_return if cut and self.params.cut_return is not None else derived.scaled_return(self.params, total)

    def back_up(self, index: int, value: float) -> None:
        """Add a visit of `value` to a node and its ancestors."""
        for place in reversed(self.path(index)):
            node = self.nodes[place]
            node.N += 1
            node.W += value
            node.W2 += value * value
            node.value = self._value(node)
            node.exhausted = node.ended or (self.expanded(node) and all(self.nodes[child].exhausted for child in node.children))

    def draw(self, index: int, edges: Sequence[Edge], iteration: int) -> list[int]:
        """Eager expansion: insert the actions drawn at a node, without rejected or duplicate ones; returns the new children. An
        end among them is its own rollout, backed up when selection first visits it."""
        node, dedupe = self.nodes[index], self.params.expansion.dedupe
        node.drawn = True
        seen = {dedupe_key(self.nodes[child].edge, dedupe) for child in node.children}
        added = []
        for edge in edges:
            name = dedupe_key(edge, dedupe)
            if self.params.expansion.drop_refused and not edge.accepted:
                self.counters["refused_draws"] += 1
            elif name in seen:
                self.counters["duplicate_draws"] += 1
            else:
                seen.add(name)
                added.append(self._add_unvisited(index, edge, iteration))
        return added

    def trace(self, start: int, edges: Sequence[Edge], iteration: int) -> list[int]:
        """Insert turns from `start` without counting a visit; returns their nodes."""
        path = [start]
        for edge in edges:
            known = self.child(path[-1], edge.token_ids)
            path.append(self._add_unvisited(path[-1], edge, iteration) if known is None else known)
        return path[1:]

    def predicted_value(self, index: int) -> float:
        """Value of an unvisited node, in the backup's units: an end's return, else the value model's estimate or the lowest
        return."""
        node, from_here = self.nodes[index], self.params.backup == "discounted_max"
        if node.ended:
            return node.edge.reward if from_here else self.scaled_return(node.total, node.edge.truncated)
        if node.model_value is None:
            return derived.lowest_value(self.params)
        return node.edge.reward + self.params.gamma * (node.model_value - node.total) if from_here else node.model_value

    def _add_unvisited(self, parent: int, edge: Edge, iteration: int) -> int:
        child = self.nodes[self._add(parent, edge, iteration)]
        if child.ended:
            child.n_rollouts, child.n_success = 1, int(child.succeeded)
            if derived.uses_value_model(self.params.evaluation):
                child.model_value = self.scaled_return(child.total, child.edge.truncated)
        return child.index

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
        model_value = node.model_value if self.params.evaluation.kind == "value_model" and not node.ended else None
        to_come = None if model_value is None else model_value - node.total
        return backed_up(self.params, node.edge.reward, node.N, node.W, children, self.expanded(node), to_come)

    def rows(self) -> list[dict[str, Any]]:
        """Rows of `node_schema`, by node."""
        return [self._row(node) for node in self.nodes]

    def _row(self, node: Node) -> dict[str, Any]:
        row = {
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
            "R": node.R,
            "R2": node.R2,
        }
        row |= {"owner": list(node.edge.owners)} if node.edge.owners else {}
        row |= {"forgets": node.edge.forgets} if node.edge.forgets else {}
        more = {"W2": node.W2, "model_value": node.model_value, "drawn": node.drawn, "accepted": node.edge.accepted}
        return row if derived.rollouts_only(self.params) else row | more


def no_costs(params: Annotate) -> dict[str, int]:
    """The counters of a tree that was not grown yet."""
    names = ["environment_steps", "replayed_steps", "reused_steps", "policy_tokens", "known_ends"]
    if params.expansion.kind == "eager":
        names += ["refused_draws", "duplicate_draws"]
    if derived.uses_value_model(params.evaluation):
        names.append("values_read")
    if params.evaluation.model_rollouts is not None:
        names.append("model_steps")
    return dict.fromkeys(names, 0)


def dedupe_key(edge: Edge, dedupe: str) -> object:
    """Actions of a node with equal keys are duplicates. An end has no state key; its text is used instead."""
    if dedupe == "tokens":
        return edge.token_ids
    return edge.state_key if dedupe == "state" and edge.state_key else action_key(edge.action)


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """G_t = r_t + gamma G_{t+1} before each turn, and 0 after the last."""
    found = [0.0]
    for reward in reversed(rewards):
        found.append(reward + gamma * found[-1])
    return found[::-1]
