"""The job of on-policy methods, and of off-policy ones that play: draw tasks, play them in groups, credit the tokens, update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stages.agent.active_episode import EpisodeRequest
from stages.agent.constrained_engine import constrained
from stages.agent.environment_pool import EnvironmentPool, processes_beside
from stages.agent.policy import Policy
from stages.agent.rollout import Labels, attempts
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.batch import TrajectoryBatch
from stages.algorithms.parts.advantage import GreedyReturns
from stages.algorithms.parts.critic import check_returns
from stages.algorithms.parts.group_resampling import dead_groups, dead_rows
from stages.algorithms.sources.static import StaticTasks
from stages.algorithms.task_source import source_class
from stages.annotation.correct_paths import correct_episodes
from stages.engine.engine import Sampling
from stages.engine.local_engine import make_engine
from stages.environments.protocol import Domain
from stages.environments.registry import returns_of
from stages.records.episode import Episode, conversations, forks_of, read_episodes, read_tasks
from stages.records.sections import params_hash
from stages.records.tools import number_of_calls
from stages.training.common.batches import trajectory_batch
from stages.training.common.loop import Sums, Update
from stages.training.common.processes import Processes
from stages.training.rl.curriculum import make_source
from stages.training.rl.demonstrations import ExternalEpisodes
from stages.training.rl.forks import check_scored, with_plays
from stages.training.rl.imitation import SelfImitation
from stages.training.rl.job import History, RlJob, distinct_endings, entropy_rise, episode_rows, steps_budget, window_means
from stages.training.rl.models import Models, make_learners
from stages.training.rl.off_policy import OffPolicy
from stages.training.rl.offline_dataset import stored_episodes
from stages.training.rl.playing import Player
from stages.training.rl.policy_updates import PolicyUpdates, agreement, check_agreement, policy_row
from stages.training.rl.reannotation import Reannotation
from stages.training.rl.replay_buffer import ReplayBuffer
from stages.training.rl.role_updates import RoleUpdates, policy_sums
from stages.training.rl.scorers import make_scorer, trained_on
from stages.training.rl.self_teacher import SelfTeacher, solutions
from stages.training.rl.team import Team

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext

TREE_PATHS = 4
"""Correct paths of each new tree that self-imitation stores, as many as tree_bc clones."""
RECENT = 5
"""The number of last steps that rl.stop_at_success averages over."""


class OnlineJob(RlJob):
    """See `RlJob`; a step plays one batch of episodes."""

    def __init__(self, context: StageContext, algorithm: Algorithm, policy: Policy, processes: Processes, domain: Domain) -> None:
        super().__init__(context, algorithm, policy, processes, domain)
        check_returns(self.rl, *returns_of(domain))
        self.width, self.max_turns = context.params.resources.slots, domain.settings.max_turns
        make = partial(source_class(self.rl.tasks.source).make, domain, self.curated / "worlds")
        self.pool = EnvironmentPool(make, processes_beside(context.params.resources))
        self.tasks = trained_on(context, self.rl, domain, read_tasks(self.curated / "tasks.parquet", "train"), self.seed)
        given = (self.tasks, self.pool, self.chat, processes, self.play_for_source, (self.seed, f"rl@{context.domain}"))
        self.source = make_source(context, self.rl, domain, *given, policy.hash)
        self.demonstrations: ExternalEpisodes | None = None
        if algorithm.external_per_group:
            demonstrations = read_episodes(self.curated / "demonstrations.parquet")
            self.demonstrations = ExternalEpisodes(demonstrations, self.tasks, self.chat, self.rl.external, self.max_length)
        self.models = Models.make(algorithm, policy.model, self.annotated, processes, self.tokens_per_batch, self.seed)
        self.team = Team(self.models, algorithm) if self.rl.advantage.estimator == "team" else None
        self.learners = {**make_learners(self.models, self.rl), **(self.team.learners() if self.team else {})}
        whose = {"first": not self.source.roles, "recorded": self.source.recorded}
        self.policy_updates = PolicyUpdates(self.models, algorithm, self.ledger, self.team, **whose)
        engine = make_engine(self.models.player, [self.chat.end_of_turn], self.width, self.max_length)
        self.engine = constrained(engine, self.chat, domain, "rl", self.max_length)
        self.role_updates = RoleUpdates(self.models, algorithm, self.ledger, self.source.roles, self.source.combined)
        self.labels = Labels(self.seed, policy.hash, params_hash(self.rl), stream=f"rl@{context.domain}")
        playing = (*(self.models, self.engine, self.chat, self.pool, self.labels), self.width, self.max_length)
        self.player = Player(*playing) if self.team is None else self.team.player(*playing)
        self.plan = algorithm.plan(policy.model.config.vocab_size)
        self.off_policy: OffPolicy | None = None
        if algorithm.needs_turn_critic:
            stored = stored_episodes(context, self.rl.replay, self.tasks, self.chat, self.max_length)
            models = (self.models, algorithm, self.policy_updates, ReplayBuffer(stored, self.rl.replay.capacity), self.engine)
            self.off_policy = OffPolicy(*models, self.chat, self.width, self.max_length, self.seed, self.labels.stream)
        imitation, temperature, evidence = self.rl.imitation, self.rl.sampling.temperature, self.rl.loss.trains_evidence
        self.imitation = SelfImitation(self.models, imitation, temperature, evidence) if imitation.ratio else None
        self.teacher: SelfTeacher | None = None
        if algorithm.needs_teacher:
            known = solutions(self.rl.settings.source, self.curated, self.annotated, str(context.domain))
            self.teacher = SelfTeacher(self.models, self.chat, self.rl.settings, known, self.max_length, evidence)
        self.reannotation: Reannotation | None = None
        if self.rl.reannotate.every:
            parts = (self.models, self.engine, self.chat, self.pool)
            self.reannotation = Reannotation(context, self.rl.reannotate, policy, *parts, self.seed, self.labels.stream)
        self.scorer = make_scorer(context, algorithm, domain, self.tasks, processes, self.seed, self.chat)
        self.tree_metrics: dict[str, float] = {}
        """Of the trees that the step began with, if it did."""
        self.budget = steps_budget(self.rl, self.annotated)
        self.logprob_mismatch: dict[str, float] = {}
        """Maxima so far of what `agreement` measures."""
        self.played: list[Episode] = []
        """The step's own episodes, the first rows of its batch."""
        self.external: list[Episode] = []
        """Demonstrations in the step's groups or what a team's other members wrote, then the plays' forks: the last rows."""
        self.greedy: list[Episode] = []
        """Greedy episodes of the step's tasks, if they are the baseline."""
        self.beside: list[Episode] = []
        """Episodes that the source of tasks has played in this step."""
        self.metrics: dict[str, float] = {}
        """Metrics of the step's batch, for the history."""
        self.environment_steps = 0
        """Turns played so far; turns that branches share count once."""
        self.recent: list[float] = []
        """Success rates of the last RECENT steps."""

    @property
    def curated_tasks(self) -> StaticTasks:
        """The source, where parts need estimates of curated tasks."""
        assert isinstance(self.source, StaticTasks)
        return self.source

    def updates(self, step: int) -> Iterator[Update]:
        started = time.monotonic()
        self.reannotate(step)
        batch = self.gather(step)
        self.observe(step)
        collected = time.monotonic()
        prepared = self.prepare(batch, step)
        self.last = (step + 1, self.played, prepared)
        key = (self.labels.seed, self.labels.stream, step)
        self.role_updates.prepare(self.source, step, key)
        if step in (0, self.rl.steps - 1) or self.finished():
            self.keep_samples(prepared, step)
        if self.off_policy is None:
            prepared = self.policy_updates.rescored(prepared, step, key)

            def main(on_policy: bool) -> Iterator[Update]:
                updates = self.policy_updates.updates(prepared, step, key, on_policy)
                return updates if self.imitation is None else self._with_imitation(self.imitation, updates, step, key)

            yield from self.role_updates.in_order(main, self.source, step, key)
        else:
            self.off_policy.buffer.add(self.played)
            self.metrics["replayed_turns"] = float(self.off_policy.buffer.turns)
            yield from self.off_policy.updates(step, batch)
        self.context.metric("time/rollout_s", collected - started, step + 1)
        self.context.metric("time/training_s", time.monotonic() - collected, step + 1)

    def _with_imitation(
        self, imitation: SelfImitation, updates: Iterator[Update], step: int, key: Sequence[object]
    ) -> Iterator[Update]:
        imitation.add(self.played, self.curated_tasks.outcome)
        if not self.policy_updates.policy_learns(step):
            yield from updates
            return
        count = max(1, round(self.rl.imitation.ratio * len(self.played) / (self.rl.epochs * self.rl.minibatches)))

        def better_by(episode: Episode) -> float:
            return self.curated_tasks.outcome(episode) - self.curated_tasks.sampler.success[episode.task_id]

        yield from imitation.join(updates, count, better_by, *key)
        self.metrics |= imitation.metrics

    def reannotate(self, step: int) -> None:
        """Grow new trees, if the step begins with some. Self-imitation stores their correct paths."""
        self.tree_metrics = {}
        if self.reannotation is None or not self.reannotation.due(step):
            return
        sampler = self.curated_tasks.sampler
        tasks = [self.tasks[task_id] for task_id in sampler.task_ids]
        rows, self.tree_metrics = self.reannotation.grow(tasks, sampler.success, step)
        self.environment_steps += int(self.tree_metrics["tree_steps"])
        if self.imitation is not None:
            self.imitation.add(correct_episodes(rows, TREE_PATHS, str(self.context.domain)), self.curated_tasks.outcome)

    def gather(self, step: int) -> TrajectoryBatch:
        """Play the step's tasks, and further ones while the algorithm lacks groups; returns their episodes and the demonstrations
        that join them as a batch with shaped rewards."""
        key: tuple[object, ...] = (self.labels.seed, self.labels.stream, step)
        self.beside = []
        self.source.begin(step)
        drawn = self.draw(*key)
        self.played, self.greedy = self.play(drawn, step), self.play_greedy(drawn, step)
        batch = self.shaped(drawn, step)
        rounds = 0
        for number in range(self.rl.group_resampling.rounds):
            further = self.draw(*key, number + 1, count=self.algorithm.missing_groups(batch), without=drawn)
            if not further:
                break
            rounds = number + 1
            drawn += further
            self.played += self.play(further, step)
            self.greedy += self.play_greedy(further, step)
            batch = self.shaped(drawn, step)
        if self.rl.advantage.mean == "greedy":
            shaped = self.algorithm.shape(trajectory_batch(self.greedy)).rewards.tolist()
            returns = {episode.task_id: value for episode, value in zip(self.greedy, shaped, strict=True)}
            batch = batch.with_extra(GreedyReturns(torch.tensor([returns[task_id] for task_id in batch.task_ids])))
        everything = conversations((*self.played, *self.greedy, *self.beside))
        self.environment_steps += sum(len(episode.played) for episode in everything)
        if self.rl.group_resampling.kind == "resample":
            batch = batch.with_metrics(resampling_rounds=float(rounds))
        return self.algorithm.resample(batch, *key)

    def draw(self, *key: object, count: int | None = None, without: Sequence[str] = ()) -> list[str]:
        """The ids of the source's next tasks, which are in `tasks` from then on."""
        found = self.source.draw(*key, count=count, without=without)
        self.tasks |= {task.task_id: task for task in found}
        return [task.task_id for task in found]

    def shaped(self, drawn: Sequence[str], step: int) -> TrajectoryBatch:
        """The played episodes and the demonstrations of the drawn tasks, as a batch with shaped rewards."""
        self.external = []
        if self.demonstrations is not None:
            key = (self.labels.seed, self.labels.stream, step)
            self.external = [episode for task_id in drawn for episode in self.demonstrations.draw(task_id, *key)]
        if self.team is not None:
            self.external = self.team.rows(self.played)
        self.external += forks_of(self.played)
        episodes = [*self.played, *self.external]
        batch = with_plays(trajectory_batch(episodes, self.rl.loss.trains_evidence), episodes)
        batch = batch if self.team is None else self.team.with_moves(batch, episodes)
        if self.scorer is not None:
            check_scored(self.played)
            batch = batch.with_extra(self.scorer.score(episodes, self.greedy, step))
        batch, demonstrated = self.algorithm.shape(batch), float(len(self.external) - len(forks_of(self.played)))
        return batch if self.demonstrations is None else batch.with_metrics(external_episodes=demonstrated)

    def play_greedy(self, task_ids: Sequence[str], step: int) -> list[Episode]:
        """A greedy episode of each task, if the algorithm needs them."""
        return self.play(task_ids, step, greedy=True) if self.algorithm.needs_greedy else []

    def play(self, task_ids: Sequence[str], step: int, greedy: bool = False) -> list[Episode]:
        """Play `group_size` episodes of each task, less the demonstrations that join its group, or one greedy episode, with the
        current weights, or take those that the source has. The processes share the tasks; each returns all episodes, sorted by
        id."""
        if self.source.recorded:
            return self.source.episodes(task_ids)
        size = 1 if greedy else self.rl.group_size
        requests = []
        for task_id in task_ids:
            external = 0 if greedy or self.demonstrations is None else self.demonstrations.count(task_id)
            requests += attempts([self.tasks[task_id]], size - external, step * size, self.source.main_role)
        sampling = Sampling(**{**self.rl.sampling.model_dump(), **({"temperature": 0.0} if greedy else {})}, kept=True)
        max_turns = self.algorithm.turn_limit(step, self.max_turns)
        return self.player.play(requests, sampling, max_turns, None if greedy else self.plan)

    def play_for_source(self, requests: Sequence[EpisodeRequest], sampling: Sampling | None = None) -> list[Episode]:
        """See `SourceInputs.play`."""
        given = Sampling(**self.rl.sampling.model_dump()) if sampling is None else sampling
        episodes = self.player.play(requests, replace(given, kept=True))
        self.beside += episodes
        return episodes

    def observe(self, step: int) -> None:
        """Tell the source how its tasks ended."""
        self.source.observe(step, self.played)
        success = sum(episode.success for episode in self.played) / len(self.played)
        self.recent = [*self.recent, success][-RECENT:]

    def prepare(self, batch: TrajectoryBatch, step: int) -> TrajectoryBatch:
        """The batch with all that the update needs: reference log-probs, values, advantages, step credit."""
        batch = self.models.annotate(batch, self.algorithm)
        if self.teacher is not None:
            batch = self.teacher.annotate(batch, self.played, self.rl.sampling.temperature)
        kl = self.models.reference_kl(batch, self.rl.sampling.temperature)
        groups = len({episode.group_id for episode in self.played})
        own = batch if self.team is None else batch.rows(torch.arange(len(self.played)))
        batch = batch.with_metrics(groups=float(groups), dead_groups=float(dead_groups(own)), kl=kl)
        dead = dead_rows(own.rewards, own.group).tolist()[: len(self.played)]
        dead_steps = float(sum(len(episode.played) for episode, is_dead in zip(self.played, dead, strict=True) if is_dead))
        self.context.metric("dead_groups/share", batch.metrics["dead_groups"] / groups, step + 1)
        self.context.metric("dead_groups/environment_steps", dead_steps, step + 1)
        if self.rl.group_resampling.kind != "none":
            batch = batch.with_metrics(dead_steps=dead_steps)
        limit = self.algorithm.turn_limit(step, self.max_turns)
        batch = self.algorithm.prepare(batch if limit is None else batch.with_metrics(turn_limit=float(limit)))
        scores = {} if self.scorer is None else self.scorer.observe(self.played)
        self.metrics = {**batch.metrics, **self.tree_metrics, **scores}
        return batch

    def keep_samples(self, batch: TrajectoryBatch, step: int) -> None:
        """Keep the step's episodes with their advantages, for the report; then those that the source played."""
        alone = self.team is None and not forks_of(self.played)
        kept = [(self.played if alone else [*self.played, *self.external], batch)]
        kept += [(list(self.role_updates.episodes[role]), own) for role, own in self.role_updates.batches.items()]
        self.samples += [row for one in kept for row in episode_rows(step + 1, *one)]
        credited = {id(episode) for episodes, _ in kept for episode in episodes}
        others = episode_rows(step + 1, [episode for episode in self.beside if id(episode) not in credited], None)
        self.samples += [{**row, "advantages": [0.0] * len(row["token_ids"])} for row in others]

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        count, everything = len(self.played), conversations((*self.played, *self.greedy, *self.beside))
        policy = policy_sums(sums)
        mismatch = agreement(policy)
        check_agreement(mismatch, self.context.params.resources.precision, step, policy.get("max_logprob_size", 0.0))
        self.logprob_mismatch = {name: max(self.logprob_mismatch.get(name, 0.0), value) for name, value in mismatch.items()}
        for name, value in {**self.ledger.metrics(), **{f"ledger/{name}": value for name, value in mismatch.items()}}.items():
            self.context.metric(name, value, step + 1)
        return {
            "reward_mean": sum(episode.reward for episode in self.played) / count,
            "success": sum(episode.success for episode in self.played) / count,
            "dead_groups": self.metrics.pop("dead_groups"),
            "turns": sum(len(episode.turns) for episode in self.played) / count,
            "tokens": sum(len(episode.token_ids) for episode in self.played) / count,
            "policy_tokens": sum(episode.policy_tokens for episode in self.played) / count,
            "truncated": sum(episode.truncated for episode in self.played) / count,
            "kl": self.metrics.pop("kl"),
            "episodes": float(count + len(self.greedy) + len(self.beside)),
            "environment_steps": self.tree_metrics.get("tree_steps", 0.0) + sum(len(episode.played) for episode in everything),
            "tool_calls": sum(number_of_calls(turn) for episode in everything for turn in episode.played),
            "branches": sum(bool(episode.parent) for episode in self.played) / count,
            "endings": distinct_endings(self.played),
            "entropy_rise": entropy_rise(self.played),
            "lr": self.learners["policy"].schedule(max(0, self.learners["policy"].updates - 1)),
            **policy_row(sums),
            **dict(sorted(self.metrics.items())),
            **self.role_updates.row(sums),
            **(self.team.row(self.played, self.last[2], sums) if self.team else {}),
            **self.source.metrics(),
        }

    def finished(self) -> bool:
        if self.scorer is not None and self.scorer.stops:
            return True
        budget, target = self.budget, self.rl.stop_at_success
        if budget is not None and self.environment_steps >= budget:
            return True
        return target is not None and len(self.recent) == RECENT and sum(self.recent) / RECENT >= target

    def report(self, history: History) -> dict[str, Any]:
        budget = self.budget
        return {
            "credit": self.rl.credit.kind,
            "episodes": int(sum(row["episodes"] for row in history)),
            **({} if budget is None else {"budget": budget}),
            "environment_steps": int(sum(row["environment_steps"] for row in history)),
            **window_means(history, "success"),
            "kl_last": history[-1]["kl"],
            "dead_groups": sum(row["dead_groups"] for row in history) / sum(row["groups"] for row in history),
            **self.logprob_mismatch,
            **self.ledger.metrics(),
            **(self.scorer.report() if self.scorer else {}),
            **self.source.report(),
            **(self.team.report() if self.team else {}),
        }

    def save_values(self, folder: Path) -> None:
        self.source.save(folder)
        if self.team is not None:
            self.team.save(folder, str(self.context.domain), self.chat.tokenizer)

    def save_tables(self, folder: Path) -> None:
        if self.scorer is not None:
            self.scorer.save(folder)

    def close(self) -> None:
        self.pool.close()
        if self.scorer is not None:
            self.scorer.close()

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "source": self.source.state_dict(),
            "samples": self.samples,
            "logprob_mismatch": self.logprob_mismatch,
            "environment_steps": self.environment_steps,
            "recent": self.recent,
            **({"off_policy": self.off_policy.state_dict()} if self.off_policy else {}),
            **({"imitation": self.imitation.state_dict()} if self.imitation else {}),
            **({"scorer": self.scorer.state_dict()} if self.scorer else {}),
            **({"reannotation": self.reannotation.state_dict()} if self.reannotation else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.source.load_state_dict(state["source"])
        self.samples, self.logprob_mismatch = state["samples"], state["logprob_mismatch"]
        self.environment_steps, self.recent = state["environment_steps"], state["recent"]
        if self.off_policy:
            self.off_policy.load_state_dict(state["off_policy"])
        if self.imitation:
            self.imitation.load_state_dict(state["imitation"])
        if self.scorer:
            self.scorer.load_state_dict(state["scorer"])
        if self.reannotation:
            self.reannotation.load_state_dict(state["reannotation"])
