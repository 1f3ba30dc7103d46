"""step credit: agreement of the step-credit methods' advantages with exact ones on keydoor.

`python -m stages.claims.step_credit` prepares the start of the experiment reports/claims/step_credit.yaml (base model, SFT,
search trees, value model), collects groups of episodes of the SFT policy, and compares each method's advantage per step with
Q(s, a) - V(s) by dynamic programming under the same policy, whose action probabilities are estimated from further episodes.
Writes reports/claims/step_credit_exact.json; stages/reporting/step_credit_page.py shows it beside learning speeds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stages.claims.arms import run_values
from stages.claims.experiment import FOLDER, load_experiment
from stages.claims.label_metrics import correlation
from stages.claims.runner import ExperimentRunner, clean_commit
from stages.params import Params, load_params, parse_params
from stages.records.episode import Episode, read_json, read_tasks, write_json
from stages.records.task import Task
from stages.runtime.command import command
from stages.runtime.parent import die_with_parent
from stages.runtime.validation import ParamsError
from stages.runtime.workspace import RunFailedError
from stages.seeding import permutation

if TYPE_CHECKING:
    from stages.algorithms.batch import TrajectoryBatch
    from stages.environments.keydoor.exact import ExactValues

SLUG = "step_credit"
RESULT = FOLDER / "step_credit_exact.json"
TASKS, GROUPS, COUNTED = 16, 4, 8
"""Training tasks, groups per task and way of branching, and the factor of further episodes from which the policy is estimated:
separate ones, since in the scored episodes the only action in a rare state would look deterministic."""
RESAMPLES = 1000


@dataclass
class StepAdvantages:
    """One method's steps: advantage, exact advantage and index of the task, [N] each."""

    given: np.ndarray
    exact: np.ndarray
    task: np.ndarray

    def correlation(self) -> float:
        """Pearson's; 0 if one of the two is constant."""
        return correlation(self.given, self.exact)

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the correlation over tasks."""
        rng = np.random.default_rng(0)
        rows = [np.flatnonzero(self.task == task) for task in np.unique(self.task)]
        drawn = []
        for _ in range(RESAMPLES):
            chosen = np.concatenate([rows[place] for place in rng.integers(len(rows), size=len(rows))])
            drawn.append(correlation(self.given[chosen], self.exact[chosen]))
        return float(np.quantile(drawn, 0.025)), float(np.quantile(drawn, 0.975))

    def same_sign(self) -> float:
        """Share of steps with |exact| above 0.02 whose advantage has the exact sign."""
        matters = np.abs(self.exact) > 0.02
        return float((np.sign(self.given[matters]) == np.sign(self.exact[matters])).mean()) if matters.any() else 0.0


def policy_table(episodes: Sequence[Episode]) -> dict[str, dict[str, float]]:
    """State -> action -> count."""
    table: dict[str, dict[str, float]] = {}
    for episode in episodes:
        for turn in episode.turns:
            actions = table.setdefault(turn.state_key, {})
            actions[turn.action_key] = actions.get(turn.action_key, 0.0) + 1.0
    return table


def exact_values(tasks: Sequence[Task], settings: Any, episodes: Sequence[Episode]) -> dict[str, ExactValues]:
    """Task -> exact values under the policy estimated from `episodes`."""
    from stages.environments.keydoor.exact import ExactValues, from_table

    policy = from_table(policy_table(episodes))
    return {task.task_id: ExactValues(task, settings, policy) for task in tasks}


def step_advantages(batch: TrajectoryBatch, episodes: Sequence[Episode], exact: Mapping[str, ExactValues]) -> StepAdvantages:
    """Each step's advantage in a prepared batch, and the exact one; rows are `episodes`."""
    from stages.algorithms.parts.graph import turn_advantages

    numbers = {task_id: number for number, task_id in enumerate(sorted(exact))}
    given, true, task = [], [], []
    advantages = turn_advantages(batch)
    for row, episode in enumerate(episodes):
        steps = exact[episode.task_id].episode([turn.action_key for turn in episode.turns])
        given += advantages[row, : len(steps)].tolist()
        true += [step.advantage for step in steps]
        task += [numbers[episode.task_id]] * len(steps)
    return StepAdvantages(np.array(given), np.array(true), np.array(task))


