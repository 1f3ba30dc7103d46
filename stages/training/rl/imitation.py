"""Self-imitation (Oh et al., arXiv 1806.05514): successes that exceed what the policy usually achieves are learned again.

With R an episode's outcome and b the curriculum's running estimate of its task's outcome, the policy's loss is the paper's:

    - max(R - b, 0) log pi(y_t), mean over tokens

Episodes are drawn with probability proportional to max(R - b, 0), and the loss of the drawn ones is scaled by its mean over the
buffer. In expectation this is the loss over uniform draws (with episodes of equal length), and no pass is spent on episodes of
tasks that the policy has learned. The paper's baseline is its critic's value, its priorities are an exponent of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stages.algorithms.batch import LossTerms
from stages.algorithms.parts.imitation import Imitation
from stages.records.episode import Episode
from stages.training.common.batches import trajectory_batch
from stages.training.common.loop import Update
from stages.training.rl.cloning import cloning_loss
from stages.training.rl.models import Models
from stages.training.rl.replay_buffer import ReplayBuffer

Outcome = Callable[[Episode], float]


def untracked(loss: Callable[[list[int]], Iterator[LossTerms]], rows: list[int]) -> Iterator[LossTerms]:
    """`loss` without the tokens that it trains, as the ledger counts those of the step's own episodes."""
    return (replace(terms, trained=None) for terms in loss(rows))


class SelfImitation:
    """The buffer of successes, and their share of the policy's updates. `evidence`: as `trajectory_batch` takes it."""

    def __init__(self, models: Models, params: Imitation, temperature: float, evidence: bool = False) -> None:
        self.models, self.params, self.temperature, self.evidence = models, params, temperature, evidence
        self.buffer = ReplayBuffer([], params.capacity)
        self.metrics: dict[str, float] = {}
        """Of the last step: stored turns, the mean weight in the buffer, and the tokens that were learned again."""

    def add(self, played: Sequence[Episode], outcome: Outcome) -> None:
        """Store the episodes whose outcome is above 0."""
        self.buffer.add([episode for episode in played if outcome(episode) > 0])

    def join(self, updates: Iterator[Update], count: int, better_by: Outcome, *key: object) -> Iterator[Update]:
        """`updates`, of which those of the policy also learn `count` episodes each; if there are none of the policy, one update
        learns only these. better_by: an episode's R - b; `key` seeds the draws."""
        weights = [max(0.0, better_by(episode)) for episode in self.buffer.played]
        scale = sum(weights) / max(len(weights), 1)
        self.metrics = {"imitation_turns": float(self.buffer.turns), "imitation_weight": scale, "imitation_tokens": 0.0}
        if not scale:
            yield from updates
            return
        number = 0
        for update in updates:
            if update.learner != "policy":
                yield update
                continue
            yield self._joined(update, self.buffer.draw(count, *key, "imitation", number, weights=weights), scale)
            number += 1
        if not number:
            nothing = Update("policy", [], lambda _: iter(()))
            yield self._joined(nothing, self.buffer.draw(count, *key, "imitation", 0, weights=weights), scale)

    def _joined(self, update: Update, episodes: Sequence[Episode], scale: float) -> Update:
        batch = trajectory_batch(episodes, self.evidence)
        self.metrics["imitation_tokens"] += float(batch.mask.sum())
        loss = cloning_loss(self.models, batch, self.temperature, scale * self.params.coef)
        own = [(update.loss, micro) for micro in update.micro_batches]
        replayed = [(partial(untracked, loss), rows) for rows in self.models.plan(batch, range(batch.size))]

        def either(part: tuple[Callable[[Any], Iterator[LossTerms]], Any]) -> Iterator[LossTerms]:
            return part[0](part[1])

        return replace(update, micro_batches=[*own, *replayed], loss=either)

    def state_dict(self) -> dict[str, Any]:
        return self.buffer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.buffer.load_state_dict(state)
