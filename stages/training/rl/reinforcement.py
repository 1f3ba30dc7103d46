"""Reinforcement learning as a job of the training loop: draw tasks, play them in groups, credit the tokens, update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from stages.agent.chat import Chat
from stages.agent.policy import Policy
from stages.agent.rollout import EnvironmentPool, Labels, attempts, collect
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import GreedyReturns
from stages.algorithms.parts.group_resampling import dead_groups
from stages.engine.engine import Sampling
from stages.engine.torch_engine import TorchEngine
from stages.records.episode import Episode, episode_row, read_episodes, read_json, read_tasks
from stages.records.sections import params_hash, seed_of
from stages.training.batches import trajectory_batch
from stages.training.ledger import Ledger
from stages.training.loop import Sums, Update
from stages.training.processes import Processes
from stages.training.rl.curriculum import TaskSampler, first_values, selected
from stages.training.rl.demonstrations import ExternalEpisodes
from stages.training.rl.models import Models, make_learners
from stages.training.rl.off_policy import OffPolicy
from stages.training.rl.policy_updates import PolicyUpdates, agreement, check_agreement, policy_row
from stages.training.rl.replay import Replay, read_records
from stages.values.step_value import StepValueModel

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


RECENT = 5
"""Steps that rl.stop_at_success looks back over."""


def distinct_endings(episodes: Sequence[Episode]) -> float:
    """Different last actions (answers, where the last action is one) per group, on average."""
    groups: dict[str, set[str]] = {}
    for episode in episodes:
        groups.setdefault(episode.group_id, set()).add(episode.turns[-1].action_key if episode.turns else "")
    return sum(len(endings) for endings in groups.values()) / max(len(groups), 1)


class RlJob:
    """See stages.training.loop.Job; a step is one batch of episodes. `max_turns`: the environment's own limit."""

    def __init__(
        self,
        context: StageContext,
        algorithm: Algorithm,
        policy: Policy,
        pool: EnvironmentPool,
        max_turns: int,
        processes: Processes,
    ) -> None:
        assert context.domain is not None
        params, rl = context.params, algorithm.rl
        self.context, self.algorithm, self.rl, self.pool = context, algorithm, rl, pool
        self.max_length, self.width = params.model.max_length, params.resources.slots
        self.max_turns = max_turns
        self.precision = params.resources.precision
        self.chat = Chat(policy.tokenizer, params.model.thinking)
        folder = context.data / "curated" / context.domain
        self.tasks = {task.task_id: task for task in read_tasks(folder / "tasks.parquet", "train")}
        annotated = context.data / "annotated" / context.domain
        measured = read_json(context.data / "rollouts" / context.domain / "difficulty.json")
        shares = selected(self.tasks, measured, rl.selection)
        self.processes = processes
        if rl.curriculum.kind == "value":
            drawable = [self.tasks[task_id] for task_id in sorted(shares)]
            judge = StepValueModel.load(annotated / "value_model", str(processes.device))
            measured = first_values(drawable, pool, self.chat, judge, params.resources.tokens_per_batch, processes)
        self.sampler = TaskSampler(shares, measured, rl.curriculum, rl.tasks_per_step, shares)
        self.demonstrations: ExternalEpisodes | None = None
        if algorithm.external_per_group:
            shown = read_episodes(folder / "demonstrations.parquet")
            self.demonstrations = ExternalEpisodes(shown, self.tasks, self.chat, rl.external, self.max_length)
        seed = seed_of(params, rl)
        self.models = Models.make(algorithm, policy.model, annotated, processes, params.resources.tokens_per_batch, seed)
        self.learners = make_learners(self.models, rl)
        self.ledger = Ledger()
        self.maker = PolicyUpdates(
            self.models, algorithm, self.ledger, constant_length=rl.loss.constant_length or self.max_length
        )
        self.engine = TorchEngine(self.models.player, [self.chat.end_of_turn], self.width, self.max_length)
        self.labels = Labels(seed, policy.hash, params_hash(rl), stream=f"rl@{context.domain}")
        self.plan = algorithm.plan(policy.model.config.vocab_size)
        self.off_policy: OffPolicy | None = None
        if algorithm.needs_turn_critic:
            kinds = rl.replay.records
            recorded = read_records(context.data, context.domain, kinds, self.tasks, self.chat, self.max_length)
            replay = Replay([one for kind in recorded.values() for one in kind], rl.replay.capacity)
            parts = (self.models, algorithm, self.maker, replay, self.engine, self.chat, self.width, self.max_length)
            self.off_policy = OffPolicy(*parts, seed, self.labels.stream)
        self.samples: list[dict[str, Any]] = []
        self.apart: dict[str, float] = {}
        """Largest values so far of what `agreement` measures."""
        self.played: list[Episode] = []
        """The step's episodes of the policy's own, the first rows of its batch."""
        self.external: list[Episode] = []
        """Demonstrations in the step's groups, the last rows of its batch."""
        self.greedy: list[Episode] = []
        """Greedy episodes of the step's tasks, where they are the baseline."""
        self.told: dict[str, float] = {}
        """The step's numbers about its batch, for the history."""
        self.environment_steps = 0
        """Turns played so far; those that branches took over count once."""
        self.recent: list[float] = []
        """Share of successes in each of the last RECENT steps."""

    def updates(self, step: int) -> Iterator[Update]:
        started = time.monotonic()
        batch = self.gather(step)
        self.observe()
        collected = time.monotonic()
        prepared = self.prepare(batch, step)
        if step in (0, self.rl.steps - 1) or self.finished():
            self.keep_samples(prepared, step)
        if self.off_policy is None:
            key = (self.labels.seed, self.labels.stream, step)
            yield from self.maker.updates(self.maker.rescored(prepared, step, key), step, key)
        else:
            self.off_policy.replay.add(self.played)
            self.told["replayed_turns"] = float(self.off_policy.replay.turns)
            yield from self.off_policy.updates(step, batch)
        self.context.metric("time/rollout_s", collected - started, step + 1)
        self.context.metric("time/training_s", time.monotonic() - collected, step + 1)

    def gather(self, step: int) -> TrajectoryBatch:
        """Play the step's tasks, and further ones as long as the algorithm lacks groups; their episodes, with the demonstrations
        that join them, as a batch with shaped rewards."""
        key: tuple[object, ...] = (self.labels.seed, self.labels.stream, step)
        drawn = self.sampler.draw(*key)
        self.played = self.play(drawn, step)
        batch = self.shaped(drawn, step)
        for number in range(self.rl.group_resampling.rounds):
            further = self.sampler.draw(*key, number + 1, count=self.algorithm.missing_groups(batch), without=drawn)
            if not further:
                break
            drawn += further
            self.played += self.play(further, step)
            batch = self.shaped(drawn, step)
        self.greedy = []
        if self.algorithm.needs_greedy:
            self.greedy = self.play(drawn, step, greedy=True)
            shaped = self.algorithm.shape(trajectory_batch(self.greedy)).rewards.tolist()
            returns = {episode.task_id: value for episode, value in zip(self.greedy, shaped, strict=True)}
            batch = batch.with_extra(GreedyReturns(torch.tensor([returns[task_id] for task_id in batch.task_ids])))
        self.environment_steps += sum(len(episode.played) for episode in (*self.played, *self.greedy))
        return self.algorithm.resample(batch, *key)

    def shaped(self, drawn: Sequence[str], step: int) -> TrajectoryBatch:
        """What was played, and the demonstrations that the tasks drawn have, as a batch with shaped rewards."""
        self.external = []
        if self.demonstrations is not None:
            key = (self.labels.seed, self.labels.stream, step)
            self.external = [episode for task_id in drawn for episode in self.demonstrations.draw(task_id, *key)]
        batch = self.algorithm.shape(trajectory_batch([*self.played, *self.external]))
        return batch.with_metrics(external_episodes=float(len(self.external))) if self.demonstrations is not None else batch

    def play(self, task_ids: Sequence[str], step: int, greedy: bool = False) -> list[Episode]:
        """`group_size` episodes of each task, less the demonstrations that join its group, or one greedy one, with the weights
        as they are now (the engine holds the same module). The processes share the tasks; all get all episodes, sorted by id."""
        self.models.refresh_player()
        size = 1 if greedy else self.rl.group_size
        requests = []
        for task_id in task_ids[self.processes.index :: self.processes.count]:
            shown = 0 if greedy or self.demonstrations is None else self.demonstrations.count(task_id)
            requests += attempts([self.tasks[task_id]], size - shown, first=step * size)
        sampling = Sampling(**{**self.rl.sampling.model_dump(), **({"temperature": 0.0} if greedy else {})})
        episodes = collect(
            *(self.engine, self.chat, self.pool, requests, sampling, self.labels),
            max_length=self.max_length,
            max_turns=self.algorithm.turn_limit(step, self.max_turns),
            width=self.width,
            plan=None if greedy else self.plan,
        )
        return sorted(self.processes.gather(episodes), key=lambda episode: episode.episode_id)

    def observe(self) -> None:
        """Tell the curriculum how the tasks went."""
        outcomes: dict[str, list[float]] = {}
        of_returns = self.rl.curriculum.kind == "value"  # as the step-value model's word on a task's first observation is
        for episode in self.played:
            outcomes.setdefault(episode.task_id, []).append(episode.reward if of_returns else episode.success)
        self.sampler.observe(outcomes)
        share = sum(episode.success for episode in self.played) / len(self.played)
        self.recent = [*self.recent, share][-RECENT:]

    def prepare(self, batch: TrajectoryBatch, step: int) -> TrajectoryBatch:
        """The batch with all that the update needs: reference log-probs, values, advantages, step credit."""
        batch = self.models.annotate(batch, self.algorithm)
        kl = self.models.reference_kl(batch, self.rl.sampling.temperature)
        groups = len({episode.group_id for episode in self.played})
        batch = batch.with_metrics(groups=float(groups), dead_groups=float(dead_groups(batch)), kl=kl)
        limit = self.algorithm.turn_limit(step, self.max_turns)
        batch = self.algorithm.prepare(batch if limit is None else batch.with_metrics(turn_limit=float(limit)))
        self.told = dict(batch.metrics)
        return batch

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
            "dead_groups": self.told.pop("dead_groups"),
            "turns": sum(len(episode.turns) for episode in self.played) / count,
            "tokens": sum(len(episode.token_ids) for episode in self.played) / count,
            "policy_tokens": sum(episode.policy_tokens for episode in self.played) / count,
            "truncated": sum(episode.truncated for episode in self.played) / count,
            "kl": self.told.pop("kl"),
            "episodes": float(count + len(self.greedy)),
            "environment_steps": float(sum(len(episode.played) for episode in (*self.played, *self.greedy))),
            "tool_calls": sum(turn.cost for episode in (*self.played, *self.greedy) for turn in episode.played),
            "branches": sum(bool(episode.parent) for episode in self.played) / count,
            "endings": distinct_endings(self.played),
            "lr": self.learners["policy"].schedule(max(0, self.learners["policy"].updates - 1)),
            **policy_row(sums),
            **dict(sorted(self.told.items())),
        }

    def finished(self) -> bool:
        budget, target = self.rl.environment_steps, self.rl.stop_at_success
        if budget is not None and self.environment_steps >= budget:
            return True
        return target is not None and len(self.recent) == RECENT and sum(self.recent) / RECENT >= target

    def state_dict(self) -> dict[str, Any]:
        return {
            "ledger": self.ledger.state_dict(),
            "success": self.sampler.success,
            "samples": self.samples,
            "apart": self.apart,
            "environment_steps": self.environment_steps,
            "recent": self.recent,
            **({"algorithm": self.algorithm.state} if self.algorithm.state is not None else {}),
            **({"off_policy": self.off_policy.state_dict()} if self.off_policy else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self.sampler.success = state["success"]
        self.samples, self.apart = state["samples"], state["apart"]
        self.environment_steps, self.recent = state["environment_steps"], state["recent"]
        if self.algorithm.state is not None:
            self.algorithm.load_state(state["algorithm"])
        if self.off_policy:
            self.off_policy.load_state_dict(state["off_policy"])
