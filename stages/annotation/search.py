"""Monte-Carlo tree search with the policy, over environment snapshots and forked key/value caches, for many trees at once.

One iteration of a tree: descend to the first node whose next action the policy has not drawn `expand_k` times; let the policy
play from there to the end; enter the whole rollout into the tree, back it up. So a node is expanded lazily, one draw per visit,
every sampled token ends up in the tree, exactly equal actions share a node, and expansion and evaluation are one rollout.
Parts of a tree where nothing is left to learn are passed over; when that is all of it, iterations only count visits.

The environment is stepped only for actions that the tree does not know: a rollout that follows known nodes reads their outcomes,
and its environment is brought to the place where it leaves the tree. This assumes that an action has the same outcome each time
it is taken from a state, which snapshots that include the random state guarantee.

What a tree becomes depends on its own key alone: trees never wait for each other, and each draw is keyed by (seed, "annotate",
task, path of the start node, draw, turn), so that 1 tree and 64 at once give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from stages.agent.engine import Engine, Sampling, Turn
from stages.annotation.tree import Edge, Tree
from stages.environments.protocol import SUCCESS_TERM, Environment, Task, opening
from stages.params import Annotate
from stages.seeding import key64

CACHED_TOKENS = 2048
"""Tokens of key/value cache kept per tree beside its root's (4 KB a token for the shipped model, some 100 KB for a 1 B one)."""


class ChatFormat(Protocol):
    """What the search needs of `stages.agent.chat.Chat`."""

    def prompt_tokens(self, text: str) -> list[int]: ...

    def closing_tokens(self, turn_ids: Sequence[int]) -> list[int]: ...

    def observation_tokens(self, text: str) -> list[int]: ...

    def action_text(self, turn_ids: Sequence[int]) -> str: ...


class Environments(Protocol):
    """What the search needs of `stages.agent.rollout.EnvironmentPool`."""

    def take(self) -> Environment: ...

    def give_back(self, environment: Environment) -> None: ...


class PrefixStore:
    """Engine prefixes (tokens with their cache) of a tree's nodes: the root's for good, others by last use within a budget."""

    def __init__(self, root: Any, budget: int) -> None:
        self._root, self._budget = root, budget
        self._kept: dict[int, tuple[Any, int]] = {}

    def add(self, node: int, prefix: Any, tokens: int) -> None:
        """Keep a node's prefix of `tokens` tokens; those used longest ago make room."""
        self._kept.pop(node, None)
        self._kept[node] = (prefix, tokens)
        while self._kept and sum(size for _, size in self._kept.values()) > self._budget:
            del self._kept[next(iter(self._kept))]

    def nearest(self, path: Sequence[int]) -> tuple[int, Any]:
        """The deepest node of a root-to-node path that has a prefix, as its place in the path, and the prefix."""
        for place in range(len(path) - 1, 0, -1):
            if path[place] in self._kept:
                self._kept[path[place]] = found = self._kept.pop(path[place])
                return place, found[0]
        return 0, self._root


@dataclass
class _Growth:
    """A tree that is being grown. `environments` are on its task; `snapshots` are the environment's, by node."""

    task: Task
    tree: Tree
    prefixes: PrefixStore
    snapshots: dict[int, Any]
    environments: list[Environment]
    lengths: list[int] = field(default_factory=list)
    """Tokens of each node's history, by node."""
    rollouts: list[_Rollout] = field(default_factory=list)
    running: int = 0


@dataclass
class _Rollout:
    growth: _Growth
    start: int
    draw: int
    session: int
    length: int
    """Tokens in the session."""
    node: int
    """Where it is in the tree; -1 once it has left it."""
    edges: list[Edge] = field(default_factory=list)
    environment: Environment | None = None
    prefix: tuple[Any, int] | None = None
    """The engine's prefix after the first turn, and its tokens, where the tree has no such node yet."""


