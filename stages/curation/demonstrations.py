"""Demonstrations: episodes played by a domain's expert, straight or with random actions in between that it recovers from.

Token lists stay empty: the tokenizer is the model's, so sft adds the tokens. `messages` and `turns` hold all that happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from stages.curation.cleaning import episode_length, is_near_duplicate
from stages.curation.settings import Curate
from stages.curation.thoughts import add_thoughts
from stages.environments.protocol import Domain, Environment, allow_conversations
from stages.environments.registry import load_domain
from stages.records.actions import action_key
from stages.records.episode import EXPERT, NOISY, Episode, TurnRecord
from stages.records.sections import params_hash
from stages.records.task import Task, opening
from stages.records.thinking import Thinking
from stages.runtime import spans
from stages.runtime.workers import worker_pool
from stages.seeding import stream

DRAWS = 6
"""Attempts at one noisy demonstration, since random actions may make the task fail, or none may be drawn."""

UNSOLVED = ("no_expert_action", "turn_limit", "failed")
"""Reasons of `fault` that mean the task was not solved."""


@dataclass(frozen=True)
class DemonstrationPlan:
    """Settings of all demonstrations."""

    curate: Curate
    seed: int
    max_length: int
    """Longest episode in tokens (model.max_length)."""
    thinking: Thinking | None = None
    """Markers of thoughts (model.thinking)."""


@dataclass
class Demonstrations:
    """Of one or more tasks."""

    episodes: list[Episode] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, other: Demonstrations) -> None:
        self.episodes += other.episodes
        self.rejected += other.rejected


def _prompt(environment: Environment, task: Task) -> str | None:
    """Start the task; its first message, or None if there are answers of others before it."""
    allow_conversations(environment, "begun")
    first = environment.reset(task)
    return None if first.before else opening(task.prompt, first.text)


def play_out(
    environment: Environment, task: Task, name: str, policy_hash: str, choose: Callable[[], str | None], *, complete: bool = True
) -> Episode | None:
    """One episode of `task` with the actions of `choose`. If that returns None before the end: None, or the episode so far
    unless it must be `complete`. A task that begins with answers of others has none: None, or ValueError unless it must be."""
    prompt = _prompt(environment, task)
    if prompt is None and not complete:
        raise ValueError(f"{task.task_id} begins with answers of others, so that it can't be replayed; leave task_id out")
    if prompt is None:
        return None
    episode = Episode(
        episode_id=f"{task.task_id}/{name}",
        task_id=task.task_id,
        domain=task.domain,
        group_id=task.task_id,
        seed=0,
        policy_hash=policy_hash,
        params_hash="",
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        messages=[{"role": "user", "content": prompt}],
    )
    while True:
        action = choose()
        if action is None:
            if complete:
                return None
            episode.reward = sum(turn.reward for turn in episode.turns)
            return episode
        state_key = environment.state_key()
        step = environment.step(action)
        spans.count("environment_steps")
        episode.turns.append(
            TurnRecord(
                action=action,
                observation=step.observation.text,
                accepted=step.accepted,
                reward=step.reward,
                cost=step.cost,
                state_key=state_key,
                action_key=action_key(action),
                start=0,
                end=0,
            )
        )
        for term, value in step.terms.items():
            episode.reward_terms[term] = episode.reward_terms.get(term, 0.0) + value
        episode.messages.append({"role": "assistant", "content": action})
        if step.done:
            break
        if 0 < step.forgets < len(episode.turns):
            episode.forgotten.append([len(episode.turns) - 1 - step.forgets, len(episode.turns) - 1])
        episode.messages.append({"role": "user", "content": step.observation.text})
    episode.reward = sum(turn.reward for turn in episode.turns)
    episode.terminated, episode.truncated = step.terminated, step.truncated
    episode.stop_reason = "terminated" if step.terminated else "turn_limit"
    return episode


def play(domain: Domain, environment: Environment, task: Task, noise: float, key: tuple[object, ...]) -> Episode | None:
    """One episode of `task`; with probability `noise` per turn a random admissible action instead of the expert's, drawn by
    `key`. None if the expert has no action in some state."""
    rng = stream("demonstration", task.task_id, *key)
    random_actions = 0

    def choose() -> str | None:
        nonlocal random_actions
        options = environment.admissible() if noise and rng.random() < noise else ()
        random_actions += bool(options)
        return rng.choice(options) if options else domain.expert(environment)

    episode = play_out(environment, task, str(key[0]), NOISY if noise else EXPERT, choose)
    if episode is not None:
        episode.reward_terms["random_actions"] = float(random_actions)
    return episode


def fault(episode: Episode | None, kept: Sequence[Episode], plan: DemonstrationPlan) -> str | None:
    """The reason to reject a demonstration, or None."""
    if episode is None:
        return "no_expert_action"
    if not episode.success:
        return "turn_limit" if episode.truncated else "failed"
    if episode.policy_hash == NOISY and not episode.reward_terms["random_actions"]:
        return "no_random_action"
    if episode_length(episode) > plan.max_length:
        return "too_long"
    if is_near_duplicate(episode, kept, plan.curate.near_duplicate):
        return "near_duplicate"
    return None


@spans.span("environment")
def demonstrate(domain: Domain, environment: Environment, task: Task, plan: DemonstrationPlan) -> Demonstrations:
    """The accepted demonstrations of one task, and the reasons for rejecting others. A noisy demonstration is redrawn, at most
    `DRAWS` times, until one succeeds and differs from the earlier ones."""
    result = Demonstrations()
    curate = plan.curate
    wanted = [("expert", index, 0.0, 1) for index in range(curate.expert_demonstrations)]
    wanted += [("noisy", index, curate.noise, DRAWS) for index in range(curate.noisy_demonstrations) if curate.noise > 0]
    for kind, index, noise, draws in wanted:
        for draw in range(draws):
            episode = play(domain, environment, task, noise, (f"{kind}-{index}", draw, plan.seed))
            if episode is not None and plan.thinking is not None and curate.thoughts != "none":
                add_thoughts(domain, task, episode, curate.thoughts, plan.thinking)
            reason = fault(episode, result.episodes, plan)
            if reason is None and episode is not None:
                episode.seed, episode.params_hash = plan.seed, params_hash(curate)
                result.episodes.append(episode)
                break
            result.rejected[f"{kind}:{reason}"] += 1
    return result


def check_expert(name: str, shown: Demonstrations, curate: Curate) -> list[str]:
    """A warning if the expert of domain `name` solved less than half of the tasks. Raises ValueError if all its demonstrations
    (all noisy ones, if no others were requested) were rejected."""
    if not curate.expert_demonstrations and not (curate.noisy_demonstrations and curate.noise):
        return []
    kind, policy = ("expert", EXPERT) if curate.expert_demonstrations else ("noisy", NOISY)
    kept = sum(episode.policy_hash == policy for episode in shown.episodes)
    reasons = {reason.partition(":")[2]: count for reason, count in shown.rejected.items() if reason.startswith(f"{kind}:")}
    tries, unsolved = kept + sum(reasons.values()), sum(reasons.get(reason, 0) for reason in UNSOLVED)
    causes = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    if not kept:
        raise ValueError(
            f"domain {name}: none of the expert's {tries} demonstrations is usable ({causes}): fix the domain's "
            f"expert() or per_domain.{name}.environment (too_long: raise model.max_length), or train without an expert with "
            f"per_domain.{name}.curate: {{expert_demonstrations: 0, noisy_demonstrations: 0}}"
        )
    if kind == "noisy" or 2 * unsolved <= tries:  # noisy ones are redrawn until one succeeds
        return []
    return [
        f"domain {name}: the expert solved only {tries - unsolved} of {tries} tasks ({causes}); the others have no "
        "demonstration: check the domain's expert() and its settings"
    ]


_worker: dict[str, Any] = {}


def _start_worker(name: str, settings: Mapping[str, Any], folder: Path, plan: DemonstrationPlan) -> None:
    domain = load_domain(name, settings)
    _worker.update(domain=domain, environment=domain.make(folder), plan=plan)


def _work(task: Task) -> Demonstrations:
    return demonstrate(_worker["domain"], _worker["environment"], task, _worker["plan"])


def demonstrate_all(
    domain: Domain, folder: Path, tasks: Sequence[Task], plan: DemonstrationPlan, workers: int
) -> Iterator[Demonstrations]:
    """The demonstrations of each task, in the order of `tasks` for any number of `workers`, each of which loads the domain by
    name. `folder`: the output of `Domain.build`."""
    if workers > 1 and len(tasks) > 1:
        arguments = (domain.name, domain.settings.model_dump(), folder, plan)
        with worker_pool(workers, _start_worker, arguments) as pool:
            yield from spans.collected(pool.map(partial(spans.timed, _work), tasks, chunksize=8))
        return
    environment = domain.make(folder)
    for task in tasks:
        yield demonstrate(domain, environment, task, plan)
    environment.close()
