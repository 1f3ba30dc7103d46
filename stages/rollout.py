"""rollout: several attempts at each training task of one domain by the SFT policy.

data/curated/<domain>, data/models/sft -> data/rollouts/<domain>/{episodes.parquet, difficulty.json} and
reports/rollout/<domain>.json: how hard each task is for the policy that RL and tree search start from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from stages import params, seeding
from stages.curation.model_aware import histogram
from stages.engine.engine import Sampling
from stages.environments.registry import open_domain
from stages.evaluation.statistics import pass_at_k
from stages.records.episode import Episode, TurnRecord, episode_row, read_tasks, write_episodes, write_json
from stages.records.sections import params_hash
from stages.records.task import Task
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.progress import Progress
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker


def successes(episodes: Sequence[Episode]) -> dict[str, list[bool]]:
    """Per task, sorted by id, whether each attempt succeeded."""
    tasks: dict[str, list[bool]] = {}
    for episode in sorted(episodes, key=lambda episode: (episode.task_id, episode.episode_id)):
        tasks.setdefault(episode.task_id, []).append(episode.success)
    return tasks


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, quartiles and range; zeros if there are no values."""
    numbers = np.asarray(values, dtype=np.float64) if len(values) else np.zeros(1)
    low, median, high = (float(value) for value in np.quantile(numbers, [0.25, 0.5, 0.75]))
    return {
        "mean": float(numbers.mean()),
        "std": float(numbers.std()),
        "min": float(numbers.min()),
        "q25": low,
        "median": median,
        "q75": high,
        "max": float(numbers.max()),
    }


def summary(episodes: Sequence[Episode], attempts: int) -> dict[str, Any]:
    """The stage's report: pass@k for the powers of two up to `attempts`, reward, turns, lengths, how episodes ended."""
    tasks = successes(episodes)
    turns = [turn for episode in episodes for turn in episode.turns]
    powers = [2**index for index in range(attempts.bit_length()) if 2**index <= attempts]
    reasons = [episode.stop_reason for episode in episodes]
    return {
        "tasks": len(tasks),
        "episodes": len(episodes),
        "success": float(np.mean([episode.success for episode in episodes])),
        "pass_at_k": {
            str(k): float(np.mean([pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in tasks.values()])) for k in powers
        },
        "buckets": histogram({task: float(np.mean(outcomes)) for task, outcomes in tasks.items()}),
        "tasks_never_solved": sum(not any(outcomes) for outcomes in tasks.values()),
        "tasks_always_solved": sum(all(outcomes) for outcomes in tasks.values()),
        "reward": spread([episode.reward for episode in episodes]),
        "turns": spread([len(episode.turns) for episode in episodes]),
        "tokens": spread([len(episode.token_ids) for episode in episodes]),
        "policy_tokens": spread([episode.policy_tokens for episode in episodes]),
        "cost": spread([sum(turn.cost for turn in episode.turns) for episode in episodes]),
        "accepted_actions": float(np.mean([turn.accepted for turn in turns])) if turns else 0.0,
        "stop_reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "reward_terms": {
            name: float(np.mean([episode.reward_terms.get(name, 0.0) for episode in episodes]))
            for name in sorted({name for episode in episodes for name in episode.reward_terms})
        },
    }


def choose_tasks(tasks: Sequence[Task], count: int, seed: int) -> list[Task]:
    """`count` of the tasks, drawn without regard to their order, sorted by id; all if there are fewer."""
    chosen = seeding.permutation(sorted(tasks, key=lambda task: task.task_id), seed, "rollout.tasks")[:count]
    return sorted(chosen, key=lambda task: task.task_id)


def play(context: StageContext, tasks: Sequence[Task]) -> list[Episode]:
    """Play all attempts in chunks, each a checkpoint; chunks that are there already are not played again. A shard plays its own
    chunks alone."""
    from stages.agent.player import EngineSettings, open_player
    from stages.agent.rollout import EnvironmentPool, Labels, attempts, collect

    assert context.domain is not None
    section, resources, max_length = context.section("rollout"), context.params.resources, context.params.model.max_length
    domain = open_domain(context.domain, context.params.per_domain[context.domain].environment)
    settings = EngineSettings.of(resources, max_length, context.params.model.thinking)
    player = open_player(context.data / "models" / "sft", settings)
    worlds = context.data / "curated" / context.domain / "worlds"
    labels = Labels(context.params.seed, player.policy_hash, params_hash(section))
    sampling = Sampling(**section.sampling.model_dump())
    requests = attempts(tasks, section.attempts)
    checkpoints = Checkpoints(context, classes=(Episode, TurnRecord))
    episodes: list[Episode] = []
    rewards: list[float] = []

    def told(episode: Episode, bar: Progress) -> None:
        rewards.append(episode.reward)
        bar.advance(1, f"mean reward {np.mean(rewards):.2f}")

    with EnvironmentPool(lambda: domain.make(worlds)) as pool, context.progress("playing", len(requests), "episode") as bar:
        for number, start in enumerate(range(0, len(requests), section.chunk)):
            if context.shard and not context.shard.owns(number):
                continue
            chunk: list[Episode] | None = checkpoints.load(f"episodes-{number:05d}")
            if chunk is None:
                part = requests[start : start + section.chunk]
                chunk = collect(
                    *(player.engine, player.chat, pool, part, sampling, labels),
                    max_length=max_length,
                    width=resources.slots,
                    on_episode=lambda episode: told(episode, bar),
                )
                checkpoints.save(f"episodes-{number:05d}", chunk)
            else:
                bar.restore(len(chunk))
                rewards += [episode.reward for episode in chunk]
            episodes += chunk
            context.metric("success", float(np.mean([episode.success for episode in episodes])), len(episodes))
    for name, value in sorted(player.engine.counters.items()):
        context.metric(f"engine/{name}", value)
    player.close()
    return episodes


def run(context: StageContext) -> None:
    section = context.section("rollout")
    context.log_params(section.model_dump())
    assert context.domain is not None
    tasks = read_tasks(context.data / "curated" / context.domain / "tasks.parquet", "train")
    if not tasks:
        raise ValueError(f"data/curated/{context.domain}/tasks.parquet holds no training tasks; see the data report of curate")
    episodes = play(context, choose_tasks(tasks, section.tasks, context.params.seed))
    if context.shard:
        return
    shares = {task_id: float(np.mean(outcomes)) for task_id, outcomes in successes(episodes).items()}
    report = summary(episodes, section.attempts)
    out = context.data / "rollouts" / context.domain
    write_episodes(out / "episodes.parquet", episodes)
    write_json(out / "difficulty.json", shares)
    write_json(context.reports / "rollout" / f"{context.domain}.json", report)
    for k, value in report["pass_at_k"].items():
        context.metric(f"pass_at_{k}", value)
    for name in ("reward", "turns", "tokens"):
        context.metric(name, report[name]["mean"])
    context.tracker.episodes([episode_row(episode) for episode in episodes], "measured difficulty", count=3)
    context.artifact(context.reports / "rollout" / f"{context.domain}.json")
    Checkpoints(context).clear()
    passes = ", ".join(f"pass@{k} {value:.3f}" for k, value in report["pass_at_k"].items())
    print(f"{context.domain}: {report['episodes']} episodes on {report['tasks']} tasks, {passes}", flush=True)


if __name__ == "__main__":
    raise SystemExit(stage_run("rollout", run, params, open_tracker, per_domain=True, sharded=True))
