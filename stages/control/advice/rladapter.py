"""RLAdapter: the advice of a language model, adapted to what a reinforcement-learning agent can do.

`python -m stages.control.advice.rladapter --settings FILE --result FILE` trains one agent and evaluates it: a run of lane control
with `environment: text_grid`. After Zhang and Lu, arXiv 2309.17176, and the reference code of its later version, AdaRefiner. Each
environment has its own history and guidance here, and what is learnt from is the guidance under which the action was drawn.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from stages.control.advice.adviser import CONSTANT, Adviser, Fields, LogisticAdapter, Pair, pair_rows
from stages.control.advice.language_model import LanguageModel
from stages.control.advice.ppo import Player, Steps, advantages, update
from stages.control.advice.settings import Advice
from stages.control.advice.texts import achievement_score, encoded, follows
from stages.control.advice.world import ACTIONS, GOALS, OBSERVATION, Grid, carried, seen
from stages.control.one_run import one_run
from stages.records.card import Card
from stages.runtime.command import command
from stages.runtime.files import atomic_text
from stages.seeding import key64

CARD = Card(
    slug="rladapter",
    title="RLAdapter",
    paper="Zhang and Lu, arXiv 2309.17176 (later AdaRefiner)",
    equation="every K steps l = sigmoid(10 (cos(E(actions), E(g)) - 0.1)); adapter (o, s, g, l) -> analysis c; decision "
    "(o, s, g, c) -> sub-goal g; policy and value read f(o) + W E(g) + b; after a stage the adapter learns its analyses, "
    "here those followed by a new achievement",
    assumptions="following guidance shows in the words of actions; the filter of analyses is ours, the reference code has none",
    reduces_to="guidance none, or W = 0 and b = 0: PPO; target own_outputs: the adapter imitates itself",
    tested_by="tests/control/advice/test_rladapter.py",
    switch="guidance: rladapter of environment text_grid, lane control",
)
THEN = ", then "
FIXED = THEN.join(GOALS)
"""Guidance of guidance: fixed."""


def observed(grid: Grid, settings: Advice) -> torch.Tensor:
    """What the agent's network reads of its episodes, [E, OBSERVATION]."""
    return torch.from_numpy(grid.observation(own=settings.observe == "all"))


@dataclass
class Guided:
    """The guidance of E environments, and what is still open of it. `interval`: steps between requests; `key`: of all draws."""

    settings: Advice
    adviser: Adviser | None
    interval: int
    key: tuple[object, ...]
    count: int
    step: int = 0
    texts: list[str] = field(default_factory=list)
    histories: list[deque[str]] = field(default_factory=list)
    open: list[tuple[Fields, int] | None] = field(default_factory=list)
    """Each environment's last analysis, until its window ends."""
    gains: list[int] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    follow: list[tuple[float, int]] = field(default_factory=list)
    """Scores, and what was gained in the window before them."""

    def __post_init__(self) -> None:
        first = FIXED if self.settings.guidance == "fixed" else ""
        self.texts = [first] * self.count
        self.histories = [deque(maxlen=self.settings.history) for _ in range(self.count)]
        self.open, self.gains = [None] * self.count, [0] * self.count

    def before(self, grid: Grid) -> None:
        """Ask for guidance if it is time."""
        if self.adviser is not None and self.step % self.interval == 0:
            self._ask(grid, self.adviser)
        self.step += 1

    def _ask(self, grid: Grid, adviser: Adviser) -> None:
        settings = self.settings
        requests = []
        for row, (text, history) in enumerate(zip(self.texts, self.histories, strict=True)):
            score = follows(history, text, settings.encoder, settings.score)
            if text and history:
                self.follow.append((score, self.gains[row]))
            told = score if settings.adapter.use_score else CONSTANT
            state = (*(grid.things[row] > 0).astype(int).tolist(), *grid.tools[row].astype(int).tolist())
            state = (*state, *grid.done[row].astype(int).tolist())
            last = history[-1] if history else ""
            requests.append(Fields(seen(grid, row), carried(grid, row), last, text, told, state))
            self.close(row)
        keys = [(*self.key, self.step, row) for row in range(self.count)]
        goals = adviser.advise(requests, grid.missing(), keys)
        self.texts = [THEN.join(GOALS[goal] for goal in named) for named in goals]
        if adviser.adapter is not None:
            self.open = list(zip(requests, adviser.analyses, strict=True))

    def close(self, row: int) -> None:
        """End the window of a row's last analysis."""
        last = self.open[row]
        if last is not None:
            self.pairs.append(Pair(*last, self.gains[row]))
        self.open[row], self.gains[row] = None, 0

    def after(self, actions: np.ndarray, gained: np.ndarray, over: np.ndarray) -> None:
        """Note the actions [E] and new achievements [E]; over [E]: episodes that ended."""
        for row, action in enumerate(actions.tolist()):
            self.histories[row].append(ACTIONS[action])
            self.gains[row] += int(gained[row])
            if over[row]:
                self.close(row)
                if self.settings.reset_guidance:
                    self.histories[row].clear()
                    self.texts[row] = FIXED if self.settings.guidance == "fixed" else ""

    def encoded(self) -> torch.Tensor:
        """[E, encoder]."""
        return torch.from_numpy(np.stack([encoded(text, self.settings.encoder) for text in self.texts]))


