"""The job of token-level offline methods: each step is one update on some episodes of the offline dataset.

If the method has a value network, it is trained alone in the first steps, and the policy in the steps after. The frozen SFT
policy scores each episode once, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stages.agent.logprobs import predicting_states, token_scores
from stages.agent.policy import Policy
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms, next_token_values
from stages.algorithms.parts.offline import OfflineBatch, Scores, ValueFit, required
from stages.environments.protocol import Domain
from stages.records.episode import read_tasks
from stages.seeding import seed_torch
from stages.training.common.batches import padded, plan_micro_batches
from stages.training.common.loop import Learner, Sums, Update
from stages.training.common.optimiser import make_optimiser, warmup_constant
from stages.training.common.processes import Processes
from stages.training.rl.critic import Critic
from stages.training.rl.job import History, RlJob, window_means
from stages.training.rl.models import Models, make_learners
from stages.training.rl.offline_episodes import KINDS, kind_counts, mean_returns, offline_episodes
from stages.training.rl.offline_scores import Dueling, read_policy, read_reference, scattered
from stages.training.rl.sampler import EpochSampler
from stages.values.settings import HeadParams
from stages.values.token_q import Scale, TokenQ, advantages, bounded, raw_of, recovered

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


class OfflineJob(RlJob):
    """See `RlJob`."""

    def __init__(self, context: StageContext, algorithm: Algorithm, policy: Policy, processes: Processes, domain: Domain) -> None:
        super().__init__(context, algorithm, policy, processes, domain)
        assert algorithm.method.offline is not None
        self.losses, self.settings = algorithm.method.offline, self.rl.settings
        self.value_steps = self.settings.value_steps if self.losses.value else 0
        """Steps that train the value network."""
        tasks = {task.task_id: task for task in read_tasks(self.curated / "tasks.parquet", "train")}
        self.dataset = offline_episodes(context.data, str(context.domain), domain, tasks, self.chat, self.max_length)
        self._draw_steps(f"stored@{context.domain}")
        self.models = Models.make(algorithm, policy.model, None, processes, self.tokens_per_batch)
        self._score_with_reference()
        self.value: Critic | None = None
        self.trained: nn.Module = policy.model
        self._make_learners()
        self.base: Tensor | None = None
        """The trained value network's output on all tokens."""

    def _draw_steps(self, stream: str) -> None:
        """Draw the episodes of each step; `episodes` are those that some step uses."""
        settings, sizes = self.settings, {kind: len(self.dataset[kind]) for kind in KINDS}
        counts = kind_counts(sizes, settings.per_step, settings.real_share, settings.other_share)
        samplers = {kind: EpochSampler(sizes[kind], counts[kind], self.seed, stream, kind) for kind in KINDS}
        steps = [
            [self.dataset[kind][place] for kind in KINDS for place in samplers[kind].batch(step)] for step in range(self.rl.steps)
        ]
        self.episodes = list(dict.fromkeys(episode for step in steps for episode in step))
        places = {episode: place for place, episode in enumerate(self.episodes)}
        self.step_rows = [[places[episode] for episode in step] for step in steps]

    def _score_with_reference(self) -> None:
        """Make the batch of all episodes, with the frozen SFT policy's scores of their tokens; weights are set by each step."""
        by_task = mean_returns(self.dataset["own"])
        mean = sum(by_task.values()) / len(by_task) if by_task else 0.0
        no_weight = torch.zeros(len(self.episodes))
        mask = padded([episode.mask for episode in self.episodes], False, torch.bool)
        self.batch = OfflineBatch(
            token_ids=padded([episode.token_ids for episode in self.episodes], 0, torch.int64),
            mask=mask,
            rewards=padded([episode.rewards for episode in self.episodes], 0.0, torch.float32),
            real=torch.tensor([episode.kind == "real" for episode in self.episodes]),
            baseline=torch.tensor([by_task.get(episode.task_id, mean) for episode in self.episodes]),
            weight=no_weight,
            real_weight=no_weight,
            logprobs_ref=torch.zeros(mask.shape),
            best_ref=torch.zeros(mask.shape),
            greedy=torch.zeros(mask.shape, dtype=torch.int64),
        )
        reference = self.models.reference

        def compute(batch: OfflineBatch, rows: Sequence[int]) -> Tensor:
            return torch.stack(token_scores(reference, batch.token_ids, batch.mask, read_reference, batch.token_ids), -1)

        found = self._per_episode(compute, reference, 3)
        self.batch = replace(self.batch, logprobs_ref=found[..., 0], best_ref=found[..., 1], greedy=found[..., 2].round().long())

    def _make_learners(self) -> None:
        """The learners of the policy and of the value network, if any, which starts at the mean return of the data."""
        self.learners: dict[str, Learner] = {}
        if self.losses.value is None:
            self.learners = make_learners(self.models, self.rl)
            return
        rl, settings, policy = self.rl, self.settings, self.models.policy
        self.value = Critic(policy, HeadParams(loss="mse"))
        mean, largest = float(self.batch.returns.mean()), float(self.batch.returns.max())
        if largest > settings.r_max + 1e-6:
            raise ValueError(
                f"rl.settings.r_max ({settings.r_max:g}) is the upper bound of values, but an offline episode has a return of "
                f"{largest:g}; set it to the largest possible return"
            )
        nn.init.constant_(self.value.output.bias, raw_of(mean, settings.r_max))
        self.value_replica = self.processes.replica(self.value)
        if not settings.init_from_lm:
            seed_torch(self.seed, "b_coder")
            policy.load_state_dict(type(policy)(policy.config).state_dict())
        self.trained = Dueling(policy)
        self.trained_replica = self.processes.replica(self.trained)
        for name, module, rate in (
            ("policy", self.trained, rl.learning_rate),
            ("value", self.value, settings.value_learning_rate),
        ):
            optimiser = make_optimiser(self.processes.place(module), rate, rl.weight_decay)
            schedule = warmup_constant(rate, rl.warmup_steps)
            self.learners[name] = Learner(module, optimiser, schedule, rl.max_grad_norm, self.processes)

    def plan(self, rows: Sequence[int]) -> list[list[int]]:
        """Episodes in micro-batches of similar length."""
        plan = plan_micro_batches([len(self.episodes[row].token_ids) for row in rows], self.tokens_per_batch)
        return [[rows[place] for place in places] for places in plan]

    @torch.no_grad()
    def _per_episode(self, compute: Callable[[OfflineBatch, list[int]], Tensor], module: nn.Module, numbers: int) -> Tensor:
        """`compute` (some episodes, their rows) -> [d, T, numbers], run with `module` on all episodes and put together on the
        CPU, 0 elsewhere; the same in every process."""
        parts = []
        for rows, active in self.processes.shard(self.plan(range(len(self.episodes)))):
            batch = self.batch.take(rows, self.models.policy.device)
            part = self.processes.forward(module, partial(compute, batch, rows)).float().cpu()
            parts += [(rows, part)] if active else []
        result = torch.zeros((*self.batch.mask.shape, numbers))
        for rows, part in self.processes.gather(parts):
            result[torch.tensor(rows), : part.shape[1]] = part
        return result

    def step_batch(self, step: int) -> OfflineBatch:
        """All episodes, with the token weights of a step; an episode that the step uses twice has twice the weight."""
        times = torch.zeros(len(self.episodes))
        times.index_add_(0, torch.tensor(self.step_rows[step]), torch.ones(len(self.step_rows[step])))
        tokens, real = self.batch.mask.sum(1).clamp(min=1), times * self.batch.real
        weight, real_weight = times / times.sum() / tokens, real / real.sum().clamp(min=1) / tokens
        return replace(self.batch, weight=weight, real_weight=real_weight)

    def updates(self, step: int) -> Iterator[Update]:
        batch, rows = self.step_batch(step), list(dict.fromkeys(self.step_rows[step]))
        if step < self.value_steps:
            yield Update("value", self.plan(rows), partial(self._value_loss, batch))
            return
        if self.value is not None and self.base is None:
            value = self.value
            self.base = self._per_episode(lambda one, _: self._raw(value, one)[..., None], value, 1)[..., 0]
        self.ledger.open(self.batch.mask[torch.tensor(rows)])
        places = {row: place for place, row in enumerate(rows)}
        yield Update("policy", self.plan(rows), partial(self._policy_loss, batch, places), self.ledger.record)
        self.ledger.close()

    def _raw(self, value: Critic, batch: OfflineBatch) -> Tensor:
        return scattered(value.logits(batch.token_ids, batch.mask)[:, 0].float(), batch.mask)

    def _value_loss(self, batch: OfflineBatch, rows: list[int]) -> Iterator[LossTerms]:
        assert self.value is not None
        assert self.losses.value is not None
        micro = batch.take(rows, self.models.policy.device)
        yield self.losses.value(Scores(value=self._raw(self.value, micro)), micro, self.rl)

    def policy_scores(self, batch: OfflineBatch, rows: Sequence[int], trained: nn.Module) -> Scores:
        """The scores of the episodes `rows`, which are those in `batch`, under `trained` (the policy, or `Dueling`)."""
        policy = trained.policy if isinstance(trained, Dueling) else trained
        states = predicting_states(policy, batch.token_ids, batch.mask)
        logprobs, best, greedy = token_scores(
            *(policy, batch.token_ids, batch.mask, read_policy, batch.token_ids, batch.greedy), states=lambda *_: states
        )
        if not isinstance(trained, Dueling) or self.base is None:
            return Scores(logprobs, best, greedy)
        residual = scattered(trained.residual(states.float())[:, 0], batch.mask)
        value = self.base[torch.tensor(rows), : batch.mask.shape[1]].to(states.device)
        return Scores(logprobs, best, greedy, value, residual)

    def _policy_loss(self, batch: OfflineBatch, places: Mapping[int, int], rows: list[int]) -> Iterator[LossTerms]:
        micro = batch.take(rows, self.models.policy.device)
        terms = self.losses.policy(self.policy_scores(micro, rows, self.trained), micro, self.rl)
        yield replace(terms, trained=(torch.tensor([places[row] for row in rows]), micro.mask))

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        ((name, statistics),) = sums.items()
        rate = self.learners[name].schedule(self.learners[name].updates - 1)
        row = {"stored": float(len(self.step_rows[step]))}
        if name == "value":
            kept = {"value": statistics["value"], "value_correlation": ValueFit.correlation(statistics)}
            kept |= {f"value_{key}": statistics[key] for key in ("loss", "td", "grad_norm") if key in statistics}
            return row | kept | {"value_lr": rate}
        return row | {key: number for key, number in statistics.items() if key != "updates"} | {"lr": rate}

    def gather_weights(self) -> None:
        super().gather_weights()
        if self.value is not None:
            self.processes.refresh(self.trained_replica, self.trained)
            self.processes.refresh(self.value_replica, self.value)

    def save_values(self, folder: Path) -> None:
        """Save policy and value network together, to rank actions with, if the method has values."""
        if self.value is None:
            return
        scale = Scale(self.settings.alpha, self.settings.gamma, self.settings.r_max)
        value, dueling = self.value_replica, self.trained_replica
        TokenQ(dueling.policy, value.backbone, value.output, dueling.residual, scale).save(folder)

    def report(self, history: History) -> dict[str, Any]:
        """The episodes and tokens used, and, for a method with values, how R~ ranks the SFT policy's own episodes."""
        used = {kind: sum(episode.kind == kind for episode in self.episodes) for kind in KINDS}
        return {
            "environment_steps": 0,
            "stored": {kind: len(self.dataset[kind]) for kind in KINDS},
            "used": used,
            **self.ledger.metrics(),
            **({"recovered": self.recovered()} if self.value is not None else {}),
            **window_means(history, "value_td"),
            **window_means(history, "value_correlation"),
            **window_means(history, "td"),
        }

    def recovered(self) -> dict[str, Any]:
        """Mean R~ and mean summed advantage by return (`by_return`), over the SFT policy's own training episodes; and how often
        R~, in total and per token, is larger for the better of two episodes of a task, ties counting half."""
        settings = self.settings

        def compute(batch: OfflineBatch, rows: Sequence[int]) -> Tensor:
            scores = self.policy_scores(batch, rows, self.trained)
            value = bounded(required(scores.value) + required(scores.residual), settings.r_max)
            advantage = advantages(required(scores.logprobs), required(scores.best), settings.alpha)
            reward = recovered(advantage, value, next_token_values(value, batch.mask), settings.gamma)
            return torch.stack([reward * batch.mask, advantage * batch.mask], -1)

        sums = self._per_episode(compute, self.trained, 2).sum(1)
        own = [row for row, episode in enumerate(self.episodes) if episode.kind == "own"]
        returns = self.batch.returns.tolist()
        by_return: dict[str, dict[str, float]] = {}
        for value in sorted({round(returns[row], 6) for row in own}):
            rows = [row for row in own if round(returns[row], 6) == value]
            reward, advantage = sums[torch.tensor(rows)].mean(0).tolist()
            by_return[f"{value:g}"] = {"reward": reward, "advantage": advantage, "episodes": len(rows)}
        total = sums[:, 0].tolist()
        per_token = [reward / count for reward, count in zip(total, self.batch.mask.sum(1).tolist(), strict=True)]
        by_task: dict[str, list[int]] = {}
        for row in own:
            by_task.setdefault(self.episodes[row].task_id, []).append(row)
        pairs = [(a, b) for rows in by_task.values() for a in rows for b in rows if returns[a] > returns[b] + 1e-6]
        accuracies = {"accuracy": accuracy(total, pairs), "accuracy_per_token": accuracy(per_token, pairs)} if pairs else {}
        return {"by_return": by_return, "pairs": len(pairs), **accuracies}


def accuracy(scores: Sequence[float], pairs: Sequence[tuple[int, int]]) -> float:
    """Share of (better, worse) pairs whose better item scores higher, ties counting half."""
    return sum(0.5 if scores[a] == scores[b] else float(scores[a] > scores[b]) for a, b in pairs) / len(pairs)
