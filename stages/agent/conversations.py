"""Plays in which an environment holds several conversations with the policy: an agent that asks a sub-agent, or that rewrites or
shortens its history (`stages.environments.protocol.Step.conversation`).

Each conversation is an episode with token ids and log-probabilities of its own: what the policy read and wrote there. The first
is the request's, the others are its `forks`, named `<episode>/<number>`. All have the same group and `play`, `moves` says where
their turns are in the play, and its outcome is theirs, too: return, reward terms and end. Messages at the start of a conversation
that were not written in it are tokens of its prompt, whoever wrote them: a turn is trained in the conversation that it was
drawn in, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from stages.agent.active_episode import ActiveEpisode, Paused
from stages.agent.chat import Chat
from stages.engine.engine import Engine, Turn
from stages.environments.protocol import Observation, Step
from stages.records.episode import Episode, Owner


def named_fork(first: Episode, number: int) -> Episode:
    """An episode without tokens for conversation `number` of the play that began with `first`."""
    return Episode(
        episode_id=f"{first.episode_id}/{number}",
        task_id=first.task_id,
        domain=first.domain,
        group_id=first.group_id,
        seed=first.seed,
        policy_hash=first.policy_hash,
        params_hash=first.params_hash,
        temperature=first.temperature,
        top_p=first.top_p,
        top_k=first.top_k,
        role=first.role,
        play=first.play,
    )


def begin(episode: Episode, chat: Chat, text: str, before: Sequence[Mapping[str, str]] = ()) -> None:
    """Give a conversation its prompt: the messages `before`, and `text`."""
    episode.append(chat.prompt(text, examples=before).token_ids, Owner.PROMPT, -1)
    episode.messages.append({"role": "user", "content": text})


def switch(play: ActiveEpisode, chat: Chat, turn_ids: Sequence[int], step: Step) -> None:
    """Make the conversation that a step names the play's current one, with all that the policy reads before its next turn. The
    turn before it, `turn_ids`, is recorded already."""
    assert step.conversation is not None
    first, made = play.first, play.turn + play.earlier + 1
    if not first.play:
        first.play, first.moves = first.episode_id, list(range(made))
    play.paused[play.conversation] = Paused(play.episode, play.turn + 1, tuple(turn_ids))
    play.conversation, text = step.conversation, step.observation.text
    if (held := play.paused.get(play.conversation)) is not None:
        play.episode, play.turn, play.earlier = held.episode, held.turn, made - held.turn
        play.episode.turns[-1].observation = text
        play.episode.messages.append({"role": "user", "content": text})
        tokens = [*chat.closing_tokens(held.turn_ids), *chat.observation_tokens(text)]
        play.episode.append(tokens, Owner.ENVIRONMENT, held.turn - 1)
    else:
        play.episode, play.turn, play.earlier = named_fork(first, play.conversation), 0, made
        begin(play.episode, chat, text, step.observation.before)


def elsewhere(step: Step) -> Step:
    """A step without its observation, which is read in another conversation."""
    return replace(step, observation=Observation(""))


def continued(play: ActiveEpisode, engine: Engine, chat: Chat, turn: Turn, step: Step, max_length: int) -> bool:
    """Close the session of the play's current conversation and open one for that which the step names (`switch`); whether that
    has room for a turn. Otherwise there is no session."""
    engine.close(play.session)
    play.session = -1
    switch(play, chat, turn.token_ids, step)
    if len(play.episode.token_ids) >= max_length:
        return False
    play.session = engine.open(play.episode.token_ids)
    return True


def whole(play: ActiveEpisode) -> Episode:
    """The episode of a play that has ended; where it held several conversations, see `share_outcome`."""
    if not play.paused:
        return play.episode
    episodes = {number: held.episode for number, held in play.paused.items()} | {play.conversation: play.episode}
    return share_outcome([episode for _, episode in sorted(episodes.items())], play.episode.stop_reason)


def share_outcome(episodes: Sequence[Episode], reason: str) -> Episode:
    """Give each conversation of a play the play's end, `reason`, and what the others earned, on its last turn; returns the first
    one with the others as its forks, without those in which the policy wrote nothing."""
    reward = sum(turn.reward for episode in episodes for turn in episode.turns)
    terms: dict[str, float] = {}
    for episode in episodes:
        for name, value in _terms(episode).items():
            terms[name] = terms.get(name, 0.0) + value
    spoken = [episode for episode in episodes if episode.turns]
    for episode in spoken:
        last, own = episode.turns[-1], _terms(episode)
        last.reward += reward - sum(turn.reward for turn in episode.turns)
        last.terms = {name: last.terms.get(name, 0.0) + value - own.get(name, 0.0) for name, value in terms.items()}
        episode.reward, episode.reward_terms = reward, dict(sorted(terms.items()))
        episode.stop_reason, episode.terminated, episode.truncated = reason, reason == "terminated", reason != "terminated"
    first = episodes[0]
    first.forks = [episode for episode in spoken if episode is not first]
    return first


def _terms(episode: Episode) -> dict[str, float]:
    """Sums of the turns' reward terms."""
    found: dict[str, float] = {}
    for turn in episode.turns:
        for name, value in turn.terms.items():
            found[name] = found.get(name, 0.0) + value
    return found
