"""Supervised fine-tuning as a training job: the loss is the mean negative log-probability of the policy's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stages.agent.chat import Chat
from stages.agent.logprobs import token_logprobs
from stages.agent.shared_prefixes import fastest_states, sharing_states
from stages.algorithms.batch import LossTerms
from stages.records.episode import Episode
from stages.training.common.adapters import load_trained_state, trained_state
from stages.training.common.documents import Documents, encode, epoch_batches, micro_batches, steps_per_epoch
from stages.training.common.ledger import Ledger
from stages.training.common.loop import Job, Learner, Sums, Update, make_processes
from stages.training.common.optimiser import make_optimiser, warmup_cosine
from stages.training.common.processes import gather_full
from stages.training.sft.hints import Specs, demonstration_hints, demonstration_instructions
from stages.training.sft.settings import Sft

if TYPE_CHECKING:
    from stages.runtime.run_params import RunParams
    from stages.runtime.team import Team


class SftJob(Job):
    """Each step is one optimiser update over whole demonstrations; an epoch uses each once.

    `demonstrations` are given by split, train and valid. The validation loss is computed every `eval_every` steps and after the
    last; `close` puts the best weights into `trained_model`. `specs`: of the tasks, for hints (`sft.guided`).
    """

    def __init__(
        self,
        params: RunParams,
        model: Any,
        chat: Chat,
        demonstrations: Mapping[str, Sequence[Episode]],
        team: Team | None = None,
        specs: Specs | None = None,
    ) -> None:
        self.params: Sft = params.sft
        self.specs = specs or {}
        self.seed, self.model = params.seed, model
        self.tokens_per_batch = params.resources.tokens_per_batch
        max_length = params.model.max_length
        train, valid = demonstrations["train"], demonstrations["valid"]
        self.train: Documents = encode(chat, train, max_length, *self._added(train))
        self.valid: Documents | None = encode(chat, valid, max_length, *self._added(valid)) if valid else None
        self.per_epoch = steps_per_epoch(self.train, self.params.batch_tokens)
        self.steps = max(1, round(self.params.epochs * self.per_epoch))
        self.ledger = Ledger()
        self.best: dict[str, Any] = {"loss": None, "step": 0, "weights": None}
        self.evaluations_without_improvement = 0
        schedule = warmup_cosine(self.params.learning_rate, self.steps, self.params.warmup)
        self.states = fastest_states(model)
        self.processes = make_processes(params.resources, team)
        self.trained_model = self.processes.replica(model)
        """The trained model after `close`: `model` itself unless FSDP shards it."""
        optimiser = make_optimiser(self.processes.place(model), self.params.learning_rate, self.params.weight_decay)
        self.learners = {"policy": Learner(model, optimiser, schedule, self.params.max_grad_norm, self.processes)}

    def _added(self, demonstrations: Sequence[Episode]) -> tuple[list[str], list[str]]:
        """The hint and the instructions of each demonstration."""
        guided, instructed = self.params.guided, self.params.instructed
        hints = demonstration_hints(demonstrations, guided, self.seed, self.specs) if guided else []
        return hints, demonstration_instructions(demonstrations, instructed, self.seed) if instructed else []

    def updates(self, step: int) -> Iterator[Update]:
        epoch, place = divmod(step, self.per_epoch)
        if place == 0:
            self.ledger.open(self.train.mask)
        rows = epoch_batches(self.train, self.params.batch_tokens, self.seed, "sft", epoch)[place]
        tokens = float(self.train.mask[torch.tensor(rows)].sum())

        def loss(micro: list[int]) -> Iterator[LossTerms]:
            token_ids, mask = self.train.take(micro, self.model.device)
            logprobs = self._logprobs(token_ids, mask)
            share = -logprobs.sum() / tokens
            yield LossTerms(share, {"loss": share.detach()}, (torch.tensor(micro), mask))

        yield Update("policy", self._plan(self.train, rows), loss, self.ledger.record)
        if place == self.per_epoch - 1:
            self.ledger.close()

    def _plan(self, documents: Documents, rows: Sequence[int]) -> list[list[int]]:
        sharing = self.states is sharing_states
        return micro_batches(documents, rows, self.tokens_per_batch, sharing=sharing, least=self.processes.least)

    def _logprobs(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        return token_logprobs(self.model, token_ids, mask, states=self.states)

    def validation_loss(self) -> float:
        """Mean negative log-probability of the policy tokens of the validation demonstrations, nats."""
        valid = self.valid
        assert valid is not None

        def loss(micro: list[int]) -> float:
            return -float(self._logprobs(*valid.take(micro, self.model.device)).sum())

        plan, own = self._plan(valid, range(valid.size)), []
        with torch.no_grad():
            for micro, active in self.processes.shard(plan):
                value = self.processes.run_in_fsdp(self.model, partial(loss, micro))
                own += [value] if active else []
        return sum(self.processes.gather(own)) / max(1, int(valid.mask.sum()))

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        policy, learner = sums["policy"], self.learners["policy"]
        row = {"train_loss": policy["loss"], "lr": learner.schedule(step), "grad_norm": policy["grad_norm"]}
        if self.valid is not None and ((step + 1) % self.params.eval_every == 0 or step + 1 == self.steps):
            loss = row["valid_loss"] = self.validation_loss()
            if self.best["loss"] is None or loss < self.best["loss"]:
                state = trained_state(self.model)
                weights = {name: gather_full(value.detach()).cpu().clone() for name, value in state.items()}
                self.best = {"loss": loss, "step": step + 1, "weights": weights}
                self.evaluations_without_improvement = 0
            else:
                self.evaluations_without_improvement += 1
        return row

    def finished(self) -> bool:
        return self.evaluations_without_improvement >= self.params.patience

    def close(self) -> None:
        """Close an epoch that the last step cut short, and put the best weights into `trained_model`."""
        if self.ledger.is_open:
            self.ledger.close(complete=False)
        self.processes.refresh(self.trained_model, self.model)
        if self.best["weights"] is not None:
            load_trained_state(self.trained_model, self.best["weights"])

    def report(self, history: Sequence[Mapping[str, float]]) -> dict[str, Any]:
        """The job's part of reports/sft.json."""
        return {
            "steps": len(history),
            "epochs": len(history) / self.per_epoch,
            "stopped_early": len(history) < self.steps,
            "best_step": self.best["step"] or len(history),
            "train_loss": history[-1]["train_loss"],
            "valid_loss": self.best["loss"],
            "tokens": sum(self.train.lengths),
            "policy_tokens": int(self.train.mask.sum()),
            "trained_parameters": self.trained_model.num_parameters(only_trainable=True),
            **self.ledger.metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.state_dict(),
            "best": self.best,
            "evaluations_without_improvement": self.evaluations_without_improvement,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self.best = state["best"]
        self.evaluations_without_improvement = state["evaluations_without_improvement"]
