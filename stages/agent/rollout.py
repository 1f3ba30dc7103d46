"""Plays many episodes at once: policy turns through an engine, while environment steps run in another thread.

The order of all work depends only on the requests: the turns of one `advance` go to the environments, the next `advance` runs
meanwhile, then the environments' results are taken in submission order, however long each took. With a `Plan`
(stages/agent/branching.py) a group is played in rounds, and some episodes are branches of others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from stages import seeding
from stages.agent.active_episode import ActiveEpisode, BranchPoint, EpisodeRequest, in_thought, turn_messages
from stages.agent.arguments import argument_logprobs
from stages.agent.branching import Plan
from stages.agent.chat import Chat, Encoded
from stages.agent.conversations import continued, elsewhere, whole
from stages.agent.environment_pool import EnvironmentPool, result_of
from stages.agent.forgetting import forget, reopened, visible
from stages.agent.rounds import Group, Rounds
from stages.engine.engine import Engine, Sampling, Turn
from stages.environments.protocol import Most, Step, allow_conversations, tell_logprobs
from stages.records.episode import Episode, Owner
from stages.records.task import Task, opening
from stages.records.thinking import ParsedTurn
from stages.runtime import spans


@dataclass(frozen=True)
class Labels:
    """Metadata of all episodes of a collection. `stream` separates the random draws of different uses."""

    seed: int
    policy_hash: str = ""
    params_hash: str = ""
    stream: str = "rollout"


def turn_key(labels: Labels, task_id: str, attempt: int, turn: int) -> int:
    """The random key of one turn."""
    return seeding.key64(labels.seed, labels.stream, task_id, attempt, turn)


def new_episode(request: EpisodeRequest, sampling: Sampling, labels: Labels, role: str) -> Episode:
    """The episode of a request before its first token, as `role` plays it."""
    return Episode(
        episode_id=request.episode_id,
        task_id=request.task.task_id,
        domain=request.task.domain,
        group_id=request.group_id,
        seed=labels.seed,
        policy_hash=labels.policy_hash,
        params_hash=labels.params_hash,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        role=role,
    )


def attempts(tasks: Iterable[Task], count: int, first: int = 0, role: str = "") -> list[EpisodeRequest]:
    """`count` requests per task, in one group each, numbered from `first`."""
    return [EpisodeRequest(task, first + index, task.task_id, role) for task in tasks for index in range(count)]


class _Inline:
    """Replaces a thread pool: runs each task at once."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        return None


