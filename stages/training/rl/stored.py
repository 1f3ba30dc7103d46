"""Learning from stored episodes as a job of the training loop: nothing is played, a step is one update over some of them.

Where the method has a value network, it learns alone for the first steps, and the policy in those after. The frozen SFT policy is
asked about each episode once, before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from stages.agent.chat import Chat
from stages.agent.policy import Policy, predicting_states, token_scores
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import LossTerms, next_token_values
from stages.algorithms.parts.offline import OfflineBatch, Scores, required
from stages.records.episode import read_tasks
from stages.records.sections import seed_of
from stages.seeding import seed_torch
from stages.training.batches import padded, plan_micro_batches
from stages.training.ledger import Ledger
from stages.training.loop import Learner, Sums, Update
from stages.training.optimiser import make_optimiser, warmup_constant
from stages.training.processes import Processes
from stages.training.rl.critic import Critic
from stages.training.rl.models import Models, make_learners
from stages.training.rl.sampler import Dealer
from stages.training.rl.stored_episodes import KINDS, returns_by_task, shares, stored_episodes
from stages.values.settings import HeadParams
from stages.values.token_q import Scale, TokenQ, advantages, bounded, raw_of, recovered, standing

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


class Dueling(nn.Module):
    """The policy, and what its learner adds to the value network's output: a linear head on its last hidden states that starts
    at 0."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy, self.residual = policy, nn.Linear(policy.config.hidden_size, 1)
        nn.init.zeros_(self.residual.weight)
        nn.init.zeros_(self.residual.bias)


