"""What the curated tasks of a run are weighted by: selection, and the step-value model's predictions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.algorithms.parts.selection import Selection
from stages.algorithms.settings import Rl
from stages.algorithms.task_source import Play, SourceInputs, TaskSource, source_class
from stages.curation.model_aware import shares
from stages.environments.protocol import Domain, allow_conversations
from stages.records.episode import read_json
from stages.records.task import Task, opening
from stages.training.common.batches import padded, plan_micro_batches
from stages.training.common.processes import Processes
from stages.values.step_value import StepValueModel

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


def selected(task_ids: Iterable[str], measured: Mapping[str, float], params: Selection) -> dict[str, float]:
    """The tasks that may be drawn, with a factor on their weights: all with 1, or those that `shares` selects.

    Raises ValueError if none is selected.
    """
    names = sorted(task_ids)
    if params.kind == "all":
        return dict.fromkeys(names, 1.0)
    known = {name: measured[name] for name in names if name in measured}
    found = shares(known, params.easy_min, params.hard_max, params.target.model_dump())
    if not found:
        raise ValueError(
            f"rl.selection.kind: model_aware selects none of the {len(known)} tasks that rollout measured: the policy always or "
            f"never solves them, or rl.selection.target is 0 for the rest; raise rollout.attempts or rollout.tasks"
        )
    return found


def first_values(
    tasks: Sequence[Task], pool: EnvironmentPool, chat: Chat, model: StepValueModel, tokens_per_batch: int, processes: Processes
) -> dict[str, float]:
    """Task -> the return in [0, 1] that the step-value model predicts before the first turn. The processes share the tasks."""
    environment = pool.take()
    allow_conversations(environment, "begun")
    first = [(task.prompt, environment.reset(task)) for task in tasks[processes.index :: processes.count]]
    own = [chat.prompt(opening(prompt, seen.text), examples=seen.before).token_ids for prompt, seen in first]
    pool.give_back(environment)
    prompts = processes.gather(own)
    found: list[tuple[str, float]] = []
    plan = plan_micro_batches([len(prompt) for prompt in prompts], tokens_per_batch)
    for rows, active in processes.shard(plan):
        token_ids = padded([prompts[row] for row in rows], 0, torch.int64).to(processes.device)
        lengths = torch.tensor([len(prompts[row]) for row in rows], device=processes.device)
        values = model.turn_values(token_ids, lengths, lengths[:, None] - 1)[:, 0].clamp(0.0, 1.0).tolist()
        found += zip((tasks[row].task_id for row in rows), values, strict=True) if active else ()
    return dict(sorted(processes.gather(found)))


def make_source(
    context: StageContext,
    rl: Rl,
    domain: Domain,
    tasks: Mapping[str, Task],
    pool: EnvironmentPool,
    chat: Chat,
    processes: Processes,
    play: Play,
    key: tuple[object, ...],
    policy_hash: str = "",
) -> TaskSource:
    """The source that `rl.tasks` names; `tasks`: curated ones, by id; policy_hash: of the start policy. Raises ValueError if
    there are too few tasks."""
    name = str(context.domain)
    measured: Mapping[str, float] = read_json(context.data / "rollouts" / name / "difficulty.json")
    factors = selected(tasks, measured, rl.selection)
    if rl.curriculum.kind == "value":
        drawn = [tasks[task_id] for task_id in sorted(factors)]
        model = StepValueModel.load(context.data / "annotated" / name / "value_model", str(processes.device))
        measured = first_values(drawn, pool, chat, model, context.params.resources.tokens_per_batch, processes)
    worlds = context.data / "curated" / name / "worlds"
    # A copy, since the job adds the tasks that the source makes to its own.
    places = {"root": context.root, "policy_hash": policy_hash, "max_length": context.params.model.max_length}
    inputs = SourceInputs(rl, domain, dict(tasks), worlds, factors, measured, key, play, **places)
    return source_class(rl.tasks.source)(inputs)