class Collector:
    """One collection; see `collect`."""

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        pool: EnvironmentPool,
        requests: Sequence[EpisodeRequest],
        sampling: Sampling,
        labels: Labels,
        *,
        max_length: int,
        max_turns: int | None,
        width: int,
        on_episode: Callable[[Episode], None] | None,
        plan: Plan | None = None,
    ) -> None:
        self.engine, self.chat, self.pool = engine, chat, pool
        self.sampling, self.labels = sampling, labels
        self.max_length, self.max_turns, self.width = max_length, max_turns, width
        self.on_episode = on_episode
        self._most: Most = "several" if plan is None else "begun"
        ordered = sorted(requests, key=lambda request: (request.task.task_id, request.attempt))[::-1]
        self._rounds = Rounds(plan, ordered, labels.seed, labels.stream)
        reserve = {request.episode_id for request in self._rounds.reserve}
        self._waiting = [request for request in ordered if request.episode_id not in reserve]
        self._workers: Any = None
        self._branches: list[tuple[ActiveEpisode, Future]] = []
        """Branches whose environments are being restored."""
        if len({request.episode_id for request in requests}) != len(requests):
            raise ValueError("two requests have the same task and attempt; number the attempts at a task differently")
        self._playing: dict[int, ActiveEpisode] = {}
        self._prompts: dict[str, tuple[Any, Encoded]] = {}
        self._forks: dict[str, list[int]] = {}
        self.done: list[Episode] = []

    # ---- in the environments' thread ----------------------------------------------------------------------------------------

    @staticmethod
    @spans.span("environment")
    def _reset(play: ActiveEpisode) -> str:
        """Start the task; return the first observation."""
        allow_conversations(play.environment, play.conversations)
        observation = play.environment.reset(play.request.task)
        play.state_key, play.before = play.environment.state_key(), observation.before
        return observation.text

    @staticmethod
    @spans.span("environment")
    def _act(play: ActiveEpisode, action: str, logprobs: Sequence[float], keep: bool) -> tuple[str, Step, Any]:
        """Act; return the state key before the action, the step and, if `keep`, the environment's snapshot after it."""
        before = play.state_key
        tell_logprobs(play.environment, logprobs)
        step = play.environment.step(action)
        spans.count("environment_steps")
        play.state_key = "" if step.done else play.environment.state_key()
        return before, step, play.environment.snapshot() if keep and not step.done else None

    @staticmethod
    @spans.span("environment")
    def _restore(play: ActiveEpisode) -> None:
        """Restore the parent's state in a branch's environment."""
        allow_conversations(play.environment, play.conversations)
        play.environment.reset(play.request.task)
        play.environment.restore(play.snapshot)
        play.snapshot = None

    # ---- in the engine's thread ---------------------------------------------------------------------------------------------

    def _new_play(self, request: EpisodeRequest) -> ActiveEpisode:
        episode = new_episode(request, self.sampling, self.labels, request.role)
        play = ActiveEpisode(request, episode, self.pool.take(), conversations=self._most)
        if group := self._rounds.group(request):
            group.join(play)
        return play

    def _begin(self, started: Sequence[tuple[ActiveEpisode, str]]) -> None:
        """Open sessions for episodes whose environments were reset; a task's prompt is fed once for all its attempts, and that
        with a hint once for all attempts with the same hint."""
        fresh = []
        for play, observation in started:
            request = play.request
            text, key = opening(request.task.prompt, observation), request.prompt_key
            shown = (*play.before, text) if play.before else text
            if play.before and request.guidance:
                raise RuntimeError(f"task {request.task.task_id} begins with several messages, and hints need one")
            if key not in self._prompts:
                prompt = self.chat.prompt(text, request.guidance, (*request.examples, *play.before))
                self._prompts[key] = (shown, prompt)
                if len(prompt.token_ids) < self.max_length:
                    self._forks[key] = [self.engine.open(prompt.token_ids)]
                    fresh.append(key)
            known, prompt = self._prompts[key]
            if shown != known:
                raise RuntimeError(f"task {request.task.task_id} has different first observations: {known!r}, then {shown!r}")
            play.episode.append(prompt.token_ids, prompt.owner, -1)
            play.episode.messages.append({"role": "user", "content": text + request.guidance})
        left = Counter(request.prompt_key for request in self._waiting)
        left.update(play.request.prompt_key for play, _ in started)
        left.update(request.prompt_key for request in self._rounds.reserve)
        for key in fresh:
            if (count := left[key] - 1) > 0:
                self._forks[key] += self.engine.fork(self._forks[key][0], count)
        for play, _ in started:
            forks = self._forks.get(play.request.prompt_key)
            if not forks:
                self._finish(play, "context")
                continue
            play.session = forks.pop(0)
            self._playing[play.session] = play
            self._request_turn(play)

    def _request_turn(self, play: ActiveEpisode) -> None:
        if play.forgot:
            self._reopen(play)
        elif play.held:
            self.engine.extend(play.session, play.held)
        play.held = []
        key = turn_key(self.labels, play.request.task.task_id, play.request.attempt, play.turn + play.earlier)
        sampling = self.sampling
        if group := self._rounds.group(play.request):
            sampling = replace(sampling, candidates=group.plan.candidates)
        self.engine.request(play.session, key, sampling)

    def _reopen(self, play: ActiveEpisode) -> None:
        """Continue in a session without what the newest turn hid."""
        episode, known = play.episode, visible(play.episode.token_ids[: play.episode.hidden[-1][0]], play.episode.hidden)
        del self._playing[play.session]
        play.session = reopened(self.engine, play.session, len(known), visible(episode.token_ids, episode.hidden)[len(known) :])
        self._playing[play.session] = play
        play.forgot = False

    def _record_turn(self, turn: Turn) -> tuple[ActiveEpisode, ParsedTurn] | None:
        """Add the policy's tokens to the episode; return it with the parsed turn, or None if there was no room for a turn."""
        play = self._playing[turn.session]
        if not turn.token_ids:
            self._finish(play, "context")
            return None
        play.write(turn)
        if self._rounds.group(play.request):
            play.entropies.append(turn.entropies)
        return play, self.chat.read(turn.token_ids)

    def _record_step(self, play: ActiveEpisode, turn: Turn, parsed: ParsedTurn, before: str, step: Step, snapshot: Any) -> None:
        """Add the action's result, and continue unless the episode is over."""
        if step.conversation is not None and not step.done:
            self._switch(play, turn, parsed, before, step)
            return
        episode, observation = play.episode, step.observation.text
        play.record(turn, parsed, before, step)
        end = len(episode.token_ids)
        episode.messages += turn_messages(parsed.message, observation)
        tokens = [*self.chat.closing_tokens(turn.token_ids), *self.chat.observation_tokens(observation)]
        stop = play.stop_reason(turn, step, self.max_turns)
        if not stop and end + len(tokens) >= self.max_length:
            stop = "context"
        stop = in_thought(stop, turn, parsed)
        group = self._rounds.group(play.request)
        if group:
            group.record(play, BranchPoint(None if stop else snapshot, play.state_key, dict(play.terms), end + len(tokens)))
        if stop:
            self._finish(play, stop)
            return
        episode.append(tokens, Owner.ENVIRONMENT, play.turn)
        if 0 < step.forgets <= play.turn:
            forget(self.chat, episode, play.turn - step.forgets, play.turn)
            play.forgot = True
        play.turn += 1
        play.held = tokens
        if group:
            self._arrive(group, play)
        else:
            self._request_turn(play)

    def _switch(self, play: ActiveEpisode, turn: Turn, parsed: ParsedTurn, before: str, step: Step) -> None:
        """Add the result of an action after which another conversation of the play goes on, and continue there."""
        play.record(turn, parsed, before, elsewhere(step))
        play.episode.messages += turn_messages(parsed.message, "")
        stop = in_thought(play.stop_reason(turn, step, self.max_turns), turn, parsed)
        if not stop:
            del self._playing[play.session]
            if continued(play, self.engine, self.chat, turn, step, self.max_length):
                self._playing[play.session] = play
                self._request_turn(play)
                return
        self._finish(play, stop or "context")

    def _finish(self, play: ActiveEpisode, reason: str) -> None:
        play.end(reason)
        play.episode = whole(play)
        group = self._rounds.group(play.request)
        if play.session >= 0:
            del self._playing[play.session]
            if group is None:
                self.engine.close(play.session)
        self.pool.give_back(play.environment)
        self.done.append(play.episode)
        if self.on_episode:
            self.on_episode(play.episode)
        if group:
            self._arrive(group, play)

    def _arrive(self, group: Group, play: ActiveEpisode) -> None:
        """Record that an episode took its turn in the round or ended; after the last one, begin the next round."""
        if not group.arrive(play):
            return
        living = group.living()
        branches = [self._branch(group, fork.row, fork.turns) for fork in group.forks()]
        for left in group.leaving:
            self.engine.close(left.session)
        self._waiting += self._rounds.next_round(group, len(living) + len(branches))
        for member in living:
            self._request_turn(member)

    def _branch(self, group: Group, row: int, turns: int) -> ActiveEpisode:
        """A new episode that branches off a member; its environment is restored in the environments' thread."""
        parent = group.members[row]
        play = self._new_play(group.reserve.pop())
        play.branch_from(parent, turns)
        tokens = play.episode.token_ids
        if parent.episode.hidden:
            play.session = self.engine.open(visible(tokens, play.episode.hidden))
        else:
            known = min(len(tokens), len(parent.episode.token_ids) - len(parent.held))
            play.session = self.engine.open(tokens[known:], self.engine.snapshot(parent.session, known))
        self._playing[play.session] = play
        self._branches.append((play, self._workers.submit(self._restore, play)))
        return play

    def run(self, workers: Any) -> list[Episode]:
        """Play all requests. `workers`: a thread pool with one thread, or `_Inline`."""
        self._workers = workers
        resets: list[tuple[ActiveEpisode, Future]] = []
        steps: list[tuple[ActiveEpisode, Turn, ParsedTurn, Future]] = []
        while self._waiting or self._playing or resets:
            branches, self._branches = self._branches, []
            while self._waiting and len(self._playing) - self._rounds.parked + len(resets) < self.width:
                play = self._new_play(self._waiting.pop())
                resets.append((play, workers.submit(self._reset, play)))
            turns = self.engine.advance()
            for play, turn, parsed, future in steps:
                self._record_step(play, turn, parsed, *result_of(future))
            self._begin([(play, result_of(future)) for play, future in resets])
            for play, future in branches:
                result_of(future)
                self._request_turn(play)
            resets, steps = [], []
            for turn in turns:
                if recorded := self._record_turn(turn):
                    play, parsed = recorded
                    keep = self._rounds.group(play.request) is not None
                    drawn = argument_logprobs(self.chat, play.environment, turn)
                    steps.append((play, turn, parsed, workers.submit(self._act, play, parsed.action, drawn, keep)))
        return sorted(self.done, key=lambda episode: episode.episode_id)


