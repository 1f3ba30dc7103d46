"""The thread that owns the engine: concurrent jobs, of which a failing one affects no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError

import pytest
from served import until

from stages.agent.best_of_n import BestOfEngine, by_logprob
from stages.engine.engine import EngineError, Pause, Sampling, Turn
from stages.serving.engine_thread import EngineThread, GenerationJob
from stages.serving.variants import PLAIN, Variant

LOST = 13
"""With this key the engine fails and loses all turns in progress."""


class Echo:
    """An engine whose turns are the key and the prompt's length; it rejects prompts of more than 4 tokens."""

    def __init__(self) -> None:
        self.open_sessions: dict[int, list[int]] = {}
        self.asked: list[tuple[int, int]] = []
        self.made = 0
        self.counters: dict[str, int] = {}

    def open(self, token_ids: Sequence[int], prefix: object = None) -> int:
        if len(token_ids) > 4:
            raise EngineError("too long")
        self.made += 1
        self.open_sessions[self.made] = list(token_ids)
        return self.made

    def fork(self, session: int, count: int) -> list[int]:
        return [self.open(self.open_sessions[session]) for _ in range(count)]

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        self.asked.append((session, key))

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        asked, self.asked = self.asked, []
        if any(key == LOST for _, key in asked):
            raise ConnectionError("gone")
        return [
            Turn(session, (key % 100, len(self.open_sessions[session])), (-float(key % 7),), "stop") for session, key in asked
        ]

    def close(self, session: int) -> None:
        del self.open_sessions[session]
        self.asked = [(asked, key) for asked, key in self.asked if asked != session]


class Slow(Echo):
    """Turns of key SLOW never end; of the others, one ends per call."""

    SLOW = 17

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[set[int]] = []
        """Keys that each step was computed for."""

    def advance(self, pause: Pause | None = None) -> list[Turn]:
        assert pause is not None
        while self.asked and not pause():
            self.steps.append({key for _, key in self.asked})
            time.sleep(0.001)
            ready = [(session, key) for session, key in self.asked if key != self.SLOW]
            if ready:
                self.asked.remove(ready[0])
                return [Turn(ready[0][0], (ready[0][1],), (-1.0,), "stop")]
        return []


def job(length: int, *keys: int, choice: Variant = PLAIN) -> GenerationJob:
    return GenerationJob([1] * length, keys, Sampling(), choice)


def test_jobs_return_turns_by_key_and_close_their_sessions() -> None:
    engine = Echo()
    server = EngineThread(BestOfEngine(engine, 1, by_logprob, str))  # type: ignore[arg-type]
    jobs = [job(1 + place % 4, *range(place, place + 3)) for place in range(20, 40)]
    for one in jobs:
        server.submit(one)
    for one in jobs:
        assert [turn.token_ids for turn in one.turns.result(30)] == [(key % 100, len(one.token_ids)) for key in one.keys]
    best = server.submit(job(2, 1, choice=Variant(5, lambda: by_logprob))).result(30)
    assert len(best) == 1
    assert best[0].logprobs[0] >= -1.0, "the most likely of five draws, the first of which has -1"
    server.close()
    assert engine.open_sessions == {}
    assert not server.alive


def test_failing_job_does_not_affect_later_jobs() -> None:
    """Contract: whether the engine rejects a prompt or fails, the job gets the error and the next one is answered."""
    engine = Echo()
    server = EngineThread(BestOfEngine(engine, 1, by_logprob, str))  # type: ignore[arg-type]

    def unreadable() -> None:
        raise FileNotFoundError("no Q-model")

    with pytest.raises(EngineError, match="too long"):
        server.submit(job(5, 1)).result(30)
    with pytest.raises(FileNotFoundError, match="no Q-model"):
        server.submit(job(1, 1, choice=Variant(2, unreadable))).result(30)  # type: ignore[arg-type]
    with pytest.raises(ConnectionError, match="gone"):
        server.submit(job(2, LOST, 5)).result(30)
    assert server.submit(job(3, 7)).result(30)[0].token_ids == (7, 3)
    server.close()
    assert engine.open_sessions == {}


def test_job_that_breaks_the_engine_fails_alone() -> None:
    """Contract: jobs in progress beside one that breaks the engine are repeated one by one, with the answers they would have
    had; later ones are answered, too."""
    engine = Echo()
    started = threading.Event()
    server = EngineThread(BestOfEngine(engine, 1, by_logprob, str))  # type: ignore[arg-type]

    def hold() -> None:
        started.wait(30)  # until all are in the inbox, so that they start together

    first = server.submit(job(1, 1, choice=Variant(1, hold)))  # type: ignore[arg-type]
    jobs = [job(2, 5, 6), job(1, LOST, 8), job(3, 7), job(2, 9, choice=Variant(3, lambda: by_logprob))]
    for one in jobs:
        server.submit(one)
    started.set()
    with pytest.raises(ConnectionError, match="gone"):
        jobs[1].turns.result(30)
    answers = [one.turns.result(30) for place, one in enumerate(jobs) if place != 1]
    assert [[turn.token_ids for turn in turns] for turns in answers[:2]] == [[(5, 2), (6, 2)], [(7, 3)]]
    assert len(answers[2]) == 1
    assert first.result(30)
    assert server.submit(job(3, 7)).result(30)[0].token_ids == (7, 3)
    server.close()
    assert engine.open_sessions == {}


def test_cancelled_job_is_not_computed_further() -> None:
    """Contract: a decoding job is dropped after the current step and a waiting one never starts; others are unaffected, and no
    session stays open."""
    engine = Slow()
    server = EngineThread(BestOfEngine(engine, 1, by_logprob, str))  # type: ignore[arg-type]
    endless = job(1, Slow.SLOW, Slow.SLOW, 5)
    server.submit(endless)
    until(lambda: len(engine.steps) > 20, "decoding", 60)
    server.cancel(endless)
    with pytest.raises(CancelledError):
        endless.turns.result(30)
    until(lambda: not engine.open_sessions, "its sessions are closed", 60)
    steps = len(engine.steps)
    assert server.submit(job(1, 3)).result(30)[0].token_ids == (3,)
    assert engine.steps[steps:] == [{3}]

    endless, waiting, other = job(1, Slow.SLOW), job(1, 11), job(1, 12)
    held = threading.Event()
    server.submit(job(1, 1, choice=Variant(1, lambda: held.wait(30))))  # type: ignore[arg-type,return-value]
    for one in (endless, waiting, other):
        server.submit(one)
    server.cancel(waiting)
    held.set()
    assert other.turns.result(30)[0].token_ids == (12,)
    assert waiting.turns.cancelled()
    assert not any(11 in step for step in engine.steps)
    server.cancel(endless)
    server.cancel(other)  # already done
    server.close()
    assert engine.open_sessions == {}