def read_reference(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """As `standing`, and the likeliest token itself: the lowest of equals."""
    return *standing(logits, targets), (logits == logits.amax(-1, keepdim=True)).int().argmax(-1).float()


def read_policy(logits: Tensor, targets: Tensor, greedy: Tensor) -> tuple[Tensor, ...]:
    """As `standing`, and the log-probability of `greedy`."""
    logs = logits.log_softmax(-1)
    return logs.gather(-1, targets[:, None])[:, 0], logs.amax(-1), logs.gather(-1, greedy[:, None])[:, 0]


def scattered(numbers: Tensor, mask: Tensor) -> Tensor:
    """numbers [n] on the mask [d, T], in its order, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=numbers.dtype, device=numbers.device).masked_scatter(mask, numbers)


class StoredJob:
    """See stages.training.loop.Job. `domain`: where the policy is to act, which may know the returns of some actions."""

    def __init__(self, context: StageContext, algorithm: Algorithm, policy: Policy, processes: Processes, domain: Any) -> None:
        assert context.domain is not None
        params, rl = context.params, algorithm.rl
        assert algorithm.method.offline is not None
        self.algorithm, self.rl, self.losses = algorithm, rl, algorithm.method.offline
        self.settings, self.processes = rl.settings, processes
        self.tokens_per_batch = params.resources.tokens_per_batch
        self.warmup = self.settings.warmup(rl.steps) if self.losses.value else 0
        """Steps of the value network."""
        tasks = read_tasks(context.data / "curated" / context.domain / "tasks.parquet", "train")
        known = {task.task_id: task for task in tasks}
        self.stored = stored_episodes(
            context.data, context.domain, domain, known, Chat(policy.tokenizer, params.model.thinking), params.model.max_length
        )
        seed = seed_of(params, rl)
        self._deal(seed, f"stored@{context.domain}")
        self.models = Models.make(algorithm, policy.model, None, processes, self.tokens_per_batch)
        self._ask_reference()
        self.value: Critic | None = None
        self.trained: nn.Module = policy.model
        self._make_learners(seed)
        self.ledger = Ledger()
        self.base: Tensor | None = None
        """The value network's output on all tokens, once it has learnt."""

    def _deal(self, seed: int, stream: str) -> None:
        """Decide which episodes each step takes; those that no step takes are forgotten."""
        settings, sizes = self.settings, {kind: len(self.stored[kind]) for kind in KINDS}
        counts = shares(sizes, settings.per_step, settings.real_share, settings.other_share)
        dealers = {kind: Dealer(sizes[kind], counts[kind], seed, stream, kind) for kind in KINDS}
        steps = [
            [self.stored[kind][place] for kind in KINDS for place in dealers[kind].dealt(step)] for step in range(self.rl.steps)
        ]
        self.episodes = list(dict.fromkeys(episode for step in steps for episode in step))
        places = {episode: place for place, episode in enumerate(self.episodes)}
        self.dealt = [[places[episode] for episode in step] for step in steps]

    def _ask_reference(self) -> None:
        """All episodes as a batch, with what the frozen SFT policy says of their tokens; weights are each step's own."""
        by_task = returns_by_task(self.stored["own"])
        mean = sum(by_task.values()) / len(by_task) if by_task else 0.0
        nothing = torch.zeros(len(self.episodes))
        mask = padded([episode.mask for episode in self.episodes], False, torch.bool)
        self.batch = OfflineBatch(
            token_ids=padded([episode.token_ids for episode in self.episodes], 0, torch.int64),
            mask=mask,
            rewards=padded([episode.rewards for episode in self.episodes], 0.0, torch.float32),
            real=torch.tensor([episode.kind == "real" for episode in self.episodes]),
            baseline=torch.tensor([by_task.get(episode.task_id, mean) for episode in self.episodes]),
            weight=nothing,
            real_weight=nothing,
            logprobs_ref=torch.zeros(mask.shape),
            best_ref=torch.zeros(mask.shape),
            greedy=torch.zeros(mask.shape, dtype=torch.int64),
        )
        reference = self.models.reference

        def compute(batch: OfflineBatch, rows: Sequence[int]) -> Tensor:
            return torch.stack(token_scores(reference, batch.token_ids, batch.mask, read_reference, batch.token_ids), -1)

        found = self._per_episode(compute, reference, 3)
        self.batch = replace(self.batch, logprobs_ref=found[..., 0], best_ref=found[..., 1], greedy=found[..., 2].round().long())

    def _make_learners(self, seed: int) -> None:
        """The policy's learner and, where there is a value network, that one's, which starts at the mean return of the data."""
        self.learners: dict[str, Learner] = {}
        if self.losses.value is None:
            self.learners = make_learners(self.models, self.rl)
            return
        rl, settings, policy = self.rl, self.settings, self.models.policy
        self.value = Critic(policy, HeadParams(loss="mse"))
        mean, largest = float(self.batch.returns.mean()), float(self.batch.returns.max())
        if largest > settings.r_max + 1e-6:
            raise ValueError(
                f"rl.settings.r_max ({settings.r_max:g}) bounds values from above, and a stored episode has a return of "
                f"{largest:g}; set it to the largest return that there is"
            )
        nn.init.constant_(self.value.output.bias, raw_of(mean, settings.r_max))
        self.kept_value = self.processes.replica(self.value)
        if not settings.init_from_lm:
            seed_torch(seed, "b_coder")
            policy.load_state_dict(type(policy)(policy.config).state_dict())
        self.trained = Dueling(policy)
        self.kept = self.processes.replica(self.trained)
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
        """`compute` (of some episodes and their rows) [d, T, numbers], with `module`, of all episodes on the CPU, 0 where there
        is nothing; the same in every process."""
        parts = []
        for rows, counts in self.processes.mine(self.plan(range(len(self.episodes)))):
            batch = self.batch.take(rows, self.models.policy.device)
            part = self.processes.forward(module, partial(compute, batch, rows)).float().cpu()
            parts += [(rows, part)] if counts else []
        result = torch.zeros((*self.batch.mask.shape, numbers))
        for rows, part in self.processes.gather(parts):
            result[torch.tensor(rows), : part.shape[1]] = part
        return result

    def step_batch(self, step: int) -> OfflineBatch:
        """All episodes, those of the step with the weights of their tokens; one that is dealt twice counts twice."""
        times = torch.zeros(len(self.episodes))
        times.index_add_(0, torch.tensor(self.dealt[step]), torch.ones(len(self.dealt[step])))
        tokens, real = self.batch.mask.sum(1).clamp(min=1), times * self.batch.real
        weight, real_weight = times / times.sum() / tokens, real / real.sum().clamp(min=1) / tokens
        return replace(self.batch, weight=weight, real_weight=real_weight)

    def updates(self, step: int) -> Iterator[Update]:
        batch, rows = self.step_batch(step), list(dict.fromkeys(self.dealt[step]))
        if step < self.warmup:
            yield Update("value", self.plan(rows), partial(self._value_loss, batch))
            return
        if self.value is not None and self.base is None:
            value = self.value
            self.base = self._per_episode(lambda one, _: self._raw(value, one)[..., None], value, 1)[..., 0]
        self.ledger.open(self.batch.mask[torch.tensor(rows)])
        places = {row: place for place, row in enumerate(rows)}
        yield Update("policy", self.plan(rows), partial(self._policy_loss, batch, places), self.ledger.saw)
        self.ledger.close()

    def _raw(self, value: Critic, batch: OfflineBatch) -> Tensor:
        return scattered(value.logits(batch.token_ids, batch.mask)[:, 0].float(), batch.mask)

    def _value_loss(self, batch: OfflineBatch, rows: list[int]) -> Iterator[LossTerms]:
        assert self.value is not None
        assert self.losses.value is not None
        micro = batch.take(rows, self.models.policy.device)
        yield self.losses.value(Scores(value=self._raw(self.value, micro)), micro, self.rl)

    def policy_scores(self, batch: OfflineBatch, rows: Sequence[int], trained: nn.Module) -> Scores:
        """What `trained` (the policy, or that and its residual) says of some episodes, `batch` holding these alone."""
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
        ((name, of),) = sums.items()
        columns = {key: number for key, number in of.items() if key not in ("grad_norm", "updates")}
        prefix = "value_" if name == "value" else ""
        told = {f"{prefix}{key}" if key != "value" else key: number for key, number in columns.items()}
        rate = self.learners[name].schedule(self.learners[name].updates - 1)
        return {**told, "stored": float(len(self.dealt[step])), f"{prefix}grad_norm": of["grad_norm"], f"{prefix}lr": rate}

    def finished(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])

    def token_q(self) -> TokenQ | None:
        """Policy and value network together, to rank actions with; None for a method without values."""
        if self.value is None:
            return None
        self.processes.refresh(self.kept, self.trained)
        self.processes.refresh(self.kept_value, self.value)
        scale = Scale(self.settings.alpha, self.settings.gamma, self.settings.r_max)
        value, dueling = self.kept_value, self.kept
        return TokenQ(dueling.policy, value.backbone, value.output, dueling.residual, scale)

    def report(self) -> dict[str, Any]:
        """What was learnt from, and, of a method with values, how R~ orders the SFT policy's own episodes."""
        used = {kind: sum(episode.kind == kind for episode in self.episodes) for kind in KINDS}
        told: dict[str, Any] = {"environment_steps": 0, "stored": {kind: len(self.stored[kind]) for kind in KINDS}, "used": used}
        return {**told, **self.ledger.metrics(), **({"recovered": self.recovered()} if self.value is not None else {})}

    def recovered(self) -> dict[str, Any]:
        """Mean R~ and mean summed advantage by return (`by_return`), of the SFT policy's own episodes that were learnt from; and
        how often R~, as it is and per token, is larger for the better of two of them at one task, ties counting half."""
        settings = self.settings

        def compute(batch: OfflineBatch, rows: Sequence[int]) -> Tensor:
            scores = self.policy_scores(batch, rows, self.trained)
            value = bounded(required(scores.value) + required(scores.residual), settings.r_max)
            advantage = advantages(required(scores.logprobs), required(scores.best), settings.alpha)
            reward = recovered(advantage, value, next_token_values(value, batch.mask), settings.gamma)
            return torch.stack([reward * batch.mask, advantage * batch.mask], -1)

        sums = self._per_episode(compute, self.trained, 2).sum(1)
        own = [row for row, episode in enumerate(self.episodes) if episode.kind == "own"]
        total, returns = sums[:, 0].tolist(), self.batch.returns.tolist()
        tokens = self.batch.mask.sum(1).tolist()
        by_return: dict[str, dict[str, float]] = {}
        for value in sorted({round(returns[row], 6) for row in own}):
            rows = torch.tensor([row for row in own if round(returns[row], 6) == value])
            reward, advantage = sums[rows].mean(0).tolist()
            by_return[f"{value:g}"] = {"reward": reward, "advantage": advantage, "episodes": len(rows)}
        groups: dict[str, list[int]] = {}
        for row in own:
            groups.setdefault(self.episodes[row].task_id, []).append(row)
        per_token = [reward / count for reward, count in zip(total, tokens, strict=True)]
        pairs, (plain, scaled) = 0, (0.0, 0.0)
        for rows_of_task in groups.values():
            better = [(a, b) for a in rows_of_task for b in rows_of_task if returns[a] > returns[b] + 1e-6]
            pairs += len(better)
            plain += sum(ordered(total[a], total[b]) for a, b in better)
            scaled += sum(ordered(per_token[a], per_token[b]) for a, b in better)
        right = {"accuracy": plain / pairs, "accuracy_per_token": scaled / pairs} if pairs else {}
        return {"by_return": by_return, "pairs": pairs, **right}


def ordered(better: float, worse: float) -> float:
    """1 if the better one scores higher, half if both score the same."""
    return 0.5 if better == worse else float(better > worse)
