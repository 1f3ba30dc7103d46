"""Distilling specialists into one policy: each plays training tasks of its domain, and the base policy learns their successes.

The merge's honest rival: it costs the specialists' episodes and the training, both in the report, where a merge costs seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool, processes_beside
from stages.agent.player import open_player
from stages.agent.policy import load_policy, save_policy
from stages.agent.rollout import Labels, attempts, collect
from stages.curation.panel import read_panel
from stages.engine.engine import EngineSettings, Sampling
from stages.environments.registry import open_domain
from stages.records.episode import Episode, TurnRecord, read_tasks
from stages.runtime.checkpoints import Checkpoints
from stages.seeding import permutation
from stages.training.common.adapters import prepare_model, weight_precision
from stages.training.common.loop import run_loop
from stages.training.sft.job import SftJob, whole_policy
from stages.training.sft.settings import Sft

if TYPE_CHECKING:
    from stages.merging.methods.distil import Distillation
    from stages.runtime.stage import StageContext

CHECKPOINT_EVERY = 100
"""Steps."""


def distil(context: StageContext, base: Path, settings: Distillation) -> dict[str, Any]:
    """Train data/models/merged from the policy in `base`; the costs and results, for the report. Raises ValueError if no
    specialist succeeds."""
    checkpoints = Checkpoints(context, classes=(Episode, TurnRecord))
    learnt: list[Episode] = []
    report: dict[str, Any] = {"domains": {}}
    for domain in context.params.domains:
        played = _played(context, domain, settings, checkpoints)
        kept = distinct_successes(played, settings.keep)
        report["domains"][domain] = {
            "episodes": len(played),
            "successes": sum(episode.success for episode in played),
            "learnt": len(kept),
            "environment_steps": sum(len(episode.turns) for episode in played),
            "sampled_tokens": sum(episode.policy_tokens for episode in played),
        }
        learnt += kept
    if not learnt:
        raise ValueError("merge.method distil: no specialist solved a training task; merge their weights, or train them longer")
    history = _train(context, base, learnt, settings, checkpoints)
    checkpoints.clear()
    return {"distil": {**report, "steps": len(history), "train_loss": round(history[-1]["train_loss"], 6)}}


def distinct_successes(episodes: Sequence[Episode], keep: int) -> list[Episode]:
    """Of each task at most `keep` successes, the first ones with different actions, by id."""
    kept: dict[str, dict[tuple[str, ...], Episode]] = {}
    for episode in sorted(episodes, key=lambda episode: episode.episode_id):
        of_task = kept.setdefault(episode.task_id, {})
        actions = tuple(turn.action_key for turn in episode.turns)
        if episode.success and len(of_task) < keep and actions not in of_task:
            of_task[actions] = episode
    return [episode for of_task in kept.values() for episode in of_task.values()]


def _played(context: StageContext, domain: str, settings: Distillation, checkpoints: Checkpoints) -> list[Episode]:
    """The specialist's attempts at training tasks of its domain, with the settings that the domain was curated with."""
    done: list[Episode] | None = checkpoints.load(f"played-{domain}")
    if done is not None:
        return done
    params, folder = context.params, context.data / "curated" / domain
    tasks = sorted(read_tasks(folder / "tasks.parquet", "train"), key=lambda task: task.task_id)
    if settings.tasks is not None:
        tasks = sorted(permutation(tasks, params.seed, "distil", domain)[: settings.tasks], key=lambda task: task.task_id)
    player = open_player(
        context.data / "models" / "rl" / domain,
        EngineSettings.of(params.resources, params.model.max_length, params.model.thinking),
    )
    environment = open_domain(domain, read_panel(folder).environment)
    labels = Labels(params.seed, player.policy_hash, stream="distil")
    requests = attempts(tasks, settings.attempts)
    with (
        EnvironmentPool(partial(environment.make, folder / "worlds"), processes_beside(params.resources)) as pool,
        context.progress(f"playing {domain}", len(requests), "episode") as bar,
    ):
        episodes = collect(
            *(player.engine, player.chat, pool, requests, Sampling(**settings.sampling.model_dump()), labels),
            max_length=params.model.max_length,
            width=params.resources.slots,
            on_episode=lambda episode: bar.advance(1),
        )
    player.close()
    checkpoints.save(f"played-{domain}", episodes)
    return episodes


def _train(
    context: StageContext, base: Path, learnt: Sequence[Episode], settings: Distillation, checkpoints: Checkpoints
) -> list[dict[str, float]]:
    """Supervised steps on the episodes, and the trained policy in data/models/merged; the history."""
    own = Sft(epochs=settings.epochs, learning_rate=settings.learning_rate, batch_tokens=settings.batch_tokens)
    params = context.params.model_copy(update={"sft": own})
    policy = load_policy(base, precision=weight_precision(params), attention="sdpa")
    prepare_model(policy.model, params, params.seed, "distil")
    job = SftJob(params, policy.model, Chat(policy.tokenizer, params.model.thinking), {"train": learnt, "valid": []})
    history = run_loop(context, checkpoints, job, job.steps, CHECKPOINT_EVERY, "distilling", "distil/")
    job.close()
    save_policy(
        whole_policy(job, policy, base, bool(params.model.lora.rank)), policy.tokenizer, context.data / "models" / "merged"
    )
    return history
