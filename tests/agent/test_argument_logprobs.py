"""What environments are told about how sure the policy was: the log-probabilities of an action's argument."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tiny import TINY_TEMPLATE, make_tiny_tokenizer
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.arguments import argument_logprobs
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.recorded_engine import RecordedEngine
from stages.agent.rollout import Labels, attempts, collect, turn_key
from stages.agent.team import Member
from stages.agent.team_play import collect_team
from stages.engine.engine import Sampling, Turn
from stages.records.episode import Owner
from stages.records.thinking import Thinking

LABELS = Labels(0)


class Listening(CountingEnvironment):
    """Notes what it is told before each action."""

    told: list[tuple[str, list[float]]]
    heard: Sequence[float] | None = None

    def drawn(self, logprobs: Sequence[float]) -> None:
        self.heard = logprobs

    def step(self, action: str):
        assert self.heard is not None
        type(self).told.append((action, list(self.heard)))
        self.heard = None
        return super().step(action)


def turn(chat: Chat, text: str, forced: Sequence[int] = ()) -> Turn:
    """A turn of `text`, the log-probability of whose n-th token is -n; of the tokens at `forced`, 0."""
    tokens = tuple(chat.assistant_tokens(text))
    owners = [Owner.FORCED if place in forced else Owner.POLICY for place in range(len(tokens))]
    logprobs = tuple(0.0 if place in forced else -float(place) for place in range(len(tokens)))
    return Turn(0, tokens, logprobs, "stop", owners=tuple(map(int, owners)) if forced else ())


def written(chat: Chat, one: Turn) -> str:
    """The text of the tokens that count as the argument."""
    return chat.tokenizer.decode([one.token_ids[place] for place in chat.argument_tokens(one.token_ids)])


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("search Kelmar founder", "Kelmar founder"),
        ("search  Kelmar", "Kelmar"),
        ("search", ""),
        ("", ""),
        ("search search", "search"),
    ],
)
def test_the_argument_is_what_follows_the_verb(chat: Chat, text: str, argument: str) -> None:
    """Contract: neither the verb nor the end-of-turn token belongs to it."""
    one = turn(chat, text)
    assert written(chat, one).strip() == argument
    assert len(one.token_ids) - 1 not in chat.argument_tokens(one.token_ids)


def test_thoughts_are_no_part_of_it() -> None:
    """The thought says the same words as the action, and the marks around the action end it."""
    thinking = Thinking(response=("<response>", "</response>"))
    chat = Chat(make_tiny_tokenizer(TINY_TEMPLATE), thinking)
    one = turn(chat, "<think>search e</think><response>search e</response>")
    places = chat.argument_tokens(one.token_ids)
    before = chat.turn_text(one.token_ids[: places.start]).rstrip()
    assert (written(chat, one).strip(), before) == ("e", "<think>search e</think><response>search")
    plain = Chat(make_tiny_tokenizer(TINY_TEMPLATE), Thinking())
    assert not plain.argument_tokens(turn(plain, "<think>search e").token_ids), "a thought that was cut"


def test_forced_tokens_do_not_count(chat: Chat) -> None:
    places = chat.argument_tokens(turn(chat, "search Kelmar founder").token_ids)
    first, *rest = places
    forced = turn(chat, "search Kelmar founder", forced=[0, first])
    assert argument_logprobs(chat, Listening(), forced) == [-float(place) for place in rest]
    assert argument_logprobs(chat, CountingEnvironment(), forced) == [], "nobody is told"


@pytest.mark.parametrize("team", [False, True])
def test_environments_are_told_before_each_action(chat: Chat, team: bool) -> None:
    task = toy_tasks(1)[0]
    task.spec["turns"] = 2
    spoken = [turn(chat, "search Kelmar founder"), turn(chat, "look")]
    engine = RecordedEngine({turn_key(LABELS, task.task_id, 0, place): one for place, one in enumerate(spoken)})
    Listening.told = []
    with EnvironmentPool(Listening) as pool:
        parts, limits = (chat, pool, attempts([task], 1)), {"max_length": 200}
        if team:
            collect_team({"solver": engine}, *parts, [Member(role="solver")], Sampling(), LABELS, **limits)
        else:
            collect(engine, *parts, Sampling(), LABELS, **limits)
    expected = [-float(place) for place in chat.argument_tokens(spoken[0].token_ids)]
    assert Listening.told == [("search Kelmar founder", expected), ("look", [])]
    assert 0 < len(expected) < len(spoken[0].token_ids) - 1
