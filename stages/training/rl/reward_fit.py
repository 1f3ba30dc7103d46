"""Fits a reward model of whole episodes to the pairs that a preference method learns from, in the same steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stages.algorithms.batch import LossTerms
from stages.training.common.loop import Learner, Sums, Update
from stages.training.common.optimiser import make_optimiser, warmup_constant
from stages.training.common.processes import Processes
from stages.training.rl.pair_documents import Documents
from stages.values.reward_model import FOLDER, RewardModel, bradley_terry

if TYPE_CHECKING:
    from stages.algorithms.settings import Rl


class RewardFit:
    """The model, made of `policy` as it is, and its learner."""

    def __init__(self, policy: Any, rl: Rl, processes: Processes) -> None:
        self.processes, self.model = processes, RewardModel.of(policy)
        self.replica = processes.replica(self.model)
        rate = rl.preference.reward_learning_rate
        optimiser = make_optimiser(processes.place(self.model), rate, rl.weight_decay)
        self.learner = Learner(self.model, optimiser, warmup_constant(rate, rl.warmup_steps), rl.max_grad_norm, processes)

    def update(self, documents: Documents, weights: Tensor, plan: list[list[int]]) -> Update:
        """One step on pairs: documents, winner and loser in turn; weights [P], which add up to 1."""

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            micro = documents.rows(rows)
            device = self.model.output.weight.device
            scores = self.model(micro.token_ids.to(device), micro.last.to(device))
            win, lose = scores[0::2], scores[1::2]
            share = (bradley_terry(win, lose) * weights[torch.tensor(rows[0::2]) // 2].to(device)).sum()
            sums = {"loss": share.detach(), "right": (win > lose).sum(), "gap": (win - lose).detach().sum()}
            yield LossTerms(share, sums)

        return Update("reward_model", plan, loss)

    def metrics(self, sums: Sums | Mapping[str, float], count: float) -> dict[str, float]:
        """Columns of the history, of a step with `count` pairs."""
        return {
            "reward_model_loss": sums["loss"],
            "reward_model_accuracy": sums["right"] / count,
            "reward_model_gap": sums["gap"] / count,
        }

    def gather(self) -> None:
        """Copy sharded weights to where they are saved from. Every process must make this call."""
        self.processes.refresh(self.replica, self.model)

    def save(self, folder: Path) -> None:
        self.replica.save(folder / FOLDER)
