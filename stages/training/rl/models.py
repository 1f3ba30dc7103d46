"""The models of an RL run: policy, frozen reference, critics of tokens or turns, and the models that annotate fitted for step
credit (step-value model or progress estimator)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stages.agent.logprobs import States, predicting_states, score_tokens, token_logprobs
from stages.agent.recompute import recompute_layers, recomputes
from stages.agent.shared_prefixes import plan_shared, shares, sharing_states
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.credit import StepValues
from stages.algorithms.parts.critic import learns_values
from stages.algorithms.parts.external import PolicyVocabulary
from stages.algorithms.parts.group_resampling import forward_rows
from stages.algorithms.parts.loss import MeanLogprobs, kl_estimate
from stages.algorithms.parts.progress import Progress
from stages.algorithms.parts.turn_critic import TurnCritic
from stages.algorithms.settings import Rl
from stages.engine.products import as_in_training
from stages.training.common.adapters import reference_of, twin
from stages.training.common.batches import (
    plan_micro_batches,
    plan_whole_groups,
    take,
    trained_lengths,
    turn_boundaries,
    turn_ends,
)
from stages.training.common.hidden import Hidden, read_lengths, seen
from stages.training.common.kept import kept_of
from stages.training.common.loop import Learner
from stages.training.common.optimiser import make_optimiser, warmup_constant
from stages.training.common.processes import Processes
from stages.training.common.sparse_updates import SparseUpdates
from stages.training.rl.critic import Critic, reward_start
from stages.values.progress import ProgressEstimator
from stages.values.settings import HeadParams
from stages.values.step_value import StepValueModel
from stages.values.turn_critic import TWINS, TurnCriticModel


@dataclass
class Models:
    """`reference` is the start policy; under LoRA it shares the policy's frozen weights."""

    policy: Any
    reference: Any
    critic: Critic | None
    turn_critic: TurnCriticModel | None
    step_values: StepValueModel | None
    progress: ProgressEstimator | None
    tokens_per_batch: int
    whole_groups: bool
    """Whether micro-batches consist of whole groups."""
    sharing: bool
    """Whether common prefixes of episodes are computed once (shared_prefixes.py)."""
    processes: Processes
    player: Any
    """The policy that the engine plays: `policy` itself, or under FSDP an unsharded copy (see `refresh_player`)."""

    @classmethod
    def make(
        cls, algorithm: Algorithm, policy: Any, annotated: Path | None, processes: Processes, tokens_per_batch: int, seed: int = 0
    ) -> Models:
        """Models for `algorithm` from the start policy.

        annotated: the folder of annotate's models, for step credit and to initialise critics. seed: of a critic's random layers.
        Raises FileNotFoundError if a required model is missing from that folder, and ValueError if a critic cannot start from
        it, or under FSDP for a critic with a target network.
        """
        device = processes.device
        policy.to(device)
        reference = reference_of(policy)
        sharing = algorithm.rl.share_prefixes and shares(policy)
        states = sharing_states if sharing else predicting_states
        critic, turn_critic = make_critics(algorithm, policy, annotated, states, seed, reference)
        if processes.sharded and (problem := algorithm.rl.advantage.unshardable):
            raise ValueError(problem)
        step_values = progress = None
        if annotated is not None and algorithm.rl.credit.kind == "annotated":
            step_values = StepValueModel.load(annotated / "value_model", str(device))
        if annotated is not None and algorithm.needs_progress:
            progress = ProgressEstimator.load(annotated / "progress_model", str(device))
        return cls(
            *(policy, reference, critic, turn_critic, step_values, progress),
            *(tokens_per_batch, algorithm.whole_groups, sharing, processes, processes.replica(policy)),
        )

    def refresh_player(self) -> None:
        """Give the engine the policy's current weights. Every process must make this call."""
        self.processes.refresh(self.player, self.policy)

    @property
    def states(self) -> States:
        """How hidden states are computed, for `token_logprobs`."""
        return sharing_states if self.sharing else predicting_states

    def plan_training(self, batch: TrajectoryBatch, rows: Sequence[int]) -> list[list[int]]:
        """Rows of the batch in micro-batches for a policy update: whole groups if the method's loss compares the episodes of a
        group, otherwise as `plan`."""
        if self.whole_groups:
            return plan_whole_groups(batch.group, rows, partial(self.plan, batch, least=1))
        return self.plan(batch, rows)

    def plan(self, batch: TrajectoryBatch, rows: Sequence[int], least: int | None = None) -> list[list[int]]:
        """Rows of the batch in micro-batches: with prefix sharing, rows with common prefixes, and at least `least` micro-batches
        (by default `Processes.least`); otherwise, or if rows forget, rows of similar length."""
        if (hidden := batch.get(Hidden)) is not None:
            return self._plan_by(read_lengths(batch, hidden), rows)
        return self.plan_reads(batch.token_ids, batch.mask, rows, least)

    def plan_reads(self, token_ids: Tensor, mask: Tensor, rows: Sequence[int], least: int | None = None) -> list[list[int]]:
        """`plan` for any token_ids, mask [B, T] that are read up to the last place in the mask."""
        if not self.sharing:
            return self._plan_lengths(mask, rows)
        return plan_shared(token_ids, mask, rows, self.tokens_per_batch, self.processes.least if least is None else least)

    def plan_dense(self, batch: TrajectoryBatch, rows: Sequence[int]) -> list[list[int]]:
        """Rows of the batch in micro-batches of similar trained length."""
        return self._plan_lengths(batch.mask, rows)

    def _plan_lengths(self, mask: Tensor, rows: Sequence[int]) -> list[list[int]]:
        return self._plan_by(trained_lengths(mask).tolist(), rows)

    def _plan_by(self, lengths: Sequence[int], rows: Sequence[int]) -> list[list[int]]:
        plan = plan_micro_batches([lengths[row] for row in rows], self.tokens_per_batch)
        return [[rows[place] for place in group] for group in plan]

    def _per_row(
        self,
        batch: TrajectoryBatch,
        plan: Sequence[Sequence[int]],
        shape: torch.Size,
        compute: Callable[[TrajectoryBatch], Tensor],
        module: torch.nn.Module,
        *,
        fitted: bool = False,
        trained: bool = False,
    ) -> Tensor:
        """`compute`, with `module`, on the micro-batches of `plan`, put together as a tensor of `shape` on the CPU, 0 elsewhere.
        The processes share the micro-batches.

        It runs in the training precision, since losses compare its results with those of their own passes. fitted: in float32,
        for models that annotate fitted. trained: with the kernels of a pass with gradients.
        """
        parts: list[tuple[Sequence[int], Tensor]] = []
        run = self.processes.run_in_fsdp if fitted else self.processes.forward
        with torch.set_grad_enabled(trained), as_in_training():
            for group, active in self.processes.shard(plan):
                micro = take(batch, group, self.policy.device)
                part = run(module, partial(compute, micro)).detach().float().cpu()
                parts += [(group, part)] if active else []
        result = torch.zeros(shape)
        for group, part in self.processes.gather(parts):
            result[torch.tensor(group), : part.shape[1]] = part
        return result

    def logprobs(self, model: Any, batch: TrajectoryBatch, rows: Sequence[int], temperature: float) -> Tensor:
        """Log-probabilities [B, T] under `model` (policy or reference) on the masked tokens of `rows`, 0 elsewhere."""

        def compute(micro: TrajectoryBatch) -> Tensor:
            ids, mask = micro.token_ids, micro.mask
            return token_logprobs(model, ids, mask, temperature, states=seen(self.states, micro), kept=kept_of(micro))

        return self._per_row(batch, self.plan(batch, rows), batch.mask.shape, compute, model)

    def reference_kl(self, batch: TrajectoryBatch, temperature: float) -> float:
        """Mean k3 estimate of KL(policy || reference) per policy token, nats.

        Over the whole batch if it has reference log-probabilities, otherwise over the first episode of each group, to save
        forward passes. In mixed precision always over the latter, with the policy's current log-probabilities unless the batch
        has those of a training pass.
        """
        old, reference, mask, mixed = batch.logprobs_old, batch.logprobs_ref, batch.policy_mask, self.processes.mixed_precision
        if reference is None or mixed:
            first = {group: row for row, group in reversed(list(enumerate(batch.group.tolist())))}
            rows = sorted(row for row in first.values() if bool(mask[row].any()))
            reference = self.logprobs(self.reference, batch, rows, temperature)
            if mixed and batch.logprobs_drawn is None:
                old = self.logprobs(self.policy, batch, rows, temperature)
            mask = mask & torch.zeros(batch.size, 1, dtype=torch.bool).index_fill(0, torch.tensor(rows, dtype=torch.int64), True)
        values = kl_estimate(old, reference, "k3")
        return float((values * mask).sum() / mask.sum().clamp(min=1))

    def _with_external(self, batch: TrajectoryBatch, rows: Sequence[int], temperature: float) -> TrajectoryBatch:
        """The batch with the policy's current log-probabilities as `logprobs_old` of external tokens."""
        assert batch.external is not None
        has_external = batch.external.any(1)
        found = self.logprobs(self.policy, batch, [row for row in rows if has_external[row]], temperature)
        old = torch.where(batch.external, found, batch.logprobs_old)
        return batch.with_(logprobs_old=old).with_extra(PolicyVocabulary(self.policy.config.vocab_size))

    def rescored(
        self, batch: TrajectoryBatch, plan: Sequence[Sequence[int]], algorithm: Algorithm, trained: bool = False
    ) -> TrajectoryBatch:
        """The batch with `logprobs_old`, and MeanLogprobs if the method uses them, of the rows in `plan` as the training
        pass computes them. trained: with the kernels of that pass."""
        vocabulary, temperature = algorithm.needs_rescoring, algorithm.rl.sampling.temperature

        def compute(micro: TrajectoryBatch) -> Tensor:
            scores = score_tokens(
                *(self.policy, micro.token_ids, micro.mask, temperature),
                states=seen(self.states, micro),
                vocabulary=vocabulary,
                kept=kept_of(micro),
            )
            mean = torch.zeros_like(scores.logprobs) if scores.vocabulary is None else scores.vocabulary.mean
            return torch.stack([scores.logprobs, mean], -1)

        shape = torch.Size((*batch.mask.shape, 2))
        old, mean = self._per_row(batch, plan, shape, compute, self.policy, trained=trained).unbind(-1)
        chosen = torch.zeros(batch.size, 1, dtype=torch.bool)
        chosen[[row for rows in plan for row in rows]] = True
        old = torch.where(chosen, old, batch.logprobs_old)
        drawn = batch.logprobs_old if batch.logprobs_drawn is None else batch.logprobs_drawn
        batch = batch.with_(logprobs_old=old, logprobs_drawn=drawn)
        return batch.with_extra(MeanLogprobs(mean)) if vocabulary else batch

    def annotate(self, batch: TrajectoryBatch, algorithm: Algorithm) -> TrajectoryBatch:
        """The batch with what the algorithm needs: the policy's `logprobs_old` (recomputed, or on external tokens only),
        `logprobs_ref`, the critics' `values` and TurnCritic, annotate's StepValues and Progress.

        In mixed precision, `PolicyUpdates.rescored` computes `logprobs_old` for the loss, once the micro-batches are known; here
        they are recomputed for the reward's KL penalty alone.
        """
        rows = forward_rows(batch).tolist()
        if bool(algorithm.rl.reward.kl_coef) if self.processes.mixed_precision else algorithm.needs_rescoring:
            batch = self.rescored(batch, self.plan(batch, rows), algorithm)
        if batch.external is not None:
            batch = self._with_external(batch, rows, algorithm.rl.sampling.temperature)
        if algorithm.needs_reference:
            reference = self.logprobs(self.reference, batch, rows, algorithm.rl.sampling.temperature)
            batch = batch.with_(logprobs_ref=reference)
        critic, turn_critic, step_values, progress = self.critic, self.turn_critic, self.step_values, self.progress
        if critic is not None:

            def values(micro: TrajectoryBatch) -> Tensor:
                return critic.values(micro.token_ids, micro.mask)

            batch = batch.with_(values=self._per_row(batch, self.plan(batch, rows), batch.mask.shape, values, critic))
        if turn_critic is not None:

            def twins(micro: TrajectoryBatch) -> Tensor:
                return turn_critic.values(micro.token_ids, turn_boundaries(micro), turn_ends(micro))

            shape = torch.Size((*batch.turn_rewards.shape, 2 * TWINS))
            found = self._per_row(batch, self.plan(batch, rows), shape, twins, turn_critic)
            batch = batch.with_extra(TurnCritic(found[..., :TWINS], found[..., TWINS:]))
        if step_values is not None:
            turns, count = batch.turn_rewards.shape

            def turn_values(micro: TrajectoryBatch) -> Tensor:
                return step_values.turn_values(micro.token_ids, micro.lengths, turn_boundaries(micro))

            plan, shape = self.plan_dense(batch, rows), torch.Size((turns, count + 1))
            found = self._per_row(batch, plan, shape, turn_values, step_values, fitted=True)
            batch = batch.with_extra(StepValues(found))
        if progress is not None:

            def contributions(micro: TrajectoryBatch) -> Tensor:
                return progress.contributions(micro.token_ids, turn_ends(micro))

            plan = self.plan_dense(batch, rows)
            found = self._per_row(batch, plan, batch.turn_rewards.shape, contributions, progress, fitted=True)
            batch = batch.with_extra(Progress(found))
        return batch


