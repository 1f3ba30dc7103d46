"""Learning from recorded episodes as a job of the training loop: nothing is played; a step is some updates of the critic of
utterances and of the policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.policy import Policy
from stages.algorithms.algorithm import Algorithm
from stages.engine.torch_engine import TorchEngine
from stages.records.episode import read_tasks
from stages.records.sections import seed_of
from stages.training.ledger import Ledger
from stages.training.loop import Sums, Update
from stages.training.processes import Processes
from stages.training.rl.models import Models, make_learners
from stages.training.rl.off_policy import OffPolicy
from stages.training.rl.policy_updates import PolicyUpdates, policy_row
from stages.training.rl.replay import Replay, read_records

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


class RecordedJob:
    """See stages.training.loop.Job."""

    def __init__(self, context: StageContext, algorithm: Algorithm, policy: Policy, processes: Processes) -> None:
        assert context.domain is not None
        params, rl = context.params, algorithm.rl
        self.context, self.algorithm, self.rl = context, algorithm, rl
        max_length, width = params.model.max_length, params.resources.slots
        chat, seed = Chat(policy.tokenizer, params.model.thinking), seed_of(params, rl)
        tasks = {task.task_id for task in read_tasks(context.data / "curated" / context.domain / "tasks.parquet", "train")}
        self.records = read_records(context.data, context.domain, rl.replay.records, tasks, chat, max_length)
        replay = Replay([episode for kind in self.records.values() for episode in kind], 1)
        annotated = context.data / "annotated" / context.domain
        self.models = Models.make(algorithm, policy.model, annotated, processes, params.resources.tokens_per_batch, seed)
        self.learners = make_learners(self.models, rl)
        self.ledger = Ledger()
        self.maker = PolicyUpdates(self.models, algorithm, self.ledger, rl.loss.constant_length or max_length)
        engine = None
        if rl.replay.value_target == "policy" or rl.replay.actions == "fresh":
            engine = TorchEngine(self.models.player, [chat.end_of_turn], width, max_length)
        parts = (self.models, algorithm, self.maker, replay, engine, chat, width, max_length)
        self.off_policy = OffPolicy(*parts, seed, f"rl@{context.domain}")

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

    def finished(self) -> bool:
        return False

    def state_dict(self) -> dict[str, Any]:
        own = {"algorithm": self.algorithm.state} if self.algorithm.state is not None else {}
        return {"ledger": self.ledger.state_dict(), "off_policy": self.off_policy.state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_state_dict(state["ledger"])
        self.off_policy.load_state_dict(state["off_policy"])
        if self.algorithm.state is not None:
            self.algorithm.load_state(state["algorithm"])
