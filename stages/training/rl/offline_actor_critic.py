"""The job of offline actor-critic methods: each step updates the turn critic and the policy from the offline dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stages.agent.constrained_engine import constrained
from stages.agent.policy import Policy
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.parts.critic import check_returns
from stages.engine.engine import Engine
from stages.engine.local_engine import make_engine
from stages.environments.protocol import Domain
from stages.environments.registry import returns_of
from stages.records.episode import read_tasks
from stages.training.common.loop import Sums, Update
from stages.training.common.processes import Processes
from stages.training.rl.job import History, RlJob
from stages.training.rl.models import Models, make_learners
from stages.training.rl.off_policy import OffPolicy
from stages.training.rl.offline_dataset import read_offline_dataset
from stages.training.rl.policy_updates import PolicyUpdates, policy_row
from stages.training.rl.replay_buffer import ReplayBuffer

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


class OfflineActorCriticJob(RlJob):
    """See `RlJob`."""

    def __init__(self, context: StageContext, algorithm: Algorithm, policy: Policy, processes: Processes, domain: Domain) -> None:
        super().__init__(context, algorithm, policy, processes, domain)
        rl, width = self.rl, context.params.resources.slots
        check_returns(rl, *returns_of(domain))
        tasks = {task.task_id for task in read_tasks(self.curated / "tasks.parquet", "train")}
        self.dataset = read_offline_dataset(
            *(context.data, str(context.domain), rl.replay.records, tasks, self.chat, self.max_length)
        )
        buffer = ReplayBuffer([episode for episodes in self.dataset.values() for episode in episodes], 1)
        self.models = Models.make(algorithm, policy.model, self.annotated, processes, self.tokens_per_batch, self.seed)
        self.learners = make_learners(self.models, rl)
        policy_updates = PolicyUpdates(self.models, algorithm, self.ledger)
        engine: Engine | None = None
        if rl.replay.value_target == "policy" or rl.replay.actions == "fresh":
            engine = make_engine(self.models.player, [self.chat.end_of_turn], width, self.max_length)
            engine = constrained(engine, self.chat, domain, "rl", self.max_length)
        parts = (self.models, algorithm, policy_updates, buffer, engine, self.chat, width, self.max_length)
        self.off_policy = OffPolicy(*parts, self.seed, f"rl@{context.domain}")

    def updates(self, step: int) -> Iterator[Update]:
        yield from self.off_policy.updates(step)

    def finish(self, step: int, sums: Mapping[str, Sums]) -> dict[str, float]:
        for name, value in self.ledger.metrics().items():
            self.context.metric(name, value, step + 1)
        row = policy_row(sums)
        batch = self.off_policy.batch
        if "policy" in sums and batch is not None:
            row["kl"] = self.models.reference_kl(batch, self.rl.sampling.temperature)
            row |= dict(sorted(batch.metrics.items()))
        policy = self.learners["policy"]
        return {**row, "lr": policy.schedule(max(0, policy.updates - 1))}

    def report(self, history: History) -> dict[str, Any]:
        return {
            "environment_steps": 0,
            "records": {source: len(episodes) for source, episodes in self.dataset.items()},
            "replayed_turns": self.off_policy.buffer.turns,
            "td_error_first": history[0]["td_error"],
            "td_error_last": history[-1]["td_error"],
            "kl_last": history[-1]["kl"],
            **self.ledger.metrics(),
        }

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "off_policy": self.off_policy.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.off_policy.load_state_dict(state["off_policy"])