def make_critics(
    algorithm: Algorithm, policy: Any, annotated: Path | None, states: States, seed: int, reference: Any
) -> tuple[Critic | None, TurnCriticModel | None]:
    """The critics of tokens and of turns that the algorithm needs; see `Models.make`."""
    params = algorithm.rl.critic
    head, start = params.distribution or params.head, None
    if annotated is not None and params.init == "value_model" and learns_values(algorithm.rl):
        start = StepValueModel.load(annotated / "value_model", str(policy.device))
    elif annotated is not None and params.init == "judge_model" and learns_values(algorithm.rl):
        given = algorithm.rl.judge
        start = reward_start(annotated / "judge_model", given.local.options, given.scale, params.head, str(policy.device))
    if start is not None and recomputes(policy):
        recompute_layers(start.backbone)
    if not algorithm.needs_turn_critic:
        if not algorithm.needs_critic:
            return None, None
        frozen = params.trunk == "frozen"
        return Critic(reference if frozen else policy, head, states, start, seed, hidden=params.hidden, frozen=frozen), None
    backbone = twin(policy.base_model) if start is None else start.backbone
    # The token baseline learns advantages: no step-value model predicts these, and no fixed support fits them.
    baseline = Critic(policy, HeadParams(loss="mse"), states) if algorithm.needs_critic else None
    return baseline, TurnCriticModel(backbone, head, states, seed, start=start)


def make_learners(models: Models, rl: Rl) -> dict[str, Learner]:
    """The learners of the policy and of the critics, which have their own learning rate."""
    processes = models.processes

    def learner(module: torch.nn.Module, learning_rate: float, sparse: SparseUpdates | None = None) -> Learner:
        optimiser = make_optimiser(processes.place(module), learning_rate, rl.weight_decay)
        schedule = warmup_constant(learning_rate, rl.warmup_steps)
        return Learner(module, optimiser, schedule, rl.max_grad_norm, processes, sparse)

    learners = {"policy": learner(models.policy, rl.learning_rate, SparseUpdates(rl.sparse) if rl.sparse.active else None)}
    for name, critic in (("critic", models.critic), ("turn_critic", models.turn_critic)):
        if critic is not None:
            learners[name] = learner(critic, rl.critic.learning_rate)
    return learners
