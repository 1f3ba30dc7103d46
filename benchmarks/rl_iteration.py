"""rl_iteration: one whole RL iteration on `search` (rollout, reward, update), against TRL on the same environment and weights.

Ours is the rl stage's job. TRL plays the same tasks through its tool loop: each action is a call of the one tool until the policy
answers or runs out of turns; the reward is the environment's. The weights are restored before each run, so every repeat is an
iteration of the same policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks import trl_side
from benchmarks.measure import Options, Result, Side, alternate, fastest
from benchmarks.processes import ALONE, apart, candidates, consecutive, own_layout
from benchmarks.search_domain import SearchTasks, search_tasks, weights
from stages.runtime.team import Team

AGAINST = "TRL GRPOTrainer, environment_factory, transformers generate"
ANSWER = "answer "


class RunStatistics:
    """Per run of one side: action tokens, and zero-advantage groups, which ours leaves out of the update."""

    def __init__(self) -> None:
        self.action_tokens: list[int] = []
        self.dead_groups: list[int] = []

    def summary(self) -> dict[str, float]:
        """Medians per iteration."""
        return {name: median(values) for name, values in vars(self).items() if values}


def restore(model: Any) -> Callable[[], None]:
    """A function that restores the model's current weights."""
    import torch

    saved = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def back() -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(saved[name])

    return back


def ours(options: Options, tasks: SearchTasks, team: Team = ALONE) -> Side:
    """The rl stage's job in one process of `team`, without tracking, with the same settings as TRL."""
    from stages.agent.policy import load_policy
    from stages.algorithms.algorithm import resolve
    from stages.records.episode import write_json, write_tasks
    from stages.runtime.stage import StageContext
    from stages.runtime.tracker import Tracker
    from stages.training.common.loop import make_processes
    from stages.training.rl.online import OnlineJob

    together, seen = team if team.count > 1 else None, RunStatistics()
    if team.index == 0:
        write_tasks(options.scratch / "data" / "curated" / "search" / "tasks.parquet", tasks.tasks)
        write_json(options.scratch / "data" / "rollouts" / "search" / "difficulty.json", {})
    team.wait()
    context = StageContext("rl", "search", tasks.params, options.scratch, Tracker(), team.index == 0, together)
    algorithm = resolve(section(options, tasks), tasks.params.model.max_length)
    policy = load_policy(tasks.weights, attention="sdpa")
    domain: Any = SimpleNamespace(make=lambda worlds: tasks.make(), settings=tasks.domain.settings)
    job = OnlineJob(context, algorithm, policy, make_processes(tasks.params.resources, together), domain)
    steps = iter(range(10**9))

    def run() -> float:
        step = next(steps)
        sums = {}
        for update in job.updates(step):
            sums[update.learner] = job.learners[update.learner].update(
                update.micro_batches, update.loss, update.on_tokens_trained
            )
        dead = job.finish(step, sums)["dead_groups"]
        seen.action_tokens.append(sum(episode.policy_tokens for episode in job.played))
        seen.dead_groups.append(int(dead))
        return 1 / team.count

    return Side("bellwether", run, restore(policy.model), seen.summary)


def drawn(tasks: SearchTasks, rl: Any, step: int) -> list[Any]:
    """The tasks of a step, as sampled by the stage."""
    from stages.algorithms.sources.static import TaskSampler

    by_id = {task.task_id: task for task in tasks.tasks}
    sampler = TaskSampler(by_id, {}, rl.curriculum, rl.tasks_per_step)
    return [by_id[task_id] for task_id in sampler.draw(tasks.params.seed, "rl@search", step)]


def section(options: Options, tasks: SearchTasks) -> Any:
    """The domain's rl section as Dr. GRPO."""
    values = tasks.params.section("rl", "search").model_dump()
    changes = {
        "algorithm": "grpo",
        "tasks_per_step": options.size(values["tasks_per_step"], 2),
        "group_size": options.size(values["group_size"], 2),
        "advantage": {"mean": "group", "std": "none"},
        "loss": {"aggregation": "constant"},
        "credit": {"kind": "outcome"},
        "curriculum": {"kind": "uniform"},
        "max_grad_norm": 1.0,
        "weight_decay": 0.0,
    }
    return type(tasks.params.rl).model_validate({**values, **changes})


