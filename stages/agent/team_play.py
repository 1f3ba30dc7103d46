"""Plays a team's episodes: stages/agent/team.py says who speaks when and what each member reads.

Each member has an engine, or a view of a shared one, that computes with its weights, and an episode of its own in a play: what it
reads and writes. Plays go on in rounds, all members' turns of a phase at once. A turn depends only on its member's tokens and its
random key, so that an episode does not depend on the other plays or on `width`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from stages.agent.active_episode import ActiveEpisode, EpisodeRequest
from stages.agent.arguments import argument_logprobs
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.rollout import Collector, Labels, new_episode, turn_key
from stages.agent.team import Conversation, Speaker
from stages.engine.engine import Engine, Sampling, Turn
from stages.environments.protocol import Observation, Step
from stages.records.episode import Episode, Owner
from stages.records.thinking import ParsedTurn

SAID = Step(Observation(""), 0.0, accepted=True, terminated=False, truncated=False)
"""What a text that is no action does in the environment."""


@dataclass
class Seat:
    """A member's part in a play."""

    active: ActiveEpisode
    closing: list[int] = field(default_factory=list)
    """Tokens that end its newest turn."""
    unfinished: bool = False
    """Its newest turn was cut within a thought."""
    full: bool = False
    """It has no room for another turn, and is silent from now on."""


@dataclass
class Play:
    """One run of an environment."""

    request: EpisodeRequest
    seats: dict[str, Seat]
    main: ActiveEpisode
    """Of the acting member."""
    conversation: Conversation | None = None
    round: int = 0
    moves: int = 0

    @property
    def heard(self) -> Conversation:
        assert self.conversation is not None, "the environment was reset"
        return self.conversation


