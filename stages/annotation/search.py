"""Monte-Carlo tree search with the policy, over environment snapshots and forked key/value caches, for many trees at once.

Each tree has a plan (stages/annotation/plans.py) that asks for turns and values; here they are played and read: the turns of all
trees in one batch of the engine, and the histories of all trees that wait for a value in one pass of the value model. By default
an iteration descends to the first node whose next action the policy has not drawn `expand_k` times, lets the policy play from
there to the end, enters the whole rollout into the tree and backs it up. So a node is expanded lazily, one draw per visit, every
sampled token ends up in the tree, exactly equal actions share a node, and expansion and evaluation are one rollout. Parts of a
tree where nothing is left to learn are passed over; when that is all of it, iterations only count visits.

The environment is stepped only for actions that the tree does not know: a rollout that follows known nodes reads their outcomes,
and its environment is brought to the place where it leaves the tree. This assumes that an action has the same outcome each time
it is taken from a state, which snapshots that include the random state guarantee; a state that differs when it is come back to
ends the search with an error.

What a tree becomes depends on its own key alone: trees never wait for each other, and each draw is keyed by (seed, "annotate",
task, path of the start node, draw, turn), so that 1 tree and 64 at once give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from stages.annotation.plans import search_plan
from stages.annotation.prefixes import CACHED_TOKENS, PrefixStore
from stages.annotation.tree import Edge, Tree
from stages.annotation.units import scaled_return, uses_value_model
from stages.annotation.work import SearchPlan, TurnRequest, ValueRequest
from stages.engine.engine import Engine, Sampling, Turn
from stages.environments.protocol import Environment
from stages.records.task import SUCCESS_TERM, Task, opening
from stages.seeding import key64

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate


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


class Reader(Protocol):
    """A value model over sessions of `engine`, which may be the policy's (stages/annotation/leaf_values.py)."""

    engine: Engine

    def values(self, sessions: Sequence[int]) -> list[float]:
        """The reward still to come that each session's tokens let expect."""
        ...


@dataclass
class _GrowingTree:
    """A tree that is being grown. `environments` are on its task; `snapshots` are the environment's, by node."""

    task: Task
    tree: Tree
    plan: SearchPlan
    prefixes: PrefixStore
    read_prefixes: PrefixStore
    """The value model's; `prefixes` themselves where it reads with the policy's engine."""
    snapshots: dict[int, Any]
    environments: list[Environment]
    lengths: list[int] = field(default_factory=list)
    """Tokens of each node's history, by node."""
    rollouts: list[_Rollout] = field(default_factory=list)
    running: int = 0
    taken: dict[int, Any] = field(default_factory=dict)
    """Snapshots of the starts of rollouts under way. Others may go back to them once all of these are over, since which of them
    comes first must change nothing."""


@dataclass
class _Rollout:
    """A play under way."""

    growth: _GrowingTree
    play: TurnRequest
    session: int
    length: int
    """Tokens in the session."""
    node: int
    """Where it is in the tree; -1 once it has left it."""
    edges: list[Edge] = field(default_factory=list)
    environment: Environment | None = None
    prefix: tuple[Any, int] | None = None
    """The engine's prefix after the first turn, and its tokens, where the tree has no such node yet."""
    snapshot: Any = None
    """Of a draw: the environment's after it."""


