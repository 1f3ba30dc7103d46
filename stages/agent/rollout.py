"""Plays many episodes at once: policy turns through an engine, environment steps in a thread of their own meanwhile.

The order of all work is fixed by the requests alone: what one `advance` returns is handed to the environments, the next `advance`
runs in the meantime, then the environments' answers are taken in the order they were handed over, however long each took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from stages import seeding
from stages.agent.chat import Chat
from stages.agent.engine import Engine, Sampling, Turn
from stages.agent.episode import Episode, Owner, TurnRecord
from stages.environments.protocol import Environment, Step, Task, opening


@dataclass(frozen=True)
class Request:
    """One episode to play. Episodes with the same `group_id` are attempts at the same task."""

    task: Task
    attempt: int
    group_id: str

    @property
    def episode_id(self) -> str:
        return f"{self.task.task_id}/{self.attempt:04d}"


@dataclass(frozen=True)
class Labels:
    """What every episode of a collection is marked with. `stream` keeps the random draws of different uses apart."""

    seed: int
    policy_hash: str = ""
    params_hash: str = ""
    stream: str = "rollout"


def turn_key(labels: Labels, task_id: str, attempt: int, turn: int) -> int:
    """The random key of one turn."""
    return seeding.key64(labels.seed, labels.stream, task_id, attempt, turn)


def attempts(tasks: Iterable[Task], count: int, first: int = 0) -> list[Request]:
    """`count` requests per task, in one group each, numbered from `first`."""
    return [Request(task, first + index, task.task_id) for task in tasks for index in range(count)]


class EnvironmentPool:
    """Environments to be used again: starting one may cost far more than resetting it."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._make = make
        self._all: list[Environment] = []
        self._free: list[Environment] = []

    def take(self) -> Environment:
        if not self._free:
            self._free.append(self._make())
            self._all.append(self._free[-1])
        return self._free.pop()

    def give_back(self, environment: Environment) -> None:
        self._free.append(environment)

    def close(self) -> None:
        for environment in self._all:
            environment.close()
        self._all, self._free = [], []

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class _Play:
    """An episode under way."""

    request: Request
    episode: Episode
    environment: Environment
    state_key: str = ""
    session: int = -1
    turn: int = 0
    terms: dict[str, float] = field(default_factory=dict)


def action_key(action: str) -> str:
    """Equal for actions that differ in case or white space only."""
    return " ".join(action.lower().split())


