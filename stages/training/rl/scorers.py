"""What scores episodes by their text while rl trains: a judge, a verifier, or references (`rl.reward.kind`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stages.agent.chat import Chat
from stages.algorithms.algorithm import Algorithm
from stages.algorithms.settings import Rl
from stages.environments.protocol import Domain
from stages.records.task import Task
from stages.runtime.lineage import dvc_hash
from stages.training.common.processes import Processes
from stages.training.rl.judging import EpisodeJudge
from stages.training.rl.reference_rewards import Chains, ReferenceRewards
from stages.training.rl.scoring import EpisodeScorer, ReferenceTexts
from stages.training.rl.verified_rewards import VerifiedRewards, kept_for_fitting

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


def trained_on(context: StageContext, rl: Rl, domain: Domain, tasks: Sequence[Task], seed: int) -> dict[str, Task]:
    """The curated training tasks that rl may draw, by id: all, but those that are left to fitting a verifier, and those whose
    references do not meet their own demands."""
    if rl.reward.kind == "references":
        tasks = Chains(domain, ReferenceTexts(context, domain), rl.references).well_made(tasks)
    kept = kept_for_fitting([task.task_id for task in tasks], rl.verifier.fit_share, seed)
    return {task.task_id: task for task in tasks if task.task_id not in kept}


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


def named_files(rl: Rl, root: Path) -> dict[str, str]:
    """Hashes of the models and labels that scorers read and no stage has made, by path: a checkpoint belongs to them, too. Those
    that do not exist are left out; who opens them says so."""
    named = []
    if rl.reward.kind == "judge":
        named += [
            rl.judge.local.path if rl.judge.kind == "local" else "",
            rl.judge.labelled_pairs.path if rl.judge.labelled_pairs else "",
        ]
    if rl.reward.kind == "verifier":
        named.append(rl.verifier.path)
    return {f"named:{path}": dvc_hash(root / path) for path in named if path and (root / path).exists()}