def collect(
    engine: Engine,
    chat: Chat,
    pool: EnvironmentPool,
    requests: Sequence[EpisodeRequest],
    sampling: Sampling,
    labels: Labels,
    *,
    max_length: int,
    max_turns: int | None = None,
    width: int = 64,
    threaded: bool = True,
    on_episode: Callable[[Episode], None] | None = None,
    plan: Plan | None = None,
) -> list[Episode]:
    """Play all requests; returns episodes sorted by id. An episode does not depend on the others, `width` or `threaded`.

    max_length: longest episode in tokens (the engine's); max_turns: turns after which an episode is truncated; width: episodes
    played at once, ideally the engine's slots; threaded: step environments in another thread while the engine decodes;
    on_episode: called with each finished episode; plan: how groups branch, if at all.

    A turn cut by `sampling.max_tokens` counts as an action, and its message is closed by tokens owned by the environment.
    `stop_reason`: "terminated", "turn_limit" (the environment's, or `max_turns`), "context" (no room for the observation or for
    another turn), "length" (no more room within a turn), "thinking" (one of these limits was reached after a turn that was cut
    within its thought, so that its action was empty). Raises RuntimeError if a task's resets differ; environments' errors
    propagate.
    """
    collector = Collector(
        engine,
        chat,
        pool,
        requests,
        sampling,
        labels,
        max_length=max_length,
        max_turns=max_turns,
        width=width,
        on_episode=on_episode,
        plan=plan,
    )
    workers = ThreadPoolExecutor(pool.parallel, thread_name_prefix="environments") if threaded else _Inline()
    try:
        return collector.run(workers)
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
        for sessions in collector._forks.values():
            for session in sessions:
                engine.close(session)
        leaving = [play.session for group in collector._rounds.groups.values() for play in group.leaving]
        for session in [*collector._playing, *leaving]:
            engine.close(session)