class Training:
    """One run's state; `rollout` plays and `learn` updates."""

    def __init__(self, settings: Advice) -> None:
        self.settings = settings
        torch.manual_seed(key64(settings.seed, "advice", "player") % 2**63)
        self.player = Player(settings, OBSERVATION, len(ACTIONS))
        self.optimiser = torch.optim.Adam(self.player.parameters(), lr=settings.learning_rate)
        self.generator = torch.Generator().manual_seed(key64(settings.seed, "advice", "draws") % 2**63)
        self.rng = np.random.default_rng(key64(settings.seed, "advice", "worlds"))
        self.grid = Grid.new(settings.environments, settings.size, self.rng)
        self.chooser = LanguageModel(settings.decision) if settings.decision.kind == "model" else None
        adapter = None
        if settings.guidance == "rladapter":
            adapter = LogisticAdapter(settings.adapter, 4 + 3 + len(GOALS), settings.encoder)
        asked = settings.guidance in ("llm_only", "rladapter")
        self.adviser = Adviser(settings.decision, adapter, self.chooser) if asked else None
        key = (settings.seed, "advice", "training")
        self.guided = Guided(settings, self.adviser, settings.query_interval, key, settings.environments)
        self.gained: list[float] = []
        """Achievements per step of each rollout."""
        self.written: list[str] = []
        """Lines of `adapter.pairs`."""

    @torch.no_grad()
    def rollout(self) -> Steps:
        """Play all environments and return their steps."""
        settings, length = self.settings, self.settings.rollout // self.settings.environments
        kept: list[tuple[torch.Tensor, ...]] = []
        total = 0
        for _ in range(length):
            self.guided.before(self.grid)
            observation, guidance = observed(self.grid, settings), self.guided.encoded()
            logprobs, value = self.player(observation, guidance)
            action = torch.multinomial(logprobs.exp(), 1, generator=self.generator)
            taken = action[:, 0].numpy()
            gained = self.grid.step(taken).sum(1)
            over = self.grid.steps >= settings.episode_steps
            after = self.player(observed(self.grid, settings), guidance)[1]
            reward, ended = torch.from_numpy(gained.astype(np.float32)), torch.from_numpy(over)
            kept.append((observation, guidance, action[:, 0], logprobs.gather(1, action)[:, 0], value, reward, after, ended))
            self.guided.after(taken, gained, over)
            self.grid.reset(over, self.rng) if over.any() else None
            total += int(gained.sum())
        self.gained.append(total / settings.rollout)
        observation, guidance, actions, logprob, value, reward, after, ended = (
            torch.stack(part) for part in zip(*kept, strict=True)
        )
        found = advantages(reward, value, after, ended, settings.gamma, settings.lam)
        flat = (part.flatten(0, 1) for part in (observation, guidance, actions, logprob, found, found + value))
        return Steps(*flat)

    def learn(self, data: Steps) -> torch.Tensor:
        return update(self.player, self.optimiser, data, self.settings, self.generator)

    def due(self, stage: int) -> bool:
        """Whether the adapter is fitted after this stage, counted from 1."""
        adapter = self.settings.adapter
        return stage >= adapter.first_stage and (stage - adapter.first_stage) % adapter.every == 0

    def adapt(self) -> tuple[float, float]:
        """Fit the adapter to the pairs since the last fit, if there is one; the held-out loss before and after."""
        pairs, self.guided.pairs = self.guided.pairs, []
        self.written += pair_rows(pairs)
        if self.adviser is None or self.adviser.adapter is None:
            return float("nan"), float("nan")
        return self.adviser.adapter.fit(pairs)

    def write_pairs(self) -> None:
        """Write all pairs, also those after the last fit, if they are to be kept."""
        if self.settings.adapter.pairs is not None:
            atomic_text(Path(self.settings.adapter.pairs), "".join([*self.written, *pair_rows(self.guided.pairs)]))


