"""Monte-Carlo tree search with the policy, over environment snapshots and forked key/value caches, for many trees at once.

Each tree has a plan (stages/annotation/plans.py) that requests turns and values. The turns of all trees run in one batch of the
engine, the pending values of all trees in one pass of the value model. By default an iteration descends to the first node whose
next action was drawn fewer than `expand_k` times, rolls out the policy from there, inserts the whole rollout and backs it up. So
expansion is lazy, one draw per visit, every sampled token is in the tree, and equal actions share a node. Exhausted subtrees are
skipped; once the whole tree is exhausted, iterations only count visits.

The environment is stepped only for actions that are not in the tree: a rollout that follows known nodes reads their outcomes, and
its environment is restored where it leaves the tree. This assumes deterministic outcomes, which snapshots that include the random
state guarantee; a restored state that differs ends the search with an error.

A tree depends on its own key alone: trees never wait for each other, and each draw is keyed by (seed, "annotate", task, path of
the start node, draw, turn), so growing 1 tree or 64 at once gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from stages.agent.arguments import argument_logprobs
from stages.agent.environment_pool import result_of
from stages.annotation.derived import scaled_return, uses_value_model
from stages.annotation.histories import seen, usable
from stages.annotation.interfaces import ChatFormat, Environments, Reader
from stages.annotation.plans import search_plan
from stages.annotation.prefixes import CACHED_TOKENS, PrefixStore
from stages.annotation.requests import SearchPlan, TurnRequest, ValueRequest
from stages.annotation.tree import Edge, Tree, evidence_owners
from stages.engine.engine import Engine, Sampling, Turn
from stages.environments.learnt import Imagined
from stages.environments.protocol import Environment, allow_conversations, tell_logprobs
from stages.records.task import SUCCESS_TERM, Task, opening
from stages.runtime import spans
from stages.seeding import key64

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate


@dataclass
class _GrowingTree:
    """A tree in progress. `environments`: reset to its task; `snapshots`: of the environment, by node."""

    task: Task
    tree: Tree
    plan: SearchPlan
    prefixes: PrefixStore
    read_prefixes: PrefixStore
    """The value model's; the same object as `prefixes` if it shares the policy's engine."""
    snapshots: dict[int, Any]
    environments: list[Environment]
    lengths: list[int] = field(default_factory=list)
    """Tokens of each node's history, by node."""
    rollouts: list[_Rollout] = field(default_factory=list)
    running: int = 0
    taken: dict[int, Any] = field(default_factory=dict)
    """Snapshots of running rollouts' start nodes; usable once all are finished: their order of completion has no effect."""


@dataclass
class _Rollout:
    """A turn request in progress."""

    growth: _GrowingTree
    request: TurnRequest
    session: int
    length: int
    """Tokens in the session."""
    node: int
    """Its node in the tree; -1 after its first new action."""
    edges: list[Edge] = field(default_factory=list)
    environment: Environment | None = None
    prefix: tuple[Any, int] | None = None
    """The engine's prefix after the first turn, and its length in tokens, if the tree has no such node yet."""
    snapshot: Any = None
    """The environment's after a draw."""


