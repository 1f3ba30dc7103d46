"""The job that clones correct tree paths, or successful attempts: each step is one optimiser update on some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.agent.forgetting import with_hidden
from stages.agent.logprobs import token_logprobs
from stages.agent.policy import Policy
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms, TrajectoryBatch
from stages.annotation.correct_paths import correct_episodes
from stages.environments.protocol import Domain
from stages.records.episode import Episode, read_rows, write_table
from stages.seeding import permutation
from stages.training.common.batches import take, trajectory_batch
from stages.training.common.hidden import seen
from stages.training.common.kept import kept_of
from stages.training.common.loop import Sums, Update
from stages.training.common.processes import Processes
from stages.training.rl.guided_pairs import usable_successes
from stages.training.rl.guided_pass import GUIDED_SCHEMA, Attempts
from stages.training.rl.job import History, RlJob
from stages.training.rl.models import Models, make_learners
from stages.training.rl.sampler import EpochSampler

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


def cloning_loss(
    models: Models, batch: TrajectoryBatch, temperature: float, scale: float = 1.0
) -> Callable[[list[int]], Iterator[LossTerms]]:
    """Rows of the batch -> their share of `scale` times the mean negative log-probability of its tokens."""
    tokens = float(batch.mask.sum())

    def loss(rows: list[int]) -> Iterator[LossTerms]:
        micro = take(batch, rows, models.policy.device)
        ids, mask = micro.token_ids, micro.mask
        logprobs = token_logprobs(models.policy, ids, mask, temperature, states=seen(models.states, micro), kept=kept_of(micro))
        share = -scale * logprobs.sum() / tokens
        yield LossTerms(share, {"cloning_loss": share.detach()}, (torch.tensor(rows), micro.mask))

    return loss


def chosen_successes(plain: Sequence[Episode], fraction: float, seed: int) -> list[Episode]:
    """round(fraction * n) of the n successes, drawn at random and sorted by id."""
    successes = sorted((episode for episode in plain if episode.success), key=lambda episode: episode.episode_id)
    chosen = permutation(successes, "rejection_sft", seed)[: round(fraction * len(successes))]
    return sorted(chosen, key=lambda episode: episode.episode_id)


class CloningJob(RlJob):
    """See `RlJob`."""

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
        self.attempts = attempts
        paths = self._tree_paths() if attempts is None else self._successes(attempts)
        self.paths = [with_hidden(self.chat, path) for path in paths]
        self.per_step = min(self.rl.settings.paths_per_step, len(self.paths))
        self.sampler = EpochSampler(len(self.paths), self.per_step, self.seed, f"paths@{context.domain}")
        self.models = Models.make(algorithm, policy.model, None, processes, self.tokens_per_batch)
        self.learners = make_learners(self.models, self.rl)

    def _tree_paths(self) -> list[Episode]:
        nodes = self.annotated / "nodes.parquet"
        paths = correct_episodes(read_rows(nodes), self.rl.settings.per_tree, str(self.context.domain))
        if not paths:
            raise ValueError(
                f"{nodes} has no path to a success to clone; raise annotate.tasks or annotate.iterations, or choose another "
                f"rl.algorithm"
            )
        return paths

    def _successes(self, attempts: Attempts) -> list[Episode]:
        settings = self.rl.settings
        paths = chosen_successes(attempts.trainable, settings.fraction, self.seed)
        if settings.guided:
            paths += usable_successes(attempts, self.rl.guidance)[0]
        if not paths:
            raise ValueError(
                f"{settings.fraction:g} of the successes among {len(attempts.trainable)} plain attempts at training tasks of "
                f"{self.context.domain} is none to learn from; raise rollout.tasks, rollout.attempts or the fraction, "
                f"or set rl.warm_start to {{}} if it is the warm start"
            )
        return paths

    def save_tables(self, folder: Path) -> None:
        """Write the guided attempts, if there are any."""
        if self.attempts is not None and self.attempts.guided:
            write_table(folder / "guided.parquet", GUIDED_SCHEMA, self.attempts.rows())

    def updates(self, step: int) -> Iterator[Update]:
        paths = [self.paths[place] for place in self.sampler.batch(step)]
        batch = trajectory_batch(paths, self.rl.loss.trains_evidence)
        loss = cloning_loss(self.models, batch, self.rl.sampling.temperature)
        self.ledger.open(batch.mask)
        yield Update("policy", self.models.plan(batch, range(batch.size)), loss, self.ledger.record)
        self.ledger.close()

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        policy = sums["policy"]
        return {
            "loss": policy["cloning_loss"],
            "paths": float(self.per_step),
            "grad_norm": policy["grad_norm"],
            "lr": self.learners["policy"].schedule(step),
        }

    def report(self, history: History) -> dict[str, Any]:
        return {
            "environment_steps": self.attempts.steps if self.attempts is not None else 0,
            "paths": len(self.paths),
            "trees" if self.attempts is None else "tasks": len({path.task_id for path in self.paths}),
            **({"guidance": self.attempts.report()} if self.attempts is not None else {}),
            "passes": len(history) * self.per_step / len(self.paths),
            "loss_first": history[0]["loss"],
            "loss_last": history[-1]["loss"],
            **self.ledger.metrics(),
        }
