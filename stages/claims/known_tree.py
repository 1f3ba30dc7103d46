"""Worlds with known values: random 3-ary trees of depth 4 with a tabular policy, exact values by recursion.

The search sees them through its ordinary interfaces to language models and environments: tokens, an engine with sessions, an
environment with snapshots. The annotation experiment compares labels with them, and tests of the search use them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from stages import seeding
from stages.annotation.nodes import Row
from stages.engine.engine import Sampling, Turn
from stages.environments.protocol import Observation, Step
from stages.records.task import Task

ARMS, DEPTH, WIN = 3, 4, 3
SURE = 0.3
"""Share of leaves that solve the task in worlds of kind sure."""
Actions = tuple[int, ...]


def task(name: str, world: int = 0, kind: str = "coin") -> Task:
    """`coin`: after 4 moves the policy tosses a coin of the leaf's bias; `paid`: the leaf itself pays its number; `sure`: some
    leaves pay 1, the others 0."""
    return Task(name, "tabular", "train", 0, "", {"world": world, "kind": kind}, 1.0)


@cache
def leaf(world: int, actions: Actions) -> float:
    """Bias of the coin at a leaf: most are small."""
    return round(random.Random(seeding.key64("leaf", world, actions)).random() ** 4, 3)


def pay(world: int, actions: Actions, kind: str) -> float:
    """Expected reward at a leaf."""
    if kind == "sure":
        return float(random.Random(seeding.key64("sure", world, actions)).random() < SURE)
    return leaf(world, actions)


@cache
def policy(world: int, actions: Actions) -> list[float]:
    """Probabilities of tokens 0..4 after these moves: the moves, WIN, and 4, which loses."""
    if len(actions) == DEPTH:
        bias = leaf(world, actions)
        return [0.0, 0.0, 0.0, bias, 1.0 - bias]
    draw = random.Random(seeding.key64("policy", world, actions))
    weights = [0.2 + draw.random() for _ in range(ARMS)]
    return [weight / sum(weights) for weight in weights] + [0.0, 0.0]


def value(world: int, actions: Actions, best: bool = False, kind: str = "coin") -> float:
    """Exact value of the policy after these moves, or of the best moves."""
    if len(actions) == DEPTH:
        return pay(world, actions, kind)
    below = [value(world, (*actions, arm), best, kind) for arm in range(ARMS)]
    return max(below) if best else sum(p * v for p, v in zip(policy(world, actions), below, strict=False))


class World:
    """The environment. `steps` counts calls over all worlds made since it was set to 0."""

    steps = 0

    def __init__(self) -> None:
        self.task: Task | None = None
        self.actions: Actions = ()
        self.done = False

    def reset(self, task: Task) -> Observation:
        self.task, self.actions, self.done = task, (), False
        return Observation(str(task.spec["world"]))

    def step(self, action: str) -> Step:
        assert self.task is not None
        if self.done:
            raise RuntimeError("over")
        World.steps += 1
        number = int(action)
        if len(self.actions) == DEPTH:
            self.done = True
            return Step(Observation("end"), float(number == WIN), True, True, False)
        self.actions = (*self.actions, number)
        kind = self.task.spec["kind"]
        paid = kind != "coin" and len(self.actions) == DEPTH
        self.done = paid
        reward = pay(self.task.spec["world"], self.actions, kind) if paid else 0.0
        return Step(Observation(f"at {self.actions}"), reward, True, paid, False)

    def snapshot(self) -> Any:
        return self.task, self.actions, self.done

    def restore(self, state: Any) -> None:
        assert self.task == state[0], "restored on another task"
        self.task, self.actions, self.done = state

    def state_key(self) -> str:
        return str(self.actions)

    def admissible(self) -> Sequence[str]:
        return ()

    def close(self) -> None: ...


class Pool:
    def __init__(self) -> None:
        self.free: list[World] = []

    def take(self) -> World:
        return self.free.pop() if self.free else World()

    def give_back(self, environment: World) -> None:
        self.free.append(environment)


class Chat:
    """Tokens 0..4 are actions, 10 closes a turn, 11 is an observation, 20 + world opens a conversation."""

    def prompt_tokens(self, text: str) -> list[int]:
        return [20 + int(text), 11]

    def closing_tokens(self, turn_ids: Sequence[int]) -> list[int]:
        return []

    def observation_tokens(self, text: str) -> list[int]:
        return [11]

    def action_text(self, turn_ids: Sequence[int]) -> str:
        return str(turn_ids[0])

    def observation_text(self, token_ids: Sequence[int]) -> tuple[int, int]:
        return 0, len(token_ids)

    def argument_tokens(self, turn_ids: Sequence[int]) -> Sequence[int]:
        return range(1)


class FakeEngine:
    """Samples from `policy`. `advance` finishes at most `width` turns, in an order unrelated to that of the requests."""

    def __init__(self, width: int = 3) -> None:
        self.width = width
        self.sessions: dict[int, list[int]] = {}
        self.requests: dict[int, int] = {}
        self.opened = self.sampled = 0
        self.given: list[int] = []

    def open(self, token_ids: Sequence[int], prefix: Any | None = None) -> int:
        self.sessions[self.opened] = [*(prefix or ()), *token_ids]
        self.opened += 1
        return self.opened - 1

    def extend(self, session: int, token_ids: Sequence[int]) -> None:
        self.sessions[session] += token_ids

    def request(self, session: int, key: int, sampling: Sampling) -> None:
        self.requests[session] = key
        self.given.append(key)

    def advance(self) -> list[Turn]:
        order = sorted(self.requests, key=lambda session: seeding.key64(session, self.opened))[: self.width]
        return [self._turn(session) for session in sorted(order)]

    def _turn(self, session: int) -> Turn:
        key = self.requests.pop(session)
        tokens = self.sessions[session]
        chances = policy(tokens[0] - 20, tuple(token for token in tokens if token < 10))
        draw = seeding.uniform(np.array([key], dtype=np.uint64), np.zeros(1))[0]
        token = min(int(np.searchsorted(np.cumsum(chances), draw, side="right")), 4)
        tokens += [token, 10]
        self.sampled += 2
        return Turn(session, (token, 10), (float(np.log(chances[token])), 0.0), "stop")

    def snapshot(self, session: int) -> Any:
        return tuple(self.sessions[session])

    def fork(self, session: int, count: int) -> list[int]:
        return [self.open((), self.snapshot(session)) for _ in range(count)]

    def close(self, session: int) -> None:
        del self.sessions[session]

    @property
    def counters(self) -> dict[str, int]:
        return {"sampled_tokens": self.sampled}


def actions_in(tree: Sequence[Row], index: int) -> Actions:
    """Actions from the root to a node of a stored tree."""
    actions = []
    while index:
        actions.append(tree[index]["token_ids"][0])
        index = tree[index]["parent"]
    return tuple(actions[::-1])
