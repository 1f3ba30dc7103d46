"""Demonstrations: episodes played by a domain's expert, straight or with random actions in between that it recovers from.

Token lists stay empty: the tokenizer is the model's, so sft adds the tokens. `messages` and `turns` hold all that happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.curation.cleaning import episode_length, is_near_duplicate
from stages.curation.settings import Curate
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.records.episode import EXPERT, NOISY, Episode, TurnRecord
from stages.records.sections import params_hash
from stages.records.task import Task, opening
from stages.runtime.workers import worker_pool
from stages.seeding import stream

DRAWS = 6
"""Tries for one noisy demonstration, since random actions may spoil the task or never come up."""

UNSOLVED = ("no_expert_action", "turn_limit", "failed")
"""Reasons of `fault` which say that a task was not solved."""


@dataclass(frozen=True)
class DemonstrationPlan:
    """What is asked of each task."""

    curate: Curate
    seed: int
    max_length: int
    """Longest episode in tokens (model.max_length)."""


@dataclass
class Demonstrations:
    """Of one task, or of many added up."""

    episodes: list[Episode] = field(default_factory=list)
    rejected: Counter[str] = field(default_factory=Counter)

    def add(self, other: Demonstrations) -> None:
        self.episodes += other.episodes
        self.rejected += other.rejected


def play_out(
    environment: Environment, task: Task, name: str, policy_hash: str, choose: Callable[[], str | None], *, whole: bool = True
) -> Episode | None:
    """One episode of `task` with the actions of `choose`, from its start to its end. Where that has no action to give: None, or,
    if it need not be `whole`, what was played until then."""
    prompt = opening(task.prompt, environment.reset(task).text)
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
            if whole:
                return None
            episode.reward = sum(turn.reward for turn in episode.turns)
            return episode
        state_key = environment.state_key()
        step = environment.step(action)
        episode.turns.append(
            TurnRecord(
                action=action,
                observation=step.observation.text,
                accepted=step.accepted,
                reward=step.reward,
                cost=step.cost,
                state_key=state_key,
                action_key=" ".join(action.lower().split()),
                start=0,
                end=0,
            )
        )
        episode.messages.append({"role": "assistant", "content": action})
        if step.done:
            break
        episode.messages.append({"role": "user", "content": step.observation.text})
    episode.reward = sum(turn.reward for turn in episode.turns)
    episode.reward_terms = dict(step.terms)
    episode.terminated, episode.truncated = step.terminated, step.truncated
    episode.stop_reason = "terminated" if step.terminated else "turn_limit"
    return episode


def play(domain: Domain, environment: Environment, task: Task, noise: float, key: tuple[object, ...]) -> Episode | None:
    """One episode of `task`; with probability `noise` per turn a random admissible action instead of the expert's.

    `key` fixes the random draws. Returns None if the expert knows no action from where the episode got.
    """
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
    """Why a demonstration can't stay; None if it can."""
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


def demonstrate(domain: Domain, environment: Environment, task: Task, plan: DemonstrationPlan) -> Demonstrations:
    """The demonstrations of one task that stay, and the reasons of those that don't.

    A noisy demonstration is drawn anew, at most `DRAWS` times, until one succeeds and differs from those kept before it.
    """
    result = Demonstrations()
    curate = plan.curate
    wanted = [("expert", index, 0.0, 1) for index in range(curate.expert_demonstrations)]
    wanted += [("noisy", index, curate.noise, DRAWS) for index in range(curate.noisy_demonstrations) if curate.noise > 0]
    for kind, index, noise, draws in wanted:
        for draw in range(draws):
            episode = play(domain, environment, task, noise, (f"{kind}-{index}", draw, plan.seed))
            reason = fault(episode, result.episodes, plan)
            if reason is None and episode is not None:
                episode.seed, episode.params_hash = plan.seed, params_hash(curate)
                result.episodes.append(episode)
                break
            result.rejected[f"{kind}:{reason}"] += 1
    return result


def check_expert(name: str, shown: Demonstrations, curate: Curate) -> list[str]:
    """A line if the expert of domain `name` solved less than half of what it was asked to show, none if it did well or was not
    asked. Raises ValueError if none of its demonstrations (of the noisy ones, where there are to be no others) can be learnt
    from."""
    if not curate.expert_demonstrations and not (curate.noisy_demonstrations and curate.noise):
        return []
    kind, policy = ("expert", EXPERT) if curate.expert_demonstrations else ("noisy", NOISY)
    kept = sum(episode.policy_hash == policy for episode in shown.episodes)
    reasons = {reason.partition(":")[2]: count for reason, count in shown.rejected.items() if reason.startswith(f"{kind}:")}
    tries, unsolved = kept + sum(reasons.values()), sum(reasons.get(reason, 0) for reason in UNSOLVED)
    causes = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    if not kept:
        raise ValueError(
            f"domain {name}: none of the expert's {tries} demonstrations can be learnt from ({causes}): mend the domain's "
            f"expert() or per_domain.{name}.environment (too_long: raise model.max_length), or go without an expert by "
            f"per_domain.{name}.curate: {{expert_demonstrations: 0, noisy_demonstrations: 0}}"
        )
    if kind == "noisy" or 2 * unsolved <= tries:  # noisy ones are drawn anew until one succeeds
        return []
    return [
        f"domain {name}: the expert solved {tries - unsolved} of {tries} tasks that it was to demonstrate ({causes}); what it "
        "does not solve, nobody shows: see the domain's expert() and its settings"
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
    """The demonstrations of each task, in the order of `tasks`, whatever the number of processes.

    `folder` holds what `Domain.build` wrote. With more than one worker, the domain is loaded by its name in each.
    """
    if workers > 1 and len(tasks) > 1:
        arguments = (domain.name, domain.settings.model_dump(), folder, plan)
        with worker_pool(workers, _start_worker, arguments) as pool:
            yield from pool.map(_work, tasks, chunksize=8)
        return
    environment = domain.make(folder)
    for task in tasks:
        yield demonstrate(domain, environment, task, plan)
    environment.close()