class Search:
    """Grows trees. `params`: section `annotate`; `max_length`: longest history in tokens; errors of parts pass through.

    `threaded`: environments act in a thread of their own while the engine decodes; the trees are the same.
    """

    def __init__(
        self,
        engine: Engine,
        chat: ChatFormat,
        pool: Environments,
        params: Annotate,
        seed: int,
        max_length: int,
        threaded: bool = True,
    ) -> None:
        self.engine, self.chat, self.pool, self.params = engine, chat, pool, params
        self.seed, self.max_length, self.threaded = seed, max_length, threaded
        self.sampling = Sampling(**params.sampling.model_dump())
        self._playing: dict[int, _Rollout] = {}

    def grow(self, tasks: Sequence[Task], on_tree: Callable[[Tree], None] | None = None) -> list[Tree]:
        """One tree per task, in the tasks' order; `on_tree` is told of each as it is finished."""
        done: list[Tree] = []

        def finished(tree: Tree) -> None:
            done.append(tree)
            if on_tree:
                on_tree(tree)

        growths = self._plant(tasks)
        with ThreadPoolExecutor(1, thread_name_prefix="environments") as workers:
            acting: list[tuple[_Rollout, Turn, str, Future]] = []
            for growth in growths:
                self._next(growth, finished)
            while self._playing:
                turns = self.engine.advance()
                for rollout, turn, action, future in acting:
                    self._record(rollout, self._edge(rollout, turn, action, *future.result()), finished)
                acting = []
                for turn in turns:
                    rollout = self._playing[turn.session]
                    rollout.growth.tree.counters["policy_tokens"] += len(turn.token_ids)
                    known = self._known(rollout, turn)
                    if known is not None:
                        self._record(rollout, known, finished)
                        continue
                    action = self.chat.action_text(turn.token_ids)
                    future = workers.submit(self._act, rollout, action)
                    if not self.threaded:
                        future.exception()
                    acting.append((rollout, turn, action, future))
        order = {growth.task.task_id: place for place, growth in enumerate(growths)}
        return sorted(done, key=lambda tree: order[tree.task_id])

    # ---- trees --------------------------------------------------------------------------------------------------------------

    def _plant(self, tasks: Sequence[Task]) -> list[_Growth]:
        """Reset an environment per task, feed all prompts in one go; a prompt without room for a turn makes a truncated root."""
        growths: list[_Growth] = []
        sessions: list[int] = []
        for task in tasks:
            environment = self.pool.take()
            observation = environment.reset(task).text
            tokens = self.chat.prompt_tokens(opening(task.prompt, observation))
            fits = len(tokens) < self.max_length
            root = Edge("", (), (), observation, tuple(tokens), 0.0, False, not fits, environment.state_key())
            tree = Tree(task.task_id, root, self.params.expand_k, self.params.backup, self.params.gamma)
            growth = _Growth(task, tree, PrefixStore(None, 0), {0: environment.snapshot()}, [environment], [len(tokens)])
            growths.append(growth)
            sessions.append(self.engine.open(tokens) if fits else -1)
        for growth, session in zip(growths, sessions, strict=True):
            if session >= 0:
                # A fork has the whole prompt in its cache, which the session just opened need not have.
                (fork,) = self.engine.fork(session, 1)
                growth.prefixes = PrefixStore(self.engine.snapshot(fork), CACHED_TOKENS)
                self.engine.close(fork)
                self.engine.close(session)
        return growths

    def _next(self, growth: _Growth, finished: Callable[[Tree], None]) -> None:
        """Start the tree's next iteration; iterations that end at a known end are done at once."""
        tree, params = growth.tree, self.params
        while tree.iterations < params.iterations and not (params.stop_on_success and tree.solved):
            start = tree.descend(params.selection)
            if not tree.nodes[start].ended:
                self._launch(growth, start)
                return
            tree.iterations += 1
            tree.counters["known_ends"] += 1
            for _ in range(params.evaluation.rollouts):
                tree.insert(start, (), tree.iterations)
        for environment in growth.environments:
            self.pool.give_back(environment)
        finished(tree)

    def _launch(self, growth: _Growth, start: int) -> None:
        """Begin the iteration's rollouts from `start`."""
        tree = growth.tree
        path = tree.path(start)
        place, prefix = growth.prefixes.nearest(path)
        edges = [tree.nodes[index].edge for index in path[place + 1 :]]
        after = [token for edge in edges for token in (*edge.token_ids, *edge.context_ids)]
        growth.rollouts = []
        growth.running = self.params.evaluation.rollouts
        for number in range(growth.running):
            session = self.engine.open(after, prefix)
            rollout = _Rollout(growth, start, tree.nodes[start].n_rollouts + number, session, growth.lengths[start], start)
            growth.rollouts.append(rollout)
            self._playing[session] = rollout
            self._ask(rollout)

    def _ask(self, rollout: _Rollout) -> None:
        tree = rollout.growth.tree
        path = tree.nodes[rollout.start].path
        key = key64(self.seed, "annotate", tree.task_id, path, rollout.draw, len(rollout.edges))
        self.engine.request(rollout.session, key, self.sampling)

    # ---- turns --------------------------------------------------------------------------------------------------------------

    def _known(self, rollout: _Rollout, turn: Turn) -> Edge | None:
        """The turn's outcome if the tree knows it."""
        tree = rollout.growth.tree
        if rollout.node < 0:
            return None
        child = tree.child(rollout.node, turn.token_ids)
        if child is None:
            return None
        rollout.node = child
        tree.counters["reused_steps"] += 1
        return tree.nodes[child].edge

    def _act(self, rollout: _Rollout, action: str) -> tuple[Any, str, int]:
        """In the environments' thread: do the action; its step, the state after it, and steps made again to get there."""
        growth, tree = rollout.growth, rollout.growth.tree
        replayed = 0
        if rollout.environment is None:
            rollout.environment = self._environment(growth)
            path = tree.path(rollout.node)
            place = max(place for place, index in enumerate(path) if index in growth.snapshots)
            rollout.environment.restore(growth.snapshots[path[place]])
            for index in path[place + 1 :]:
                rollout.environment.step(tree.nodes[index].edge.action)
                replayed += 1
                if index == rollout.start:
                    growth.snapshots[index] = rollout.environment.snapshot()
        step = rollout.environment.step(action)
        return step, "" if step.done else rollout.environment.state_key(), replayed

    def _environment(self, growth: _Growth) -> Environment:
        """An environment on the tree's task, in whatever state."""
        if growth.environments:
            return growth.environments.pop()
        environment = self.pool.take()
        environment.reset(growth.task)
        return environment

    def _edge(self, rollout: _Rollout, turn: Turn, action: str, step: Any, state_key: str, replayed: int) -> Edge:
        """What a turn brought. Cut at `max_depth`, or where neither the observation nor another turn has room."""
        counters = rollout.growth.tree.counters
        counters["environment_steps"] += 1 + replayed
        counters["replayed_steps"] += replayed
        rollout.node = -1
        context = [*self.chat.closing_tokens(turn.token_ids), *self.chat.observation_tokens(step.observation.text)]
        depth = rollout.growth.tree.nodes[rollout.start].depth + len(rollout.edges) + 1
        full = rollout.length + len(turn.token_ids) + len(context) >= self.max_length
        cut = step.truncated or depth >= self.params.max_depth or turn.stop_reason == "context" or full
        ended = step.terminated or cut
        return Edge(
            action=action,
            token_ids=turn.token_ids,
            logprobs=turn.logprobs,
            observation=step.observation.text,
            context_ids=() if ended else tuple(context),
            reward=float(step.reward),
            terminal=step.terminated,
            truncated=not step.terminated and cut,
            state_key=state_key,
            success=step.terms.get(SUCCESS_TERM),
        )

    def _record(self, rollout: _Rollout, edge: Edge, finished: Callable[[Tree], None]) -> None:
        """Add a turn to its rollout; go on, or end the rollout and with the iteration's last one the iteration."""
        growth = rollout.growth
        rollout.edges.append(edge)
        rollout.length += len(edge.token_ids) + len(edge.context_ids)
        if not (edge.terminal or edge.truncated):
            self.engine.extend(rollout.session, edge.context_ids)
            if len(rollout.edges) == 1 and growth.tree.child(rollout.start, edge.token_ids) is None:
                rollout.prefix = (self.engine.snapshot(rollout.session), rollout.length)
            self._ask(rollout)
            return
        self.engine.close(rollout.session)
        del self._playing[rollout.session]
        if rollout.environment is not None:
            growth.environments.append(rollout.environment)
        growth.running -= 1
        if growth.running == 0:
            self._back_up(growth)
            self._next(growth, finished)

    def _back_up(self, growth: _Growth) -> None:
        """Enter the iteration's rollouts in their order, whichever ended first."""
        tree = growth.tree
        tree.iterations += 1
        for rollout in growth.rollouts:
            tree.insert(rollout.start, rollout.edges, tree.iterations)
            for node in tree.nodes[len(growth.lengths) :]:
                above = growth.lengths[node.parent]
                growth.lengths.append(above + len(node.edge.token_ids) + len(node.edge.context_ids))
            if rollout.prefix is not None:
                child = tree.child(rollout.start, rollout.edges[0].token_ids)
                assert child is not None
                growth.prefixes.add(child, *rollout.prefix)
