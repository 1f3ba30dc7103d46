"""Agent scaffolds: thoughts never reach the environment, and a history window does not change what an episode records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from toy_environment import CountingEnvironment, toy_tasks

from stages.agent.best_of_n import BestOfEngine, choose
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.history_window import WindowEngine
from stages.agent.policy import load_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.agent.scaffold import ASK_PLAN, ASK_WHY, GO_ON, Scaffold, ScaffoldedEnvironment
from stages.engine.engine import Engine, Sampling, Turn
from stages.engine.torch_engine import TorchEngine
from stages.environments.protocol import Environment, Observation, Step
from stages.records.actions import action_key
from stages.records.episode import Episode, Owner
from stages.records.task import Task

TASK = Task("t", "toy", "test", 0, "find the lamp", {}, 1.0)


class RecordingEnvironment:
    """Rejects `bad`, ends at `end` and records its actions."""

    def __init__(self) -> None:
        self.played: list[str] = []

    def reset(self, task: Task) -> Observation:
        self.played = []
        return Observation("a room")

    def step(self, action: str) -> Step:
        self.played.append(action)
        over = action == "end"
        return Step(Observation("seen"), float(over), action != "bad", over, False, cost=1.0)

    def snapshot(self) -> Any:
        return tuple(self.played)

    def restore(self, state: Any) -> None:
        self.played = list(state)

    def state_key(self) -> str:
        return "|".join(self.played)

    def admissible(self) -> list[str]:
        return ["end"]

    def close(self) -> None: ...


def test_default_scaffold_changes_nothing() -> None:
    inner = RecordingEnvironment()
    assert Scaffold().around(inner) is inner
    assert Scaffold().brief(TASK) is TASK
    assert Scaffold(note="Be brief.").brief(TASK) == replace(TASK, prompt="Be brief.\nfind the lamp")


def test_recall_is_appended_to_observations() -> None:
    for recall, end in (("action", " action: go"), ("task", " task: find the lamp"), ("both", " task: find the lamp action: go")):
        environment = Scaffold(recall=recall).around(RecordingEnvironment())
        assert environment.reset(TASK).text == "a room"
        assert environment.step("go").observation.text == "seen" + end
        assert environment.step("end").observation.text == "seen", "nothing is recalled after the last observation"


def test_thoughts_do_not_reach_the_environment() -> None:
    """Contract: a plan is asked for before the first action, a reflection after each rejected one; neither reaches the
    environment."""
    inner = RecordingEnvironment()
    environment = Scaffold(think="both").around(inner)
    assert isinstance(environment, Environment)
    assert environment.reset(TASK).text == f"a room\n{ASK_PLAN}"
    assert environment.state_key().endswith("#thinking")
    plan = environment.step("end")
    assert (plan.observation.text, plan.reward, plan.done, plan.cost, inner.played) == (GO_ON, 0.0, False, 0.0, [])
    refused = environment.step("bad")
    assert refused.observation.text == f"seen {ASK_WHY}"
    assert not refused.accepted
    held = environment.snapshot()
    assert environment.step("since there is none").observation.text == GO_ON
    assert inner.played == ["bad"]
    environment.restore(held)
    assert environment.step("again").observation.text == GO_ON
    last = environment.step("end")
    assert (last.reward, last.terminated, inner.played) == (1.0, True, ["bad", "end"])
    assert environment.admissible() == ["end"]
    only_plan = ScaffoldedEnvironment(RecordingEnvironment(), Scaffold(think="plan"))
    only_plan.reset(TASK)
    only_plan.step("a plan")
    assert only_plan.step("bad").observation.text == "seen"


def turn(tokens: tuple[int, ...], logprob: float) -> Turn:
    return Turn(0, tokens, (logprob,), "stop")


def test_majority_vote_without_ranking() -> None:
    """Contract: without a ranking the most frequent action wins, as its first draw; ties go to the higher log-probability."""
    turns = [turn((1,), -0.1), turn((2,), -2.0), turn((2,), -1.0), turn((3,), -0.2)]
    assert choose((), turns, None, str) == 1
    assert choose((), [turn((1,), -2.0), turn((2,), -1.0)], None, str) == 1
    assert choose((), [*turns, turn((1,), -3.0)], None, str) == 0, "two each: the first draw of 1 has the higher log-prob"


@pytest.fixture(scope="module")
def policy(tiny_policy: Path) -> Any:
    return load_policy(tiny_policy)


def played(policy: Any, window: int | None, n: int = 1, slots: int = 12, width: int = 8) -> tuple[list[Episode], Engine]:
    chat = Chat(policy.tokenizer)
    engine: Engine = TorchEngine(policy.model, [chat.end_of_turn], slots, 160)
    if window is not None:
        engine = WindowEngine(engine, window)
    if n > 1:
        engine = BestOfEngine(engine, n, None, lambda tokens: action_key(chat.action_text(tokens)))
    with EnvironmentPool(CountingEnvironment) as pool:
        requests = attempts(toy_tasks(4), 2)
        return collect(engine, chat, pool, requests, Sampling(max_tokens=4), Labels(3), max_length=160, width=width), engine


def test_wide_window_changes_nothing(policy: Any) -> None:
    wide, engine = played(policy, 100)
    assert wide == played(policy, None)[0]
    assert engine.counters["cuts"] == 0
    assert played(policy, 1)[1].counters["cuts"] > 0


def test_windowed_turn_depends_only_on_visible_tokens(policy: Any) -> None:
    """Contract: each turn, log-probs included, equals that of a fresh session with the visible tokens and the same key, whatever
    runs beside it."""
    episodes, _ = played(policy, 1)
    assert played(policy, 1, slots=5, width=2)[0] == episodes
    assert any(len(episode.turns) > 2 for episode in episodes)
    from stages.agent.rollout import turn_key

    chat = Chat(policy.tokenizer)
    for episode in episodes[:3]:
        opening = [token for token, owner in zip(episode.token_ids, episode.owner, strict=True) if owner == Owner.PROMPT]
        for number, record in enumerate(episode.turns):
            since = episode.turns[number - 1].start if number else len(opening)
            engine = TorchEngine(policy.model, [chat.end_of_turn], 2, 160)
            session = engine.open([*opening, *episode.token_ids[since : record.start]])
            key = turn_key(Labels(3), episode.task_id, int(episode.episode_id[-4:]), number)
            engine.request(session, key, Sampling(max_tokens=4))
            (alone,) = engine.advance()
            assert list(alone.token_ids) == episode.token_ids[record.start : record.end]
            assert list(alone.logprobs) == pytest.approx(episode.logprob[record.start : record.end], abs=1e-5)


def test_best_of_n_works_within_a_window(policy: Any) -> None:
    episodes, engine = played(policy, 1, n=3)
    assert engine.counters["decisions"] == sum(len(episode.turns) for episode in episodes)
    assert engine.counters["cuts"] > 0
    assert played(policy, 1, n=3, slots=5, width=2)[0] == episodes


def test_window_engine_implements_engine_protocol(policy: Any) -> None:
    engine = WindowEngine(TorchEngine(policy.model, [3], 8, 64), 1)
    assert isinstance(engine, Engine)
    session = engine.open([5, 6, 7])
    for step in range(3):
        engine.request(session, step, Sampling(max_tokens=2))
        engine.advance()
        engine.extend(session, [8, 9])
    (fork,) = engine.fork(session, 1)
    again = engine.open([], engine.snapshot(session))
    for one in (session, fork, again):
        engine.request(one, 11, Sampling(max_tokens=3))
    turns: list[Turn] = []
    while len(turns) < 3:
        turns += engine.advance()
    assert len({one.token_ids for one in turns}) == 1, "equal visible tokens and key give equal draws"
    with pytest.raises(ValueError, match="only an entire session"):
        engine.snapshot(session, 2)
    for one in (session, fork, again):
        engine.close(one)
    with pytest.raises(KeyError):
        engine.extend(session, [1])
    with pytest.raises(ValueError, match="window of 0 turns"):
        WindowEngine(engine, 0)