def tool_environment(tasks: SearchTasks) -> type:
    """The search environment for TRL; a dataset row holds its task id."""
    by_id = {task.task_id: task for task in tasks.tasks}

    class SearchTool:
        def __init__(self) -> None:
            self._environment = tasks.make()

        def reset(self, **row: Any) -> None:
            self._environment.reset(by_id[row["task_id"]])
            self._over, self._return = False, 0.0

        def act(self, action: str) -> str:
            """Search the encyclopaedia or answer.

            Args:
                action: The action.

            Returns:
                The observation.
            """
            return self._step(action)

        def _step(self, action: str) -> str:
            if self._over:
                return ""
            step = self._environment.step(action)
            self._over, self._return = step.done, self._return + step.reward
            return step.observation.text

        def _finish(self, action: str) -> float:
            """Step with the last message, which is no tool call; returns the episode's return."""
            self._step(action)
            return self._return

    return SearchTool


def reward(completions: Sequence[Any], environments: Sequence[Any], **_: Any) -> list[float]:
    """The episodes' returns."""
    finished = []
    for completion, environment in zip(completions, environments, strict=True):
        last = completion[-1]
        calls = last.get("tool_calls") or []
        text = calls[0]["function"]["arguments"]["action"] if calls else last.get("content", "")
        finished.append(environment._finish(text))
    return finished


def theirs(
    options: Options,
    tasks: SearchTasks,
    team: Team = ALONE,
    accumulate: int = 1,
    attention: str = "sdpa",
    cache: str | None = None,
) -> Side:
    rl, seen = section(options, tasks), RunStatistics()
    count = rl.tasks_per_step * rl.group_size

    def rows(step: int) -> list[dict[str, Any]]:
        return [
            {"prompt": [{"role": "user", "content": task.prompt}], "task_id": task.task_id}
            for task in drawn(tasks, rl, step)
            for _ in range(rl.group_size)
        ]

    trainer = trl_side.make_trainer(
        *(options, tasks.weights),
        rows=count,
        group=rl.group_size,
        prompts=rows(0),
        completion=tasks.params.model.max_length,
        attention=attention,
        cache=cache,
        accumulate=accumulate,
        generation={"max_new_tokens": rl.sampling.max_tokens},
        environment=tool_environment(tasks),
        reward=reward,
        is_action=lambda text: not text.lower().startswith(ANSWER),
        tool_turns=tasks.domain.settings.max_turns - 1,
        learning_rate=rl.learning_rate,
        processes=team.count,
    )
    steps = iter(range(10**9))

    def run() -> float:
        batch = trl_side.rollout(trainer, consecutive(rows(next(steps)), team))
        trl_side.update(trainer, batch)
        seen.action_tokens.append(trl_side.action_tokens(batch))
        dead = batch["advantages"].reshape(-1, rl.group_size).abs().amax(1) == 0
        seen.dead_groups.append(int(dead.sum()))
        return 1 / team.count

    label = f"trl {attention} cache={cache or 'dynamic'} micro-batch={count // accumulate // team.count}"
    return Side(label, run, restore(trainer.model), seen.summary)


def measure(options: Options) -> dict[str, Result]:
    tasks = search_tasks(options, weights(options))
    builds = [
        partial(theirs, options, tasks, accumulate=accumulate, attention=attention, cache=cache)
        for accumulate, attention, cache in ((1, "sdpa", None), (4, "sdpa", None), (1, "eager", None), (1, "sdpa", "static"))
    ]
    other, trials = fastest(candidates(builds, options), options)
    mine = apart(partial(ours, options, tasks), own_layout(options))
    samples = alternate(mine, other, options)
    rl = section(options, tasks)
    notes = {
        "episodes": rl.tasks_per_step * rl.group_size,
        "per_iteration": {"ours": mine.facts()[0], "theirs_by_process": other.facts()},
        "weights": tasks.named,
        "ours": mine.label,
        "theirs": other.label,
        "trials": trials,
    }
    return {"rl_iteration": Result("s", AGAINST, "seconds", *samples, notes=notes)}
