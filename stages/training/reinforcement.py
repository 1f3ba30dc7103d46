"""Reinforcement learning as a job of the training loop: draw tasks, play them in groups, credit the tokens, update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.engine import Sampling
from stages.agent.episode import Episode, episode_row, read_json, read_tasks
from stages.agent.policy import Policy
from stages.agent.rollout import EnvironmentPool, Labels, attempts, collect
from stages.agent.torch_engine import TorchEngine
from stages.algorithms.compose import Algorithm
from stages.algorithms.contract import TrajectoryBatch
from stages.algorithms.filling import dead_groups
from stages.params import params_hash
from stages.training.batches import trajectory_batch
from stages.training.curriculum import TaskSampler
from stages.training.ledger import Ledger
from stages.training.loop import Sums, Update, make_accelerator
from stages.training.models import Models, make_learners
from stages.training.policy_updates import PolicyUpdates, agreement, check_agreement, policy_row

if TYPE_CHECKING:
    from stages.runtime import StageContext


class RlJob:
    """See stages.training.loop.Job; a step is one batch of episodes."""

    def __init__(self, context: StageContext, algorithm: Algorithm, policy: Policy, pool: EnvironmentPool) -> None:
        assert context.domain is not None
        params, rl = context.params, algorithm.rl
        self.context, self.algorithm, self.rl, self.pool = context, algorithm, rl, pool
        self.max_length, self.width = params.model.max_length, params.resources.slots
        self.precision = params.resources.precision
        self.chat = Chat(policy.tokenizer)
        folder = context.data / "curated" / context.domain
        self.tasks = {task.task_id: task for task in read_tasks(folder / "tasks.parquet", "train")}
        measured = read_json(context.data / "rollouts" / context.domain / "difficulty.json")
        self.sampler = TaskSampler(self.tasks, measured, rl.curriculum, rl.tasks_per_step)
        annotated = context.data / "annotated" / context.domain / "value_model" if rl.credit.kind == "annotated" else None
        accelerator = make_accelerator(params.resources)
        self.models = Models.make(algorithm, policy.model, annotated, accelerator, params.resources.tokens_per_batch)
        self.learners = make_learners(self.models, rl, accelerator)
        self.ledger = Ledger()
        self.maker = PolicyUpdates(self.models, algorithm, self.ledger, constant_length=self.max_length)
        self.engine = TorchEngine(policy.model, [self.chat.end_of_turn], self.width, self.max_length)
        seed = params.seed if rl.seed is None else rl.seed
        self.labels = Labels(seed, policy.hash, params_hash(rl), stream=f"rl@{context.domain}")
        self.samples: list[dict[str, Any]] = []
        self.apart: dict[str, float] = {}
        """Largest values so far of what `agreement` measures."""
        self.played: list[Episode] = []
        self.environment_steps = 0
        """Turns of all episodes played so far."""
        self.dead_groups = 0
        self.kl = 0.0

    def updates(self, step: int) -> Iterator[Update]:
        started = time.monotonic()
        drawn = self.sampler.draw(self.labels.seed, self.labels.stream, step)
        self.played = self.play(drawn, step)
        self.observe()
        collected = time.monotonic()
        batch = self.prepare(step)
        if step in (0, self.rl.steps - 1) or self.finished():
            self.keep_samples(batch, step)
        yield from self.maker.updates(batch, step, (self.labels.seed, self.labels.stream, step))
        self.context.metric("time/rollout_s", collected - started, step + 1)
        self.context.metric("time/training_s", time.monotonic() - collected, step + 1)

    def play(self, task_ids: Sequence[str], step: int) -> list[Episode]:
        """`group_size` episodes of each task with the weights as they are now (the engine holds the same module)."""
        requests = attempts([self.tasks[task_id] for task_id in task_ids], self.rl.group_size, first=step * self.rl.group_size)
        sampling = Sampling(**self.rl.sampling.model_dump())
        episodes = collect(
            *(self.engine, self.chat, self.pool, requests, sampling, self.labels), max_length=self.max_length, width=self.width
        )
        self.environment_steps += sum(len(episode.turns) for episode in episodes)
        return episodes

    def observe(self) -> None:
        """Tell the curriculum how the tasks went."""
        outcomes: dict[str, list[bool]] = {}
        for episode in self.played:
            outcomes.setdefault(episode.task_id, []).append(episode.success)
        self.sampler.observe(outcomes)

    def prepare(self, step: int) -> TrajectoryBatch:
        """The episodes as a batch with all that the update needs: reference log-probs, values, advantages, step credit."""
        batch = self.models.annotate(trajectory_batch(self.played), self.algorithm)
        self.dead_groups, self.kl = dead_groups(batch), self.models.reference_kl(batch, self.rl.sampling.temperature)
        return self.algorithm.prepare(batch)

    def keep_samples(self, batch: TrajectoryBatch, step: int) -> None:
        """Keep the step's episodes with their advantages, for the report."""
        assert batch.advantages is not None
        for row, episode in enumerate(self.played):
            advantages = batch.advantages[row, : len(episode.token_ids)].tolist()
            self.samples.append({**episode_row(episode), "step": step + 1, "advantages": advantages})

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        count = len(self.played)
        measured = agreement(sums.get("policy", {}))
        check_agreement(measured, self.precision, step)
        self.apart = {name: max(self.apart.get(name, 0.0), value) for name, value in measured.items()}
        for name, value in {**self.ledger.metrics(), **{f"ledger/{name}": value for name, value in measured.items()}}.items():
            self.context.metric(name, value, step + 1)
        return {
            "reward_mean": sum(episode.reward for episode in self.played) / count,
            "success": sum(episode.success for episode in self.played) / count,
            "dead_groups": float(self.dead_groups),
            "turns": sum(len(episode.turns) for episode in self.played) / count,
            "environment_steps": float(sum(len(episode.turns) for episode in self.played)),
            "tokens": sum(len(episode.token_ids) for episode in self.played) / count,
            "policy_tokens": sum(episode.policy_tokens for episode in self.played) / count,
            "truncated": sum(episode.truncated for episode in self.played) / count,
            "kl": self.kl,
            "lr": self.learners["policy"].schedule(max(0, self.learners["policy"].updates - 1)),
            **policy_row(sums),
        }

    def finished(self) -> bool:
        budget = self.rl.environment_steps
        return budget is not None and self.environment_steps >= budget

    def state_dict(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.state_dict(),
            "success": self.sampler.success,
            "samples": self.samples,
            "apart": self.apart,
            "environment_steps": self.environment_steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self.sampler.success = state["success"]
        self.samples, self.apart = state["samples"], state["apart"]
        self.environment_steps = state["environment_steps"]