class _Inline:
    """Stands in for a thread pool: does the work at once."""

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
        requests: Sequence[Request],
        sampling: Sampling,
        labels: Labels,
        *,
        max_length: int,
        max_turns: int | None,
        width: int,
        on_episode: Callable[[Episode], None] | None,
    ) -> None:
        self.engine, self.chat, self.pool = engine, chat, pool
        self.sampling, self.labels = sampling, labels
        self.max_length, self.max_turns, self.width = max_length, max_turns, width
        self.on_episode = on_episode
        self._waiting = sorted(requests, key=lambda request: (request.task.task_id, request.attempt))[::-1]
        if len({request.episode_id for request in requests}) != len(requests):
            raise ValueError("two requests have the same task and attempt; number the attempts at a task apart")
        self._playing: dict[int, _Play] = {}
        self._prompts: dict[str, tuple[str, list[int]]] = {}
        self._forks: dict[str, list[int]] = {}
        self.done: list[Episode] = []

    # ---- in the environments' thread ----------------------------------------------------------------------------------------

    @staticmethod
    def _reset(play: _Play) -> str:
        """Start the task; the first observation."""
        observation = play.environment.reset(play.request.task)
        play.state_key = play.environment.state_key()
        return observation.text

    @staticmethod
    def _act(play: _Play, action: str) -> tuple[str, Step]:
        """The state before the action, and what it brought about."""
        before = play.state_key
        step = play.environment.step(action)
        play.state_key = "" if step.done else play.environment.state_key()
        return before, step

    # ---- in the engine's thread ---------------------------------------------------------------------------------------------

    def _new_play(self, request: Request) -> _Play:
        task, labels, sampling = request.task, self.labels, self.sampling
        episode = Episode(
            episode_id=request.episode_id,
            task_id=task.task_id,
            domain=task.domain,
            group_id=request.group_id,
            seed=labels.seed,
            policy_hash=labels.policy_hash,
            params_hash=labels.params_hash,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        return _Play(request, episode, self.pool.take())

    def _begin(self, started: Sequence[tuple[_Play, str]]) -> None:
        """Open sessions for episodes whose environments have been reset; a task's prompt is fed once for all its attempts."""
        fresh = []
        for play, observation in started:
            task = play.request.task
            text = opening(task.prompt, observation)
            if task.task_id not in self._prompts:
                tokens = self.chat.prompt_tokens(text)
                self._prompts[task.task_id] = (text, tokens)
                if len(tokens) < self.max_length:
                    self._forks[task.task_id] = [self.engine.open(tokens)]
                    fresh.append(task.task_id)
            known, tokens = self._prompts[task.task_id]
            if text != known:
                raise RuntimeError(f"task {task.task_id} starts with another observation at each reset: {known!r}, then {text!r}")
            play.episode.append(tokens, Owner.PROMPT, -1)
            play.episode.messages.append({"role": "user", "content": text})
        left = Counter(request.task.task_id for request in self._waiting)
        left.update(play.request.task.task_id for play, _ in started)
        for task_id in fresh:
            if (count := left[task_id] - 1) > 0:
                self._forks[task_id] += self.engine.fork(self._forks[task_id][0], count)
        for play, _ in started:
            forks = self._forks.get(play.request.task.task_id)
            if not forks:
                self._finish(play, "context", truncated=True)
                continue
            play.session = forks.pop(0)
            self._playing[play.session] = play
            self._ask(play)

    def _ask(self, play: _Play) -> None:
        key = turn_key(self.labels, play.request.task.task_id, play.request.attempt, play.turn)
        self.engine.request(play.session, key, self.sampling)

    def _record_turn(self, turn: Turn) -> tuple[_Play, str] | None:
        """Add the policy's tokens to its episode; the action to take, or None if there was no room for one."""
        play = self._playing[turn.session]
        if not turn.token_ids:
            self._finish(play, "context", truncated=True)
            return None
        play.episode.append(turn.token_ids, Owner.POLICY, play.turn, turn.logprobs)
        return play, self.chat.action_text(turn.token_ids)

    def _record_step(self, play: _Play, turn: Turn, action: str, before: str, step: Step) -> None:
        """Add what the action brought, and ask for the next turn unless the episode is over."""
        episode = play.episode
        end = len(episode.token_ids)
        observation = step.observation.text
        episode.turns.append(
            TurnRecord(
                action=action,
                observation=observation,
                accepted=step.accepted,
                reward=step.reward,
                cost=step.cost,
                state_key=before,
                action_key=action_key(action),
                start=end - len(turn.token_ids),
                end=end,
            )
        )
        episode.reward += step.reward
        for name, value in step.terms.items():
            play.terms[name] = play.terms.get(name, 0.0) + value
        episode.messages.append({"role": "assistant", "content": action})
        if observation:
            episode.messages.append({"role": "user", "content": observation})
        tokens = [*self.chat.closing_tokens(turn.token_ids), *self.chat.observation_tokens(observation)]
        if step.done:
            self._finish(play, "terminated" if step.terminated else "turn_limit", truncated=not step.terminated)
        elif self.max_turns is not None and play.turn + 1 >= self.max_turns:
            self._finish(play, "turn_limit", truncated=True)
        elif turn.stop_reason == "context":
            self._finish(play, "length", truncated=True)
        elif end + len(tokens) >= self.max_length:
            self._finish(play, "context", truncated=True)
        else:
            episode.append(tokens, Owner.ENVIRONMENT, play.turn)
            self.engine.extend(play.session, tokens)
            play.turn += 1
            self._ask(play)

    def _finish(self, play: _Play, reason: str, truncated: bool) -> None:
        episode = play.episode
        episode.stop_reason, episode.truncated, episode.terminated = reason, truncated, not truncated
        episode.reward_terms = dict(sorted(play.terms.items()))
        if play.session >= 0:
            self.engine.close(play.session)
            del self._playing[play.session]
        self.pool.give_back(play.environment)
        self.done.append(episode)
        if self.on_episode:
            self.on_episode(episode)

    def run(self, workers: Any) -> list[Episode]:
        """Play everything. `workers`: a thread pool with one thread, or its inline stand-in."""
        resets: list[tuple[_Play, Future]] = []
        steps: list[tuple[_Play, Turn, str, Future]] = []
        while self._waiting or self._playing or resets:
            while self._waiting and len(self._playing) + len(resets) < self.width:
                play = self._new_play(self._waiting.pop())
                resets.append((play, workers.submit(self._reset, play)))
            turns = self.engine.advance()
            for play, turn, action, future in steps:
                self._record_step(play, turn, action, *future.result())
            self._begin([(play, future.result()) for play, future in resets])
            resets, steps = [], []
            for turn in turns:
                if recorded := self._record_turn(turn):
                    play, action = recorded
                    steps.append((play, turn, action, workers.submit(self._act, play, action)))
        return sorted(self.done, key=lambda episode: episode.episode_id)


def collect(
    engine: Engine,
    chat: Chat,
    pool: EnvironmentPool,
    requests: Sequence[Request],
    sampling: Sampling,
    labels: Labels,
    *,
    max_length: int,
    max_turns: int | None = None,
    width: int = 64,
    threaded: bool = True,
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play all requests; episodes sorted by id, the same whatever the others are, and whatever `width` and `threaded` are.

    max_length: longest episode in tokens (the engine's); max_turns: turns after which an episode ends with the reward it has so
    far, where the environment would go on; width: episodes under way at once, best the engine's slots;
    threaded: environments act in a thread of their own while the engine decodes; on_episode: told of each finished episode.
    A turn cut by `sampling.max_tokens` counts as an action, and its message is closed by tokens that the environment owns.
    `stop_reason`: "terminated", "turn_limit" (the environment's, or `max_turns`), "context" (no room for the observation or for
    another turn), "length" (the room ran out within a turn). Raises RuntimeError if a task's resets differ; environments' errors
    pass through.
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
    )
    workers = ThreadPoolExecutor(1, thread_name_prefix="environments") if threaded else _Inline()
    try:
        return collector.run(workers)
    finally:
        workers.shutdown(wait=True, cancel_futures=True)
        for sessions in collector._forks.values():
            for session in sessions:
                engine.close(session)
        for session in list(collector._playing):
            engine.close(session)
