"""The job of preference methods: each step is one optimiser update over some of the preference pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from stages.agent.logprobs import token_logprobs
from stages.agent.policy import Policy
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms
from stages.algorithms.parts.preference import LOSSES, REFERENCE_FREE, PairScores, margin
from stages.annotation.continuations import Pair
from stages.environments.protocol import Domain
from stages.records.episode import write_table
from stages.training.common.batches import plan_micro_batches
from stages.training.common.loop import Sums, Update
from stages.training.common.processes import Processes
from stages.training.rl.guided_pairs import guided_pairs
from stages.training.rl.guided_pass import GUIDED_SCHEMA, Attempts
from stages.training.rl.job import History, RlJob
from stages.training.rl.models import Models, make_learners
from stages.training.rl.pair_documents import Documents
from stages.training.rl.pairs import imported_pairs, tree_pairs
from stages.training.rl.reward_fit import RewardFit
from stages.training.rl.sampler import EpochSampler

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


def summed_logprobs(model: Any, documents: Documents) -> Tensor:
    """Sum of the log-probabilities of each document's masked tokens, [D] float32."""
    return token_logprobs(model, documents.token_ids.to(model.device), documents.mask.to(model.device)).sum(1)


class PreferenceJob(RlJob):
    """See `RlJob`. Each pair's loss is multiplied by its weight."""

    def __init__(
        self,
        context: StageContext,
        algorithm: Algorithm,
        policy: Policy,
        processes: Processes,
        domain: Domain | None,
        attempts: Attempts | None = None,
    ) -> None:
        super().__init__(context, algorithm, policy, processes, domain)
        self.preference, self.attempts = self.rl.preference, attempts
        self.pair_counts: dict[str, int] = {}
        """Of guided pairs, for the report."""
        self.pairs = self._read_pairs()
        if self.preference.loss == "kto" and len({pair.history for pair in self.pairs}) < 2:
            raise ValueError(
                f"the {len(self.pairs)} preference pairs of {context.domain} share one history, and rl.preference.loss: kto "
                f"compares each with continuations of another; raise annotate.tasks, or set rl.algorithm to dpo"
            )
        self.per_step = min(self.preference.pairs_per_step, len(self.pairs))
        self.sampler = EpochSampler(len(self.pairs), self.per_step, self.seed, f"pairs@{context.domain}")
        self.documents = Documents.of([(pair.history, side) for pair in self.pairs for side in (pair.win, pair.lose)])
        self.models = Models.make(algorithm, policy.model, None, processes, self.tokens_per_batch)
        self.learners = make_learners(self.models, self.rl)
        self.fit: RewardFit | None = None
        if self.preference.reward_model:
            self.fit = RewardFit(policy.model, self.rl, processes)
            self.learners["reward_model"] = self.fit.learner
        self.reference = torch.zeros(len(self.pairs) * 2)
        if self.preference.loss not in REFERENCE_FREE:
            self.reference = self.scores(self.models.reference, self.documents)

    def _read_pairs(self) -> list[Pair]:
        """The pairs of `preference.source`. Raises ValueError if there are none."""
        source, pairs = self.preference.source, []
        if source in ("trees", "all"):
            pairs += tree_pairs(self.annotated, self.preference.level)
        if source in ("imported", "all"):
            pairs += imported_pairs(self.curated, self.chat, self.max_length)
        if source == "guided":
            assert self.attempts is not None
            pairs, self.pair_counts = guided_pairs(self.attempts, self.rl.guidance, self.seed)
            if not pairs:
                raise ValueError(
                    f"no task of {self.context.domain} has both a success, plain or guided, and a plain failure to learn from, "
                    f"in {len(self.attempts.plain)} plain and {len(self.attempts.guided)} guided attempts: raise rollout.tasks, "
                    f"rollout.attempts or rl.guidance.attempts"
                )
        return pairs

    def plan(self, documents: Documents, together: int) -> list[list[int]]:
        """Documents in micro-batches of similar length; each run of `together` documents stays in one."""
        lengths = (documents.mask * torch.arange(1, documents.mask.shape[1] + 1)).amax(1).reshape(-1, together)
        plan = plan_micro_batches((lengths.amax(1) * together).tolist(), self.tokens_per_batch)
        return [[place * together + member for place in places for member in range(together)] for places in plan]

    @torch.no_grad()
    def scores(self, model: Any, documents: Documents) -> Tensor:
        """`summed_logprobs` of all documents, [D] on the CPU; the same in every process."""
        result = torch.zeros(len(documents.mask))
        for rows in self.plan(documents, 1):
            scores = self.processes.forward(model, partial(summed_logprobs, model, documents.rows(rows)))
            result[torch.tensor(rows)] = scores.cpu()
        return result

    def mismatches(self, chosen: Sequence[int]) -> list[int]:
        """For each chosen pair, a pair with another history: the next chosen one if there is any, otherwise the next of all."""
        found = []
        for place, pair in enumerate(chosen):
            others = chain(chosen[place + 1 :], chosen[:place], range(pair + 1, len(self.pairs)), range(pair))
            found.append(next(other for other in others if self.pairs[other].history != self.pairs[pair].history))
        return found

    def mismatched(self, chosen: Sequence[int]) -> float:
        """KTO's z0: max(0, mean h) of each pair's history with another pair's continuations, under the current policy."""
        parts = [
            (self.pairs[pair].history, side)
            for pair, other in zip(chosen, self.mismatches(chosen), strict=True)
            for side in (self.pairs[other].win, self.pairs[other].lose)
        ]
        documents = Documents.of(parts)
        h = self.scores(self.models.policy, documents) - self.scores(self.models.reference, documents)
        return max(0.0, float(h.mean()))

    def updates(self, step: int) -> Iterator[Update]:
        chosen = self.sampler.batch(step)
        documents = self.documents.rows([2 * pair + side for pair in chosen for side in (0, 1)])
        reference = self.reference[torch.tensor([2 * pair + side for pair in chosen for side in (0, 1)])]
        weights = torch.tensor([self.pairs[pair].weight for pair in chosen])
        weights = weights / weights.sum()
        values = torch.tensor([side.value for pair in chosen for side in (self.pairs[pair].win, self.pairs[pair].lose)])
        z0 = self.mismatched(chosen) if self.preference.loss == "kto" else 0.0
        self.ledger.open(documents.mask)

        def loss(rows: list[int]) -> Iterator[LossTerms]:
            micro = documents.rows(rows)
            sums = summed_logprobs(self.models.policy, micro)
            tokens, ref = micro.mask.sum(1).to(sums.device), reference[torch.tensor(rows)].to(sums.device)
            value = values[torch.tensor(rows)].to(sums.device)
            halves = (half for both in (sums, ref, tokens, value) for half in (both[0::2], both[1::2]))
            pairs = PairScores(*halves, mismatched=z0)
            terms = self.terms(pairs, weights[torch.tensor(rows[0::2]) // 2].to(sums.device))
            yield replace(terms, trained=(torch.tensor(rows), micro.mask))

        yield Update("policy", self.plan(documents, 2), loss, self.ledger.record)
        self.ledger.close()
        if self.fit is not None:
            yield self.fit.update(documents, weights, self.plan(documents, 2))

    def terms(self, pairs: PairScores, weights: Tensor) -> LossTerms:
        """A micro-batch's share of the loss: sum of weight [P] times loss per pair."""
        name = self.preference.loss
        if name == "own":
            per_pair = self.algorithm.method.pieces["preference"](pairs, self.rl)
        else:
            per_pair = LOSSES[name](pairs, self.preference)
        share = (per_pair * weights).sum()
        ranked = margin(pairs, name).detach()
        return LossTerms(
            share,
            {
                "loss": share.detach(),
                "pairs": torch.tensor(len(ranked)),
                "right": (ranked > 0).sum(),
                "margin": ranked.sum(),
                "winner": pairs.win_mean.detach().sum(),
                "loser": pairs.lose_mean.detach().sum(),
            },
        )

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        policy = sums["policy"]
        count = policy["pairs"]
        return {
            "loss": policy["loss"],
            "pair_accuracy": policy["right"] / count,
            "margin": policy["margin"] / count,
            "winner_logprob": policy["winner"] / count,
            "loser_logprob": policy["loser"] / count,
            "pairs": count,
            "grad_norm": policy["grad_norm"],
            "lr": self.learners["policy"].schedule(step),
            **(self.fit.metrics(sums["reward_model"], count) if self.fit is not None else {}),
        }

    def gather_weights(self) -> None:
        super().gather_weights()
        if self.fit is not None:
            self.fit.gather()

    def save_values(self, folder: Path) -> None:
        """Save the reward model beside the policy, if there is one."""
        if self.fit is not None:
            self.fit.save(folder)

    def save_tables(self, folder: Path) -> None:
        """Write the guided attempts, if there are any."""
        if self.attempts is not None and self.attempts.guided:
            write_table(folder / "guided.parquet", GUIDED_SCHEMA, self.attempts.rows())

    def report(self, history: History) -> dict[str, Any]:
        guided = {"guidance": {**self.attempts.report(), **self.pair_counts}} if self.attempts is not None else {}
        return {
            "environment_steps": self.attempts.steps if self.attempts is not None else 0,
            **guided,
            "pairs": len(self.pairs),
            "passes": len(history) * self.per_step / len(self.pairs),
            "pair_accuracy_first": history[0]["pair_accuracy"],
            "pair_accuracy_last": history[-1]["pair_accuracy"],
            **self.ledger.metrics(),
        }