class Search:
    """Grows trees. `params`: section `annotate`; `max_length`: longest history in tokens; errors of parts pass through.

    `threaded`: environments act in a thread of their own while the engine decodes; the trees are the same. `reader`: the value
    model, which an evaluation other than by rollouts needs (ValueError without).
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
        reader: Reader | None = None,
    ) -> None:
        if uses_value_model(params.evaluation) and reader is None:
            raise ValueError(f"annotate.evaluation.kind '{params.evaluation.kind}' needs a value model to read leaves with")
        self.engine, self.chat, self.pool, self.params = engine, chat, pool, params
        self.seed, self.max_length, self.threaded, self.reader = seed, max_length, threaded, reader
        self.sampling = Sampling(**params.sampling.model_dump())
        self._playing: dict[int, _Rollout] = {}
        self._reading: list[tuple[_GrowingTree, tuple[int, ...]]] = []

    def grow(self, tasks: Sequence[Task], on_tree: Callable[[Tree], None] | None = None) -> list[Tree]:
        """One tree per task, in the tasks' order; `on_tree` is told of each as it is finished."""
        done: list[Tree] = []

        def finished(tree: Tree) -> None:
            done.append(tree)
            if on_tree:
                on_tree(tree)

        growths = self._start_trees(tasks)
        with ThreadPoolExecutor(1, thread_name_prefix="environments") as workers:
            acting: list[tuple[_Rollout, Turn, str, Future]] = []
            for growth in growths:
                self._advance_plan(growth, None, finished)
            self._read(finished)
            while self._playing:
                turns = self.engine.advance()
                for rollout, turn, action, future in acting:
                    self._append_edge(rollout, self._edge(rollout, turn, action, *future.result()), finished)
                acting = []
                for turn in turns:
                    rollout = self._playing[turn.session]
                    rollout.growth.tree.counters["policy_tokens"] += len(turn.token_ids)
                    known = self._known_edge(rollout, turn)
                    if known is not None:
                        self._append_edge(rollout, known, finished)
                        continue
                    action = self.chat.action_text(turn.token_ids)
                    future = workers.submit(self._step_environment, rollout, action)
                    if not self.threaded:
                        future.exception()
                    acting.append((rollout, turn, action, future))
                self._read(finished)
        order = {growth.task.task_id: place for place, growth in enumerate(growths)}
        return sorted(done, key=lambda tree: order[tree.task_id])

    # ---- trees --------------------------------------------------------------------------------------------------------------

    def _start_trees(self, tasks: Sequence[Task]) -> list[_GrowingTree]:
        """Reset an environment per task, feed all prompts in one go; a prompt without room for a turn makes a truncated root."""
        growths: list[_GrowingTree] = []
        sessions: list[int] = []
        for task in tasks:
            environment = self.pool.take()
            observation = environment.reset(task).text
            tokens = self.chat.prompt_tokens(opening(task.prompt, observation))
            fits = len(tokens) < self.max_length
            root = Edge("", (), (), observation, tuple(tokens), 0.0, False, not fits, environment.state_key())
            tree = Tree(task.task_id, root, self.params, self.seed)
            prefixes = PrefixStore(None, CACHED_TOKENS)
            shared = self.reader is None or self.reader.engine is self.engine
            read = prefixes if shared else PrefixStore(None, CACHED_TOKENS)
            snapshots = {0: environment.snapshot()}
            growths.append(_GrowingTree(task, tree, search_plan(tree), prefixes, read, snapshots, [environment], [len(tokens)]))
            sessions.append(self.engine.open(tokens) if fits else -1)
        for growth, session in zip(growths, sessions, strict=True):
            if session >= 0:
                # A fork has the whole prompt in its cache, which the session just opened need not have.
                (fork,) = self.engine.fork(session, 1)
                growth.prefixes.add(0, self.engine.snapshot(fork), growth.lengths[0])
                self.engine.close(fork)
                self.engine.close(session)
        return growths

    def _advance_plan(self, growth: _GrowingTree, results: list[list[Edge]] | None, finished: Callable[[Tree], None]) -> None:
        """Give the plan what it asked for, None at its start, and begin what it asks for next; without that the tree is done."""
        try:
            work = growth.plan.send(results)  # type: ignore[arg-type]
        except StopIteration:
            work = None
        self._store_results(growth)
        if work is None:
            for environment in growth.environments:
                self.pool.give_back(environment)
            finished(growth.tree)
        elif isinstance(work, ValueRequest):
            self._reading.append((growth, work.nodes))
        else:
            self._launch(growth, work)

    def _store_results(self, growth: _GrowingTree) -> None:
        """Note what the finished rollouts leave for those to come: lengths, prefixes and snapshots of the nodes they made."""
        tree = growth.tree
        for node in tree.nodes[len(growth.lengths) :]:
            above = growth.lengths[node.parent]
            growth.lengths.append(above + len(node.edge.token_ids) + len(node.edge.context_ids))
        for rollout in growth.rollouts:
            child = tree.child(rollout.play.start, rollout.edges[0].token_ids)
            if child is None:  # a draw that was dropped
                continue
            if rollout.prefix is not None:
                growth.prefixes.add(child, *rollout.prefix)
            if rollout.snapshot is not None:
                growth.snapshots.setdefault(child, rollout.snapshot)
        growth.snapshots.update(growth.taken)
        growth.rollouts, growth.taken = [], {}

    def _open(self, engine: Engine, store: PrefixStore, tree: Tree, node: int) -> int:
        """A session of a node's whole history."""
        path = tree.path(node)
        place, prefix = store.nearest(path)
        edges = [tree.nodes[index].edge for index in path[place + 1 :]]
        after = [token for edge in edges for token in (*edge.token_ids, *edge.context_ids)]
        return engine.open(after if prefix is not None else [*tree.nodes[0].edge.context_ids, *after], prefix)

    def _launch(self, growth: _GrowingTree, plays: Sequence[TurnRequest]) -> None:
        """Begin what a plan asked for at once."""
        growth.running = len(plays)
        for play in plays:
            session = self._open(self.engine, growth.prefixes, growth.tree, play.start)
            rollout = _Rollout(growth, play, session, growth.lengths[play.start], play.start)
            growth.rollouts.append(rollout)
            self._playing[session] = rollout
            self._request_turn(rollout)

    def _read(self, finished: Callable[[Tree], None]) -> None:
        """Let the value model read what the plans of all trees wait for, in one batch; again while they ask for more."""
        while self._reading:
            waiting, self._reading = self._reading, []
            reader = self.reader
            assert reader is not None
            wanted = [(growth, node) for growth, nodes in waiting for node in nodes]
            sessions = [self._open(reader.engine, growth.read_prefixes, growth.tree, node) for growth, node in wanted]
            worst, best = self.params.returns
            for (growth, node), session, value in zip(wanted, sessions, reader.values(sessions), strict=True):
                at = growth.tree.nodes[node]
                at.model_value = scaled_return(self.params, min(best, max(worst, at.total + value)))
                growth.tree.counters["values_read"] += 1
                growth.read_prefixes.add(node, reader.engine.snapshot(session), growth.lengths[node])
                reader.engine.close(session)
            for growth, _ in waiting:
                self._advance_plan(growth, [], finished)

    def _request_turn(self, rollout: _Rollout) -> None:
        tree, play = rollout.growth.tree, rollout.play
        path = tree.nodes[play.start].path + {"rollout": "", "draw": "+", "ahead": "*"}[play.kind]
        key = key64(self.seed, "annotate", tree.task_id, path, play.number, len(rollout.edges))
        self.engine.request(rollout.session, key, self._sampling(play, len(rollout.edges)))

    def _sampling(self, play: TurnRequest, turn: int) -> Sampling:
        """How a turn is drawn: what expands the tree by `sampling`, the rest of a rollout at its own temperature."""
        temperature = self.params.evaluation.temperature
        if play.kind == "ahead":
            return replace(self.sampling, temperature=0.0)
        expands = play.kind == "draw" or (turn == 0 and self.params.expansion.kind == "lazy")
        return self.sampling if expands or temperature is None else replace(self.sampling, temperature=temperature)

    # ---- turns --------------------------------------------------------------------------------------------------------------

    def _known_edge(self, rollout: _Rollout, turn: Turn) -> Edge | None:
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

    def _step_environment(self, rollout: _Rollout, action: str) -> tuple[Any, str, int]:
        """In the environments' thread: do the action; its step, the state after it, and steps made again to get there."""
        growth, tree = rollout.growth, rollout.growth.tree
        replayed = 0
        if rollout.environment is None:
            rollout.environment = self._environment(growth)
            path = tree.path(rollout.node)
            start = rollout.play.start
            known = {**growth.snapshots, start: growth.taken[start]} if start in growth.taken else growth.snapshots
            place = max(place for place, index in enumerate(path) if index in known)
            rollout.environment.restore(known[path[place]])
            for index in path[place + 1 :]:
                rollout.environment.step(tree.nodes[index].edge.action)
                replayed += 1
                if index == start:
                    growth.taken[index] = rollout.environment.snapshot()
            self._check_state(growth, path[-1], rollout.environment)
        step = rollout.environment.step(action)
        if step.done:
            return step, "", replayed
        if rollout.play.kind == "draw":
            rollout.snapshot = rollout.environment.snapshot()
        return step, rollout.environment.state_key(), replayed

    @staticmethod
    def _check_state(growth: _GrowingTree, node: int, environment: Environment) -> None:
        """Raise ValueError where a state that was come back to is not the one that was left."""
        found, known = environment.state_key(), growth.tree.nodes[node].edge.state_key
        if found != known:
            actions = [growth.tree.nodes[index].edge.action for index in growth.tree.path(node)[1:]]
            raise ValueError(
                f"task {growth.task.task_id}: after {actions} the environment was in state {known!r}, and now in {found!r}; tree "
                "search needs snapshots that copy the whole state, random numbers included, and steps that depend on nothing else"
            )

    def _environment(self, growth: _GrowingTree) -> Environment:
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
        depth = rollout.growth.tree.nodes[rollout.play.start].depth + len(rollout.edges) + 1
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
            accepted=step.accepted,
        )

    def _append_edge(self, rollout: _Rollout, edge: Edge, finished: Callable[[Tree], None]) -> None:
        """Add a turn to its rollout; go on, or end the rollout and with the last one of those asked for at once go on with the
        plan."""
        growth, play = rollout.growth, rollout.play
        rollout.edges.append(edge)
        rollout.length += len(edge.token_ids) + len(edge.context_ids)
        if not (edge.terminal or edge.truncated):
            self.engine.extend(rollout.session, edge.context_ids)
            if len(rollout.edges) == 1 and growth.tree.child(play.start, edge.token_ids) is None:
                rollout.prefix = (self.engine.snapshot(rollout.session), rollout.length)
            if len(rollout.edges) != play.turns:
                self._request_turn(rollout)
                return
        self.engine.close(rollout.session)
        del self._playing[rollout.session]
        if rollout.environment is not None:
            growth.environments.append(rollout.environment)
        growth.running -= 1
        if growth.running == 0:
            self._advance_plan(growth, [done.edges for done in growth.rollouts], finished)