class TeamCollector:
    """One collection; see `collect_team`."""

    def __init__(
        self,
        engines: Mapping[str, Engine],
        chat: Chat,
        pool: EnvironmentPool,
        team: Sequence[Speaker],
        sampling: Sampling,
        labels: Labels,
        max_length: int,
        max_turns: int | None,
    ) -> None:
        self.engines, self.chat, self.pool, self.team = engines, chat, pool, team
        self.sampling, self.labels = sampling, labels
        self.max_length, self.max_turns = max_length, max_turns
        self.acting = team[-1].role
        self.workers: ThreadPoolExecutor | None = None

    # ---- what members read --------------------------------------------------------------------------------------------------

    def _seat(self, request: EpisodeRequest, member: Speaker, environment: object) -> Seat:
        episode = new_episode(request, self.sampling, self.labels, member.role)
        if member.role != self.acting:
            episode.episode_id += f"/{member.role}"
        if len(self.team) > 1:
            episode.play = request.episode_id
        return Seat(ActiveEpisode(request, episode, environment))  # type: ignore[arg-type]

    def _begin(self, requests: Sequence[EpisodeRequest]) -> list[Play]:
        """Start the requests' environments; every member is to read the task and the first observation."""
        plays = []
        for request in requests:
            environment = self.pool.take()
            seats = {member.role: self._seat(request, member, environment) for member in self.team}
            plays.append(Play(request, seats, seats[self.acting].active))
        for play, text in zip(plays, self._in_environments(lambda play: Collector._reset(play.main), plays), strict=True):
            play.conversation = Conversation(self.team, play.request.task.prompt, text)
        return plays

    def _in_environments(self, call: Callable[..., object], plays: Sequence[Play], *more: Sequence[object]) -> list:
        """What `call` returns for each play; the environments' threads share the plays."""
        run = map if self.workers is None else self.workers.map
        return list(run(call, plays, *more))

    def _open(self, role: str, plays: Sequence[Play]) -> list[Play]:
        """Give a member what it has not read yet; returns the plays in which it has room for a turn. Equal prompts are fed
        once."""
        engine, first = self.engines[role], dict[tuple[int, ...], list[Seat]]()
        ready = []
        for play in plays:
            seat = play.seats[role]
            episode, text = seat.active.episode, play.heard.read(role)
            begins = not episode.token_ids
            tokens = self.chat.prompt_tokens(text) if begins else [*seat.closing, *self.chat.observation_tokens(text)]
            if episode.turns:
                episode.turns[-1].observation = text
            if not begins and len(episode.token_ids) + len(tokens) >= self.max_length:
                self._silence(seat, "context")
                continue
            episode.append(tokens, Owner.PROMPT if begins else Owner.ENVIRONMENT, seat.active.turn - 1)
            episode.messages += [{"role": "user", "content": text}] if text or begins else []
            if len(episode.token_ids) >= self.max_length:
                self._silence(seat, "context")
                continue
            ready.append(play)
            if begins:
                first.setdefault(tuple(tokens), []).append(seat)
            else:
                engine.extend(seat.active.session, tokens)
        for prompt, seats in first.items():
            seats[0].active.session = engine.open(prompt)
        for seats in first.values():
            forks = engine.fork(seats[0].active.session, len(seats) - 1) if len(seats) > 1 else []
            for seat, session in zip(seats[1:], forks, strict=True):
                seat.active.session = session
        return ready

    # ---- a member's turn ----------------------------------------------------------------------------------------------------

    def _turns(self, role: str, plays: Sequence[Play]) -> dict[int, Turn]:
        """A turn of the member in each play, by session."""
        engine, found = self.engines[role], dict[int, Turn]()
        labels = self.labels if role == self.acting else replace(self.labels, stream=f"{self.labels.stream}/{role}")
        for play in plays:
            active = play.seats[role].active
            key = turn_key(labels, play.request.task.task_id, play.request.attempt, active.turn)
            engine.request(active.session, key, self.sampling)
        while len(found) < len(plays):
            found |= {turn.session: turn for turn in engine.advance()}
        return found

    def _phase(self, member: Speaker, plays: Sequence[Play]) -> None:
        """The member's turns of a round."""
        role, acts = member.role, member.role == self.acting
        ready = self._open(role, [play for play in plays if not play.seats[role].full])
        turns = self._turns(role, ready)
        said: list[tuple[Play, Seat, Turn, ParsedTurn]] = []
        for play in ready:
            seat = play.seats[role]
            turn = turns[seat.active.session]
            if not turn.token_ids:
                self._silence(seat, "context")
                continue
            seat.active.write(turn)
            said.append((play, seat, turn, self.chat.read(turn.token_ids)))
        results: list[tuple[str, Step]] = [(play.main.state_key, SAID) for play, *_ in said]
        if acts:
            acting, actions = [play for play, *_ in said], [parsed.action for *_, parsed in said]
            drawn = [argument_logprobs(self.chat, play.main.environment, turn) for play, _, turn, _ in said]
            found = self._in_environments(
                lambda play, does, own: Collector._act(play.main, does, own, False), acting, actions, drawn
            )
            results = [(before, step) for before, step, _ in found]
        for (play, seat, turn, parsed), (before, step) in zip(said, results, strict=True):
            self._record(play, seat, turn, parsed, before, step)

    def _record(self, play: Play, seat: Seat, turn: Turn, parsed: ParsedTurn, before: str, step: Step) -> None:
        """Add a turn and its result, and tell the others."""
        active, role = seat.active, seat.active.episode.role
        active.record(turn, parsed, before, step)
        active.episode.messages.append({"role": "assistant", "content": parsed.message})
        if len(self.team) > 1:
            active.episode.moves.append(play.moves)
        play.moves += 1
        seat.closing = self.chat.closing_tokens(turn.token_ids)
        seat.unfinished = not parsed.finished and turn.stop_reason != "stop"
        play.heard.say(role, parsed.action)
        if role == self.acting:
            stop = active.stop_reason(turn, step, self.max_turns)
            if step.observation.text and not stop:
                play.heard.observe(step.observation.text)
        else:
            stop = "length" if turn.stop_reason == "context" else ""
        active.turn += 1
        if stop:
            if step.observation.text:
                active.episode.messages.append({"role": "user", "content": step.observation.text})
            self._silence(seat, stop)

    def _silence(self, seat: Seat, reason: str) -> None:
        """The member has its last turn behind it."""
        seat.full = True
        seat.active.end("thinking" if reason != "terminated" and seat.unfinished else reason)

    # ---- the plays ----------------------------------------------------------------------------------------------------------

    def _finish(self, play: Play) -> list[Episode]:
        """Release what the play holds; its episodes, the acting member's first."""
        self.pool.give_back(play.main.environment)
        for role, seat in play.seats.items():
            if seat.active.session >= 0:
                self.engines[role].close(seat.active.session)
            if not seat.full:
                seat.active.end(play.main.episode.stop_reason)
        others = [seat.active.episode for role, seat in play.seats.items() if role != self.acting]
        return [play.main.episode, *(episode for episode in others if episode.token_ids)]

    def run(self, requests: Sequence[EpisodeRequest]) -> list[Episode]:
        """Play the requests at once."""
        living, done = self._begin(requests), list[Episode]()
        while living:
            for member in self.team:
                if member.speaks == "every" or living[0].round == 0:
                    self._phase(member, living)
            for play in living:
                play.round += 1
                if play.seats[self.acting].full:
                    done += self._finish(play)
            living = [play for play in living if not play.seats[self.acting].full]
        return done


def collect_team(
    engines: Mapping[str, Engine],
    chat: Chat,
    pool: EnvironmentPool,
    requests: Sequence[EpisodeRequest],
    team: Sequence[Speaker],
    sampling: Sampling,
    labels: Labels,
    *,
    max_length: int,
    max_turns: int | None = None,
    width: int = 64,
) -> list[Episode]:
    """Play all requests with a team; returns the episodes of all members, sorted by id.

    engines: of each role; chat: the same for all; max_length: longest episode in tokens; max_turns: actions after which a play
    ends; width: plays at once, at most the engines' slots. A team of one plays as `stages.agent.rollout.collect` does, token for
    token.

    The acting member's episode has the request's id, the environment's rewards and the play's end; another's has its role after
    it, and no rewards. Where there are several, `play` is the request's id in all of them, and `moves` the places of their turns.
    A member without room for a turn is silent from then on ("context" or "length"); without the acting one a play ends.
    """
    collector = TeamCollector(engines, chat, pool, team, sampling, labels, max_length, max_turns)
    ordered = sorted(requests, key=lambda request: (request.task.task_id, request.attempt))
    episodes: list[Episode] = []
    if pool.parallel > 1:
        collector.workers = ThreadPoolExecutor(pool.parallel, thread_name_prefix="environments")
    try:
        for start in range(0, len(ordered), width):
            episodes += collector.run(ordered[start : start + width])
    finally:
        if collector.workers is not None:
            collector.workers.shutdown(wait=True, cancel_futures=True)
    return sorted(episodes, key=lambda episode: episode.episode_id)