class Benchmark:
    """The SFT policy of the workspace `folder` on its keydoor tasks; `arms`: method -> parameters."""

    def __init__(self, folder: Path, arms: Mapping[str, Params], tasks: int = TASKS, groups: int = GROUPS) -> None:
        from stages.agent.policy import load_policy
        from stages.environments.registry import load_domain
        from stages.training.common.loop import make_processes

        self.folder, self.arms, self.groups = folder, arms, groups
        self.params = next(iter(arms.values()))
        (self.name,) = self.params.domains
        self.domain = load_domain(self.name, self.params.per_domain[self.name].environment)
        self.processes = make_processes(self.params.resources)
        self.policy = load_policy(folder / "data/models/sft", device=str(self.processes.device), attention="sdpa")
        curated = folder / "data/curated" / self.name
        known = permutation(read_tasks(curated / "tasks.parquet", "train"), 0, "step_credit.tasks")
        # Tasks that are always or never solved have zero advantages.
        shares = read_json(folder / "data/rollouts" / self.name / "difficulty.json")
        chosen = [task for task in known if 0 < shares.get(task.task_id, 0) < 1][:tasks]
        self.tasks = sorted(chosen, key=lambda task: task.task_id)
        if not self.tasks:
            raise RunFailedError(
                f"in {folder} no training task is solved sometimes but not always; set rollout.tasks above 0 if it is 0, or "
                f"change sft.epochs"
            )

    def play(self, params: Params, stream: str, groups: int) -> list[Episode]:
        """`groups` groups of episodes per task, with the method's branching."""
        from stages.agent.active_episode import EpisodeRequest
        from stages.agent.chat import Chat
        from stages.agent.environment_pool import EnvironmentPool
        from stages.agent.rollout import Labels, collect
        from stages.algorithms.algorithm import resolve
        from stages.engine.engine import Sampling
        from stages.engine.local_engine import make_engine

        rl, length = params.section("rl", self.name), params.model.max_length
        chat = Chat(self.policy.tokenizer, params.model.thinking)
        engine = make_engine(self.policy.model, [chat.end_of_turn], params.resources.slots, length)
        plan = resolve(rl, length).plan(self.policy.model.config.vocab_size)
        requests = [
            EpisodeRequest(task, group * rl.group_size + place, f"{task.task_id}/{group}")
            for task in self.tasks
            for group in range(groups)
            for place in range(rl.group_size)
        ]
        worlds = self.folder / "data/curated" / self.name / "worlds"
        with EnvironmentPool(lambda: self.domain.make(worlds)) as pool:
            return collect(
                *(engine, chat, pool, requests, Sampling(**rl.sampling.model_dump()), Labels(params.seed, stream=stream)),
                max_length=length,
                width=params.resources.slots,
                plan=plan,
            )

    def prepared(self, params: Params, episodes: Sequence[Episode]) -> TrajectoryBatch:
        """The episodes as a batch with the method's advantages."""
        from stages.algorithms.algorithm import resolve
        from stages.training.common.batches import trajectory_batch
        from stages.training.rl.models import Models

        algorithm = resolve(params.section("rl", self.name), params.model.max_length)
        annotated = self.folder / "data/annotated" / self.name
        models = Models.make(algorithm, self.policy.model, annotated, self.processes, params.resources.tokens_per_batch)
        batch = models.annotate(algorithm.shape(trajectory_batch(episodes)), algorithm)
        return algorithm.prepare(algorithm.resample(batch, 0))

    def measure(self) -> dict[str, Any]:
        """The content of the result file, without the commit."""
        alone = next(params for params in self.arms.values() if not _branches(params))
        independent = self.play(alone, "step_credit", self.groups)
        branching = next(params for params in self.arms.values() if _branches(params))
        branched = self.play(branching, "step_credit.branches", self.groups)
        counted = self.play(alone, "step_credit.policy", COUNTED * self.groups)
        exact = exact_values(self.tasks, self.domain.settings, counted)
        plays = {name: (params, branched if _branches(params) else independent) for name, params in self.arms.items()}
        found = {}
        for name, (params, episodes) in plays.items():
            batch = self.prepared(params, episodes)
            scored = step_advantages(batch, episodes, exact)
            low, high = scored.interval()
            numbers = {"correlation": scored.correlation(), "low": low, "high": high, "same_sign": scored.same_sign()}
            found[name] = {
                **{key: round(value, 4) for key, value in numbers.items()},
                "steps": len(scored.given),
                "calls": sum(len(episode.played) for episode in episodes),
                "merged_steps": round(batch.metrics.get("merged_steps", 0.0), 4),
            }
        success = sum(episode.success for episode in independent) / len(independent)
        return {
            "tasks": len(self.tasks),
            "episodes": len(independent),
            "success": round(success, 4),
            "counted": len(counted),
            "methods": found,
        }


def _branches(params: Params) -> bool:
    return params.section("rl", params.domains[0]).branching.kind != "none"


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.claims.step_credit", description=(__doc__ or "").strip())
    parser.add_argument("--tasks", type=int, default=TASKS, help=f"training tasks (default: {TASKS})")
    parser.add_argument("--groups", type=int, default=GROUPS, help=f"groups per task and way of branching (default: {GROUPS})")
    options = parser.parse_args()
    die_with_parent()
    root = Path.cwd()
    try:
        params = load_params(root / "params.yaml").model_dump()
        experiment = load_experiment(root / FOLDER / f"{SLUG}.yaml")
        values = {arm: run_values(experiment, arm, 0, params) for arm in experiment.arms}
        runner = ExperimentRunner(root, clean_commit(root), params["resources"]["threads"])
        folder = runner.start(next(iter(values.values()))).folder
        arms = {arm: parse_params(one, f"{FOLDER}/{SLUG}.yaml: arm '{arm}'") for arm, one in values.items()}
        result = Benchmark(folder, arms, options.tasks, options.groups).measure()
    except (ParamsError, RunFailedError) as error:
        print(f"step credit: {error}", file=sys.stderr)
        return 2
    write_json(root / RESULT, {**result, "commit": runner.commit})
    for name, one in result["methods"].items():
        print(f"step credit: {name}: correlation {one['correlation']:.3f} ({one['low']:.3f} to {one['high']:.3f})", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
