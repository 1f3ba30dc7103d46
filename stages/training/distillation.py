"""Distilling specialists into one policy: each plays training tasks of its domain, and the base policy learns their successes.

The merge's honest rival: it costs the specialists' episodes and the training, both in the report, where a merge costs seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.environment_pool import processes_beside
from stages.agent.instructions import QUESTION, read_instruction
from stages.agent.policy import load_policy, policy_hash, save_policy
from stages.agent.team import read_team
from stages.curation.panel import Panel
from stages.engine.engine import EngineSettings, Sampling
from stages.evaluation.panels import Outcome, Settings, jobs_of, load_panels, play, unload
from stages.evaluation.stored_episodes import unpacked
from stages.records.episode import Episode
from stages.runtime.checkpoints import Checkpoints
from stages.seeding import permutation
from stages.training.common.adapters import prepare_model, weight_precision, whole_model
from stages.training.common.loop import run_loop
from stages.training.sft.job import SftJob
from stages.training.sft.settings import Sft

if TYPE_CHECKING:
    from stages.merging.methods import distil
    from stages.merging.methods.distil import Distillation
    from stages.runtime.stage import StageContext

CHECKPOINT_EVERY = 100
"""Steps."""
CHUNK = 400
"""Episodes between checkpoints."""


def train(context: StageContext, base: Path, own: distil.Settings) -> dict[str, Any]:
    """Train data/models/merged from the policy in `base`; the costs and results, for the report. Raises ValueError if no
    specialist succeeds."""
    settings, checkpoints = own.distil, Checkpoints(context, classes=(Outcome,))
    learnt: list[Episode] = []
    report: dict[str, Any] = {"domains": {}}
    for domain, panel in load_panels(context.data / "curated", context.params.domains, "train").items():
        played = _played(context, panel, settings, checkpoints)
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
    history, tokens = _train(context, base, learnt, settings, checkpoints)
    checkpoints.clear()
    loss = round(history[-1]["train_loss"], 6)
    return {"distil": {**report, "steps": len(history), "trained_tokens": tokens, "train_loss": loss}}


def distinct_successes(episodes: Sequence[Episode], keep: int) -> list[Episode]:
    """Of each task at most `keep` successes, the first ones with different actions, by id."""
    kept: dict[str, dict[tuple[str, ...], Episode]] = {}
    for episode in sorted(episodes, key=lambda episode: episode.episode_id):
        of_task = kept.setdefault(episode.task_id, {})
        actions = tuple(turn.action_key for turn in episode.turns)
        if episode.success and len(of_task) < keep and actions not in of_task:
            of_task[actions] = episode
    return [episode for of_task in kept.values() for episode in of_task.values()]


def _refuse_company(folder: Path, domain: str) -> None:
    """Raise ValueError for a specialist that plays in a team or by an instruction, which the distilled policy would lack."""
    if read_team(folder, domain) is not None or read_instruction(folder, domain) != QUESTION:
        raise ValueError(
            f"merge.method distil: the specialist of {domain} plays in a team or by an instruction of its own, which one policy "
            "for all domains does without; choose another merge.method"
        )


def _played(context: StageContext, panel: Panel, settings: Distillation, checkpoints: Checkpoints) -> list[Episode]:
    """The specialist's attempts at the training tasks of `panel`, played as evaluate plays panels."""
    params, domain = context.params, panel.domain
    folder = context.data / "models" / "rl" / domain
    _refuse_company(folder, domain)
    if settings.tasks is not None:
        chosen = permutation(panel.tasks, params.seed, "distil", domain)[: settings.tasks]
        panel = replace(panel, tasks=tuple(sorted(chosen, key=lambda task: task.task_id)))
    engine = EngineSettings.of(params.resources, params.model.max_length, params.model.thinking)
    if engine.kind == "openai" and engine.text:
        raise ValueError(
            "merge.method distil learns the tokens of episodes, which resources.engine.text: true does without; set text to false"
        )
    how = Settings(
        seed=params.seed,
        sampling=Sampling(**settings.sampling.model_dump()),
        engine=engine,
        environment_processes=processes_beside(params.resources),
    )
    jobs = jobs_of(folder, policy_hash(folder), {domain: panel}, context.data / "curated", settings.attempts, CHUNK)
    episodes: list[Episode] = []
    with context.progress(f"playing {domain}", sum(job.episodes for job in jobs), "episode") as bar:
        for job in jobs:
            outcome: Outcome | None = checkpoints.load(job.name)
            if outcome is None:
                outcome = play(job, how)
                checkpoints.save(job.name, outcome)
                bar.advance(job.episodes)
            else:
                bar.restore(job.episodes)
            episodes += unpacked(outcome.episodes)
    unload()
    return episodes


def _train(
    context: StageContext, base: Path, learnt: Sequence[Episode], settings: Distillation, checkpoints: Checkpoints
) -> tuple[list[dict[str, float]], int]:
    """Supervised steps on the episodes, and the trained policy in data/models/merged; the history, and the number of tokens in
    the loss, over all epochs."""
    own = Sft(epochs=settings.epochs, learning_rate=settings.learning_rate, batch_tokens=settings.batch_tokens)
    params = context.params.model_copy(update={"sft": own})
    policy = load_policy(base, precision=weight_precision(params), attention="sdpa")
    prepare_model(policy.model, params, params.seed, "distil")
    job = SftJob(params, policy.model, Chat(policy.tokenizer, params.model.thinking), {"train": learnt, "valid": []})
    history = run_loop(context, checkpoints, job, job.steps, CHECKPOINT_EVERY, "distilling", "distil/")
    job.close()
    lora = bool(params.model.lora.rank)
    model = whole_model(policy.model if lora else job.trained_model, base, lora)
    save_policy(model, policy.tokenizer, context.data / "models" / "merged")
    return history, job.ledger.policy_tokens