@torch.no_grad()
def evaluate(training: Training, interval: int, name: str) -> tuple[float, float]:
    """Crafter's score of the success rates, in percent, and the return of new episodes with guidance every `interval` steps."""
    settings = training.settings
    rng = np.random.default_rng(key64(settings.seed, "advice", "evaluation"))
    generator = torch.Generator().manual_seed(key64(settings.seed, "advice", "evaluation draws") % 2**63)
    grid = Grid.new(settings.evaluate_episodes, settings.size, rng)
    guided = Guided(settings, training.adviser, interval, (settings.seed, "advice", name), settings.evaluate_episodes)
    for _ in range(settings.episode_steps):
        guided.before(grid)
        logprobs, _ = training.player(observed(grid, settings), guided.encoded())
        action = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0].numpy()
        gained = grid.step(action).sum(1)
        guided.after(action, gained, np.zeros(len(action), bool))
    rates = 100.0 * grid.done.mean(0)
    return achievement_score(rates.tolist()), float(grid.done.sum(1).mean())


def correlation(pairs: list[tuple[float, int]]) -> float:
    """Pearson's; 0 where one of both does not vary."""
    if len(pairs) < 2:
        return 0.0
    one, other = np.array(pairs, dtype=float).T
    return float(np.corrcoef(one, other)[0, 1]) if one.std() > 0 and other.std() > 0 else 0.0


def run(settings: Advice) -> dict[str, float]:
    """score, return: Crafter's score in percent and achievements per episode at the end, guidance every query_interval steps;
    score_test: the same score, every test_interval steps; return_training: achievements per episode over the whole training;
    right_goals: share of the requests whose goals include the one to pursue next; score_gain: correlation of the adaptation score
    with what was gained in the same window; adapter_loss: held-out loss of the last fit, ln 8 for a uniform adapter, 0 without
    one; requests: asked of the adviser, in training."""
    training, loss = Training(settings), float("nan")
    per_stage = settings.steps // settings.rollout // settings.stages
    for stage in range(1, settings.stages + 1):
        for _ in range(per_stage):
            training.learn(training.rollout())
        if training.due(stage):
            loss = training.adapt()[1]
    training.write_pairs()
    adviser = training.adviser
    asked, right = (adviser.requests, adviser.right) if adviser is not None else (0, 0)
    score, returned = evaluate(training, settings.query_interval, "evaluation")
    score_test, _ = evaluate(training, settings.test_interval, "evaluation, test interval")
    if training.chooser is not None:
        training.chooser.save()
    return {
        "score": score,
        "score_test": score_test,
        "return": returned,
        "return_training": float(np.mean(training.gained)) * settings.episode_steps,
        "right_goals": right / asked if asked else 0.0,
        "score_gain": correlation(training.guided.follow),
        "adapter_loss": 0.0 if np.isnan(loss) else loss,
        "requests": float(asked),
    }


@command
def main() -> int:
    return one_run("control", __doc__, Advice, run, torch.set_num_threads)


if __name__ == "__main__":
    raise SystemExit(main())
