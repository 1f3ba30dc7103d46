"""The adviser: an adapter that analyses the agent's state, and a decision that proposes a sub-goal after it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from stages.control.advice.settings import Adapter, Decision
from stages.control.advice.texts import encoded
from stages.control.advice.world import GOALS
from stages.seeding import stream

ANALYSES = tuple(f"the agent should {goal} now" for goal in GOALS)
"""One for each goal: the adapter's possible answers."""
CONSTANT = 0.5
"""The score that the adapter reads if it is not to know it."""


@dataclass(frozen=True)
class Fields:
    """What a request says, unformatted."""

    seen: str
    carried: str
    last_action: str
    guidance: str
    score: float
    """Of the guidance."""
    state: tuple[int, ...]
    """Inventory and achievements as numbers, which `carried` says in words."""

    def decision_prompt(self, analysis: str) -> str:
        text = (
            f"You advise an agent that must make an iron pickaxe. It sees {self.seen}. It carries {self.carried}. Its last "
            f"action: {self.last_action or 'none'}. Its goal: {self.guidance or 'none'}. {analysis}"
        ).rstrip(" .")
        return f"{text}. Goals: {', '.join(GOALS)}. Next goal:"


@dataclass(frozen=True)
class Pair:
    """One analysis, and how many achievements the agent gained before the next one."""

    fields: Fields
    analysis: int
    gain: int


def pair_rows(pairs: Sequence[Pair]) -> list[str]:
    """Lines of JSON: the prompt's parts, unformatted, the analysis, and what was gained after it."""
    rows = ({**asdict(pair.fields), "analysis": ANALYSES[pair.analysis], "gain": pair.gain} for pair in pairs)
    return [json.dumps(row) + "\n" for row in rows]


def kept(pairs: Sequence[Pair], target: str) -> list[Pair]:
    """The pairs that the adapter learns from: all, or those with a gain."""
    return [pair for pair in pairs if target == "own_outputs" or pair.gain > 0]


class Chooser(Protocol):
    """A decision that is not the scripted one: see language_model.py."""

    def choose(self, prompts: Sequence[str], keys: Sequence[tuple[object, ...]]) -> list[list[int]]:
        """Different goals for each prompt, drawn by its key."""
        ...


def scripted_goals(analysis: int | None, right: int, settings: Decision, *key: object) -> list[int]:
    """`scripted`'s goal and, of the others, different random ones."""
    first = scripted(analysis, right, settings, *key)
    others = [goal for goal in range(len(GOALS)) if goal != first]
    return [first, *stream(*key, "further").sample(others, settings.subgoals - 1)]


def scripted(analysis: int | None, right: int, settings: Decision, *key: object) -> int:
    """The right goal with probability `informed` if the analysis names it, else `uninformed`; otherwise a random one."""
    rng = stream(*key, "decision")
    share = settings.informed if analysis == right else settings.uninformed
    return right if rng.random() < share else rng.randrange(len(GOALS))


class LogisticAdapter:
    """softmax(W x) over ANALYSES; x: the parts of the prompt that it reads, and 1. It begins uniform."""

    def __init__(self, settings: Adapter, states: int, words: int = 64) -> None:
        """states: numbers in `Fields.state`; words: dimensions of the texts' bags of words."""
        self.settings, self.words = settings, words
        sizes = {"state": states, "score": 1}
        size = sum(sizes.get(part, words) for part in settings.reads) + 1
        self.weights = torch.zeros(len(ANALYSES), size, dtype=torch.float64)

    def features(self, fields: Sequence[Fields]) -> Tensor:
        """[B, size of x], the parts in the order of `reads`."""
        return torch.tensor([[*self._read(one), 1.0] for one in fields], dtype=torch.float64)

    def _read(self, one: Fields) -> list[float]:
        found: list[float] = []
        for part in self.settings.reads:
            if part == "state":
                found += map(float, one.state)
            elif part == "score":
                found.append(one.score)
            else:
                text = {"surroundings": one.seen, "last_action": one.last_action, "guidance": one.guidance}[part]
                found += encoded(text, self.words).tolist()
        return found

    def probabilities(self, fields: Sequence[Fields]) -> Tensor:
        """[B, analyses]."""
        return torch.softmax(self.features(fields) @ self.weights.T, -1)

    def draw(self, fields: Sequence[Fields], keys: Sequence[tuple[object, ...]]) -> list[int]:
        if not fields:
            return []
        bounds = self.probabilities(fields).cumsum(-1)
        draws = torch.tensor([stream(*key, "analysis").random() for key in keys], dtype=torch.float64)
        return (draws[:, None] >= bounds).sum(1).clamp(max=len(ANALYSES) - 1).tolist()

    def fit(self, pairs: Sequence[Pair]) -> tuple[float, float]:
        """Maximum likelihood on the first of the kept pairs; returns the mean negative log-likelihood of the others before and
        after (nan without any)."""
        chosen = kept(pairs, self.settings.target)
        cut = len(chosen) - int(self.settings.held_out * len(chosen))
        before = self._loss(chosen[cut:], self.weights)
        if cut:
            inputs = self.features([pair.fields for pair in chosen[:cut]])
            labels = torch.tensor([pair.analysis for pair in chosen[:cut]])
            start, weights = self.weights, self.weights.clone().requires_grad_()
            optimiser = torch.optim.Adam([weights], lr=self.settings.learning_rate)
            for _ in range(self.settings.steps):
                loss = torch.nn.functional.cross_entropy(inputs @ weights.T, labels)
                loss = loss + self.settings.weight_decay * (weights - start).square().sum()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            self.weights = weights.detach()
        return before, self._loss(chosen[cut:], self.weights)

    def _loss(self, pairs: Sequence[Pair], weights: Tensor) -> float:
        if not pairs:
            return float("nan")
        logits = self.features([pair.fields for pair in pairs]) @ weights.T
        return float(torch.nn.functional.cross_entropy(logits, torch.tensor([pair.analysis for pair in pairs])))


@dataclass
class Adviser:
    """Answers requests; `adapter` None: the decision alone; `chooser` None: the scripted decision. Counts what it was asked."""

    decision: Decision
    adapter: LogisticAdapter | None
    chooser: Chooser | None = None
    requests: int = 0
    right: int = 0
    """Requests whose goals include the one to pursue next."""
    analyses: list[int] = field(default_factory=list)
    """Of the last batch of requests."""

    def advise(self, fields: Sequence[Fields], right: np.ndarray, keys: Sequence[tuple[object, ...]]) -> list[list[int]]:
        """Different goals for each request; right: the goals to pursue next, which only the scripted decision knows of."""
        analyses = self.adapter.draw(fields, keys) if self.adapter is not None else None
        self.analyses = analyses or []
        said = [None] * len(fields) if analyses is None else analyses
        if self.chooser is None:
            goals = [
                scripted_goals(one, int(goal), self.decision, *key) for one, goal, key in zip(said, right, keys, strict=True)
            ]
        else:
            prompts = [one.decision_prompt("" if a is None else ANALYSES[a]) for one, a in zip(fields, said, strict=True)]
            goals = self.chooser.choose(prompts, keys)
        self.requests += len(goals)
        self.right += sum(int(best) in named for named, best in zip(goals, right, strict=True))
        return goals
