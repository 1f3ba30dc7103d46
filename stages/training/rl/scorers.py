"""What scores episodes by their text while rl trains: a judge, a verifier, or references (`rl.reward.kind`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from stages.agent.chat import Chat
from stages.algorithms.algorithm import Algorithm
from stages.environments.protocol import Domain
from stages.records.task import Task
from stages.training.common.processes import Processes
from stages.training.rl.judging import EpisodeJudge
from stages.training.rl.reference_rewards import ReferenceRewards
from stages.training.rl.scoring import EpisodeScorer
from stages.training.rl.verified_rewards import VerifiedRewards

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


def make_scorer(
    context: StageContext,
    algorithm: Algorithm,
    domain: Domain,
    tasks: Mapping[str, Task],
    processes: Processes,
    seed: int,
    chat: Chat,
) -> EpisodeScorer | None:
    """The scorer that `rl.reward.kind` names; None for rewards that do not depend on text."""
    if algorithm.rl.reward.kind == "judge":
        return EpisodeJudge(context, algorithm, domain, tasks, processes, seed, chat)
    if algorithm.rl.reward.kind == "references":
        return ReferenceRewards(context, algorithm, domain, tasks, seed)
    if algorithm.rl.reward.kind == "verifier":
        return VerifiedRewards(context, algorithm, domain, tasks, str(processes.device), seed)
    return None
