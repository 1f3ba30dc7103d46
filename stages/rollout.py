"""rollout: the SFT policy attempts each training task of one domain several times, which measures the tasks' difficulty.

data/curated/<domain>, data/models/sft -> data/rollouts/<domain>/{episodes.parquet, difficulty.json} and
reports/rollout/<domain>.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from stages import params, seeding
from stages.engine.engine import Sampling
from stages.environments.registry import open_domain
from stages.evaluation.attempts import successes, summary
from stages.records.episode import Episode, TurnRecord, conversations, episode_row, read_tasks, write_episodes, write_json
from stages.records.sections import params_hash
from stages.records.task import Task
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.progress import Progress
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker


def choose_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """`count` tasks, drawn independently of their order and sorted by id; all if there are fewer."""
    chosen = seeding.permutation(sorted(tasks, key=lambda task: task.task_id), seed, "rollout.tasks")[:count]
    return sorted(chosen, key=lambda task: task.task_id)


def play(context: StageContext, tasks: Sequence[Task]) -> list[Episode]:
    """Play all attempts in chunks, each a checkpoint that is not played again. A shard plays its own chunks alone."""
    from stages.agent.constrained_engine import constrained
    from stages.agent.environment_pool import EnvironmentPool, processes_beside
    from stages.agent.player import open_player
    from stages.agent.rollout import Labels, attempts, collect
    from stages.engine.engine import EngineSettings

    assert context.domain is not None
    section, resources, max_length = context.section("rollout"), context.params.resources, context.params.model.max_length
    domain = open_domain(context.domain, context.params.per_domain[context.domain].environment)
    settings = EngineSettings.of(resources, max_length, context.params.model.thinking)
    player = open_player(context.data / "models" / "sft", settings)
    worlds = context.data / "curated" / context.domain / "worlds"
    labels = Labels(context.params.seed, player.policy_hash, params_hash(section))
    sampling = Sampling(**section.sampling.model_dump())
    requests = attempts(tasks, section.attempts)
    engine = constrained(player.engine, player.chat, domain, "rollout", max_length)
    checkpoints = Checkpoints(context, classes=(Episode, TurnRecord))
    episodes: list[Episode] = []
    rewards: list[float] = []

    def show(episode: Episode, bar: Progress) -> None:
        rewards.append(episode.reward)
        bar.advance(1, f"mean reward {np.mean(rewards):.2f}")

    with (
        EnvironmentPool(partial(domain.make, worlds), processes_beside(resources)) as pool,
        context.progress("playing", len(requests), "episode") as bar,
    ):
        for number, start in context.share(list(enumerate(range(0, len(requests), section.chunk)))):
            chunk: list[Episode] | None = checkpoints.load(f"episodes-{number:05d}")
            if chunk is None:
                part = requests[start : start + section.chunk]
                chunk = collect(
                    *(engine, player.chat, pool, part, sampling, labels),
                    max_length=max_length,
                    width=resources.slots,
                    on_episode=lambda episode: show(episode, bar),
                )
                checkpoints.save(f"episodes-{number:05d}", chunk)
            else:
                bar.restore(len(chunk))
                rewards += [episode.reward for episode in chunk]
            episodes += chunk
            context.metric("success", float(np.mean([episode.success for episode in episodes])), len(episodes))
    if not context.collects:  # else shards or forks have played, and this engine counted nothing
        for name, value in sorted(engine.counters.items()):
            context.metric(f"engine/{name}", value)
    player.close()
    return episodes


def play_nothing(context: StageContext, out: Path) -> None:
    """rollout.tasks 0: write that no task was tried. The domain keeps DVC from taking another domain's equal outputs for those of
    this stage, which it then would not run."""
    write_episodes(out / "episodes.parquet", [])
    write_json(out / "difficulty.json", {})
    write_json(context.reports / "rollout" / f"{context.domain}.json", {"domain": context.domain, "tasks": 0, "episodes": 0})
    context.artifact(context.reports / "rollout" / f"{context.domain}.json")


def has_tasks(context: StageContext) -> bool:
    """Whether there are episodes to play, which processes can share."""
    return bool(context.section("rollout").tasks)


def run(context: StageContext) -> None:
    assert context.domain is not None
    section = context.section("rollout")
    context.log_params(section.model_dump())

    # Choose tasks and play them.
    tasks = read_tasks(context.data / "curated" / context.domain / "tasks.parquet", "train")
    if not tasks:
        raise ValueError(
            f"data/curated/{context.domain}/tasks.parquet has no training tasks; see reports/curate/{context.domain}.json"
        )
    out = context.data / "rollouts" / context.domain
    if not section.tasks:
        if not context.shard:
            play_nothing(context, out)
            Checkpoints(context).clear()
        return
    episodes = play(context, choose_tasks(tasks, section.tasks, context.params.seed))
    if context.shard:
        return

    # Summarise and write.
    success_rates = {task_id: float(np.mean(outcomes)) for task_id, outcomes in successes(episodes).items()}
    report = summary(episodes, section.attempts)
    write_episodes(out / "episodes.parquet", conversations(episodes))
    write_json(out / "difficulty.json", success_rates)
    write_json(context.reports / "rollout" / f"{context.domain}.json", report)
    for k, value in report["pass_at_k"].items():
        context.metric(f"pass_at_{k}", value)
    for name in ("reward", "turns", "tokens"):
        context.metric(name, report[name]["mean"])
    context.tracker.episodes([episode_row(episode) for episode in episodes], "measured difficulty", "sft rollout", count=3)
    context.artifact(context.reports / "rollout" / f"{context.domain}.json")
    Checkpoints(context).clear()
    passes = ", ".join(f"pass@{k} {value:.3f}" for k, value in report["pass_at_k"].items())
    print(f"{context.domain}: {report['episodes']} episodes on {report['tasks']} tasks, {passes}", flush=True)


if __name__ == "__main__":
    raise SystemExit(stage_run("rollout", run, params, open_tracker, per_domain=True, sharded=True, forked=has_tasks))
