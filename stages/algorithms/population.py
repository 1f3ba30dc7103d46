"""A population of instructions with weights, and a buffer of the worst episodes (INSPO, arXiv 2512.01945). Light to import.

p_j = exp(w_j / tau) / sum_k exp(w_k / tau). The rules that follow are ours, where the paper does not state them: after a step,
w_j <- (1 - rate) w_j + rate * (mean reward of the step's episodes with j), and unused instructions keep their weight; pruning
keeps the better part by weight of those with enough uses; newcomers start at the mean weight of the survivors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Instruction:
    number: int
    """Unique in a run."""
    text: str
    weight: float
    uses: int = 0
    """Episodes that were played with it."""
    origin: str = "seed"
    """seed, or the editor that wrote it."""
    parent: int = -1
    born: int = 0
    """Step before which it joined."""


def shares(weights: Sequence[float], temperature: float, explore: float = 0.0) -> list[float]:
    """Probability of each instruction: the softmax of weights / temperature; `explore` of it is uniform instead."""
    best = max(weights)
    raw = [math.exp((weight - best) / temperature) for weight in weights]
    total = sum(raw)
    return [(1 - explore) * one / total + explore / len(raw) for one in raw]


def pick(probabilities: Sequence[float], draw: float) -> int:
    """The index that a uniform `draw` in [0, 1) selects."""
    reached = 0.0
    for place, share in enumerate(probabilities):
        reached += share
        if draw < reached:
            return place
    return len(probabilities) - 1


def attributed(population: Sequence[Instruction], rewards: Mapping[int, Sequence[float]], rate: float) -> list[Instruction]:
    """The population after a step; `rewards`: number -> rewards of its episodes."""
    found = []
    for one in population:
        own = rewards.get(one.number, ())
        if own:
            mean = sum(own) / len(own)
            one = replace(one, weight=(1 - rate) * one.weight + rate * mean, uses=one.uses + len(own))
        found.append(one)
    return found


def halved(population: Sequence[Instruction], keep: float, min_trials: int) -> list[Instruction]:
    """Successive halving: of the instructions with at least `min_trials` uses, the share `keep` of highest weight (rounded up,
    the older of ties) stays; those with fewer uses stay, too. Nothing happens with fewer than two that could go."""
    tried = [one for one in population if one.uses >= min_trials]
    if len(tried) < 2:
        return list(population)
    ranked = sorted(tried, key=lambda one: (-one.weight, one.number))
    dropped = {one.number for one in ranked[math.ceil(round(keep * len(tried), 9)) :]}
    return [one for one in population if one.number not in dropped]


@dataclass(frozen=True)
class Turn:
    """What a stored episode keeps of a turn."""

    action: str
    action_key: str
    observation: str
    accepted: bool


@dataclass(frozen=True)
class Stored:
    """An episode in the buffer."""

    number: int
    """Order of arrival."""
    instruction: int
    task_id: str
    prompt: str
    turns: tuple[Turn, ...]
    reward: float
    success: bool


class WorstEpisodes:
    """At most `capacity` episodes: those of lowest reward, the newest of ties first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.arrived = capacity, 0
        self.episodes: list[Stored] = []

    def add(self, instruction: int, task_id: str, prompt: str, turns: Sequence[Turn], reward: float, success: bool) -> None:
        self.episodes.append(Stored(self.arrived, instruction, task_id, prompt, tuple(turns), reward, success))
        self.arrived += 1
        self.episodes = sorted(self.episodes, key=lambda one: (one.reward, -one.number))[: self.capacity]

    def failures(self, instruction: int, count: int) -> list[Stored]:
        """The first failures: those with the instruction, then others'."""
        failed = [one for one in self.episodes if not one.success]
        return sorted(failed, key=lambda one: (one.instruction != instruction, one.reward, -one.number))[:count]

    def state_dict(self) -> dict[str, Any]:
        return {"arrived": self.arrived, "episodes": [asdict(one) for one in self.episodes]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.arrived = state["arrived"]
        rows = [{**row, "turns": tuple(Turn(**turn) for turn in row["turns"])} for row in state["episodes"]]
        self.episodes = [Stored(**row) for row in rows]