class Search:
    """Grows trees. `params`: section `annotate`; `max_length`: longest history in tokens.

    `threaded`: step environments in a separate thread while the engine decodes; the trees are the same. `reader`: the value
    model; required (ValueError) unless leaves are evaluated by rollouts only. `plan`: makes each tree's plan.
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
        plan: Callable[[Tree], SearchPlan] = search_plan,
    ) -> None:
        if uses_value_model(params.evaluation) and reader is None:
            raise ValueError(f"annotate.evaluation.kind '{params.evaluation.kind}' needs a value model to read leaves with")
        self.engine, self.chat, self.pool, self.params = engine, chat, pool, params
        self.seed, self.max_length, self.threaded, self.reader, self.plan = seed, max_length, threaded, reader, plan
        self.sampling = Sampling(**params.sampling.model_dump())
        self._running: dict[int, _Rollout] = {}
        """By engine session."""
        self._unread: list[tuple[_GrowingTree, tuple[int, ...]]] = []

    def grow(self, tasks: Sequence[Task], on_tree: Callable[[Tree], None] | None = None) -> list[Tree]:
        """One tree per task, in the tasks' order; `on_tree` is called with each as it is finished."""
        done: list[Tree] = []

        def finished(tree: Tree) -> None:
            done.append(tree)
            if on_tree:
                on_tree(tree)

        growths = self._start_trees(tasks)
        with ThreadPoolExecutor(1, thread_name_prefix="environments") as workers:
            stepping: list[tuple[_Rollout, Turn, str, Future]] = []
            for growth in growths:
                self._advance_plan(growth, None, finished)
            self._evaluate(finished)
            while self._running:
                turns = self.engine.advance()
                for rollout, turn, action, future in stepping:
                    self._append_edge(rollout, self._edge(rollout, turn, action, *result_of(future)), finished)
                stepping = []
                for turn in turns:
                    rollout = self._running[turn.session]
                    rollout.growth.tree.counters["policy_tokens"] += len(turn.token_ids)
                    known = self._known_edge(rollout, turn)
                    if known is not None:
                        self._append_edge(rollout, known, finished)
                        continue
                    action = self.chat.action_text(turn.token_ids)
                    future = workers.submit(self._step_environment, rollout, action, turn)
                    if not self.threaded:
                        future.exception()
                    stepping.append((rollout, turn, action, future))
                self._evaluate(finished)
        order = {growth.task.task_id: place for place, growth in enumerate(growths)}
        return sorted(done, key=lambda tree: order[tree.task_id])

    # ---- trees --------------------------------------------------------------------------------------------------------------

    def _start_trees(self, tasks: Sequence[Task]) -> list[_GrowingTree]:
        """Reset an environment per task and prefill all prompts together; a prompt with no room for a turn gives a truncated
        root."""
        growths: list[_GrowingTree] = []
        sessions: list[int] = []
        for task in tasks:
            environment = self.pool.take()
            allow_conversations(environment, "begun")
            first = environment.reset(task)
            observation, text = first.text, opening(task.prompt, first.text)
            tokens = self.chat.prompt(text, examples=first.before).token_ids if first.before else self.chat.prompt_tokens(text)
            fits = len(tokens) < self.max_length
            root = Edge("", (), (), observation, tuple(tokens), 0.0, False, not fits, environment.state_key())
            tree = Tree(task.task_id, root, self.params, self.seed)
            prefixes = PrefixStore(None, CACHED_TOKENS)
            shared = self.reader is None or self.reader.engine is self.engine
            read = prefixes if shared else PrefixStore(None, CACHED_TOKENS)
            snapshots = {0: environment.snapshot()}
            growths.append(_GrowingTree(task, tree, self.plan(tree), prefixes, read, snapshots, [environment], [len(tokens)]))
            sessions.append(self.engine.open(tokens) if fits else -1)
        for growth, session in zip(growths, sessions, strict=True):
            if session >= 0:
                # Forking prefills the whole prompt; the session just opened need not be prefilled.
                (fork,) = self.engine.fork(session, 1)
                growth.prefixes.add(0, self.engine.snapshot(fork), growth.lengths[0])
                self.engine.close(fork)
                self.engine.close(session)
        return growths

    def _advance_plan(self, growth: _GrowingTree, results: list[list[Edge]] | None, finished: Callable[[Tree], None]) -> None:
        """Send the plan its results (None at the start) and run its next request; the tree is finished if there is none."""
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
            self._unread.append((growth, work.nodes))
        else:
            self._launch(growth, work)

    def _store_results(self, growth: _GrowingTree) -> None:
        """Keep lengths, prefixes and snapshots of the nodes that the finished rollouts created."""
        tree = growth.tree
        for node in tree.nodes[len(growth.lengths) :]:
            above = growth.lengths[node.parent]
            growth.lengths.append(above + len(node.edge.token_ids) + len(node.edge.context_ids))
        for rollout in growth.rollouts:
            child = tree.child(rollout.request.start, rollout.edges[0].token_ids)
            if child is None:  # a draw that was dropped
                continue
            if rollout.prefix is not None:
                growth.prefixes.add(child, *rollout.prefix)
            if rollout.snapshot is not None:
                growth.snapshots.setdefault(child, rollout.snapshot)
        growth.snapshots.update(growth.taken)
        growth.rollouts, growth.taken = [], {}

    def _open(self, engine: Engine, store: PrefixStore, tree: Tree, node: int, further: Sequence[Edge] = ()) -> int:
        """A session with a node's history and `further` turns, less what turns hid."""
        path = tree.path(node)
        edges = [*(tree.nodes[index].edge for index in path[1:]), *further]
        place, prefix = store.nearest(path)
        while (most := usable(edges, place)) < place:
            place, prefix = store.nearest(path[: most + 1])
        after = seen(self.chat, edges, place)
        return engine.open(after if prefix is not None else [*tree.nodes[0].edge.context_ids, *after], prefix)

    def _launch(self, growth: _GrowingTree, requests: Sequence[TurnRequest]) -> None:
        """Start a plan's requests as one batch."""
        growth.running = len(requests)
        for request in requests:
            session = self._open(self.engine, growth.prefixes, growth.tree, request.start)
            rollout = _Rollout(growth, request, session, growth.lengths[request.start], request.start)
            growth.rollouts.append(rollout)
            self._running[session] = rollout
            self._request_turn(rollout)

    def _evaluate(self, finished: Callable[[Tree], None]) -> None:
        """Run the value requests of all trees in one batch; repeat while plans request more."""
        while self._unread:
            waiting, self._unread = self._unread, []
            reader = self.reader
            assert reader is not None
            requested = [(growth, node) for growth, nodes in waiting for node in nodes]
            sessions = [self._open(reader.engine, growth.read_prefixes, growth.tree, node) for growth, node in requested]
            worst, best = self.params.returns
            for (growth, node), session, value in zip(requested, sessions, reader.values(sessions), strict=True):
                at = growth.tree.nodes[node]
                at.model_value = scaled_return(self.params, min(best, max(worst, at.total + value)))
                growth.tree.counters["values_read"] += 1
                growth.read_prefixes.add(node, reader.engine.snapshot(session), growth.lengths[node])
                reader.engine.close(session)
            for growth, _ in waiting:
                self._advance_plan(growth, [], finished)

    def _request_turn(self, rollout: _Rollout) -> None:
        tree, request = rollout.growth.tree, rollout.request
        path = tree.nodes[request.start].path + {"rollout": "", "draw": "+", "ahead": "*"}[request.kind]
        key = key64(self.seed, "annotate", tree.task_id, path, request.number, len(rollout.edges))
        self.engine.request(rollout.session, key, self._sampling(request, len(rollout.edges)))

    def _sampling(self, request: TurnRequest, turn: int) -> Sampling:
        """Sampling of a turn: `sampling` for turns that expand the tree, `evaluation.temperature` for a rollout's others."""
        temperature = self.params.evaluation.temperature
        if request.kind == "ahead":
            return replace(self.sampling, temperature=0.0)
        expands = request.kind == "draw" or (turn == 0 and self.params.expansion.kind == "lazy")
        return self.sampling if expands or temperature is None else replace(self.sampling, temperature=temperature)

    # ---- turns --------------------------------------------------------------------------------------------------------------

    def _known_edge(self, rollout: _Rollout, turn: Turn) -> Edge | None:
        """The turn's edge if it is already in the tree."""
        tree = rollout.growth.tree
        if rollout.node < 0:
            return None
        child = tree.child(rollout.node, turn.token_ids)
        if child is None:
            return None
        rollout.node = child
        tree.counters["reused_steps"] += 1
        return tree.nodes[child].edge

    @spans.span("environment")
    def _step_environment(self, rollout: _Rollout, action: str, turn: Turn) -> tuple[Any, str, int]:
        """In the environments' thread: take the action; its step, the state after it, and the number of steps replayed."""
        growth, tree = rollout.growth, rollout.growth.tree
        replayed = 0
        if rollout.environment is None:
            rollout.environment = self._environment(growth)
            path = tree.path(rollout.node)
            start = rollout.request.start
            known = {**growth.snapshots, start: growth.taken[start]} if start in growth.taken else growth.snapshots
            place = max(place for place, index in enumerate(path) if index in known)
            rollout.environment.restore(known[path[place]])
            for index in path[place + 1 :]:
                known_edge = tree.nodes[index].edge
                tell_logprobs(rollout.environment, argument_logprobs(self.chat, rollout.environment, known_edge))
                rollout.environment.step(known_edge.action)
                replayed += 1
                if index == start:
                    growth.taken[index] = rollout.environment.snapshot()
            self._check_state(growth, path[-1], rollout.environment)
            if self.params.evaluation.model_rollouts is not None and rollout.request.kind == "rollout":  # a learnt model responds
                rollout.environment.restore(Imagined(rollout.environment.snapshot()))
        tell_logprobs(rollout.environment, argument_logprobs(self.chat, rollout.environment, turn))
        step = rollout.environment.step(action)
        if step.done:
            return step, "", replayed
        if rollout.request.kind == "draw":
            rollout.snapshot = rollout.environment.snapshot()
        return step, rollout.environment.state_key(), replayed

    @staticmethod
    def _check_state(growth: _GrowingTree, node: int, environment: Environment) -> None:
        """Raise ValueError if the restored state differs from the node's."""
        found, known = environment.state_key(), growth.tree.nodes[node].edge.state_key
        if found != known:
            actions = [growth.tree.nodes[index].edge.action for index in growth.tree.path(node)[1:]]
            raise ValueError(
                f"task {growth.task.task_id}: after {actions} the environment was in state {known!r}, and now in {found!r}; tree "
                "search needs snapshots of the whole state, including random generators, and steps that depend on nothing else"
            )

    def _environment(self, growth: _GrowingTree) -> Environment:
        """An environment reset to the tree's task, in any state."""
        if growth.environments:
            return growth.environments.pop()
        environment = self.pool.take()
        allow_conversations(environment, "begun")
        environment.reset(growth.task)
        return environment

    def _edge(self, rollout: _Rollout, turn: Turn, action: str, step: Any, state_key: str, replayed: int) -> Edge:
        """The edge of a turn; truncated at `max_depth`, or if the observation and another turn do not fit the context."""
        counters = rollout.growth.tree.counters
        imagined = self.params.evaluation.model_rollouts is not None and rollout.request.kind == "rollout"
        counters["environment_steps"] += replayed + (not imagined)
        spans.count("environment_steps", replayed + (not imagined))
        if imagined:
            counters["model_steps"] += 1
        counters["replayed_steps"] += replayed
        rollout.node = -1
        context = [*self.chat.closing_tokens(turn.token_ids), *self.chat.observation_tokens(step.observation.text)]
        depth = rollout.growth.tree.nodes[rollout.request.start].depth + len(rollout.edges) + 1
        full = rollout.length + len(turn.token_ids) + len(context) >= self.max_length
        deepest = self.params.max_depth is not None and depth >= self.params.max_depth
        cut = step.truncated or deepest or turn.stop_reason == "context" or full
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
            imagined=imagined,
            owners=evidence_owners(turn) if step.evidence else turn.owners,
            stop_reason=turn.stop_reason,
            forgets=step.forgets if step.forgets < depth else 0,
        )

    def _reopen(self, rollout: _Rollout) -> None:
        """Continue in a session without what the newest turn hid."""
        del self._running[rollout.session]
        self.engine.close(rollout.session)
        growth = rollout.growth
        rollout.session = self._open(self.engine, growth.prefixes, growth.tree, rollout.request.start, rollout.edges)
        self._running[rollout.session] = rollout

    def _append_edge(self, rollout: _Rollout, edge: Edge, finished: Callable[[Tree], None]) -> None:
        """Add a turn to its rollout and request the next one, or finish the rollout; the last of a batch advances the plan."""
        growth, request = rollout.growth, rollout.request
        rollout.edges.append(edge)
        rollout.length += len(edge.token_ids) + len(edge.context_ids)
        if not (edge.terminal or edge.truncated):
            if edge.forgets:
                self._reopen(rollout)
            else:
                self.engine.extend(rollout.session, edge.context_ids)
            if len(rollout.edges) == 1 and growth.tree.child(request.start, edge.token_ids) is None:
                rollout.prefix = (self.engine.snapshot(rollout.session), rollout.length)
            if len(rollout.edges) != request.turns:
                self._request_turn(rollout)
                return
        self.engine.close(rollout.session)
        del self._running[rollout.session]
        if rollout.environment is not None:
            growth.environments.append(rollout.environment)
        growth.running -= 1
        if growth.running == 0:
            self._advance_plan(growth, [done.edges for done in growth.rollouts], finished)
