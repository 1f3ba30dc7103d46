"""Labels and pairs of one annotation method against exact values: a run of lane labels (stages/claims/experiment.py).

`python -m stages.claims.mcts_labels --settings FILE --result FILE`, in a workspace where everything before rl is done, grows
trees with FILE's section `annotate`, seeded by its `rl.seed`: in known worlds (stages/claims/known_tree.py), where Q of the
policy and Q* follow by recursion, and with the SFT policy on keydoor, where dynamic programming gives Q* (exact, discounted)
and Q under the policy's action frequencies in many of its own episodes. `annotate.stop.policy_tokens` is the budget of a tree
on keydoor; known trees, with actions of two tokens and episodes of four turns, have KNOWN_TOKENS: 40 rollouts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from stages.annotation.derived import uses_value_model
from stages.annotation.nodes import Row
from stages.annotation.search import Search
from stages.claims.known_tree import Chat, FakeEngine, Pool, actions_in, task, value
from stages.claims.label_metrics import score_labels
from stages.claims.step_credit import policy_table
from stages.params import Params, parse_params
from stages.records.actions import action_key
from stages.records.episode import Episode, read_json, read_tasks, write_json
from stages.runtime.command import command
from stages.runtime.files import atomic_text, locked
from stages.runtime.parent import die_with_parent
from stages.runtime.validation import ParamsError
from stages.seeding import permutation

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate

GAMMA = 0.95
"""Of Q* on keydoor: without a discount, detours within the turn limit would make nearly all actions equally good."""
KNOWN_WORLDS, KNOWN_TOKENS = 48, 320
TASKS, EPISODES = 24, 64
"""Of keydoor: tasks that are solved sometimes but not always, and episodes per task from which action frequencies are
estimated."""


def known(params: Annotate, seed: int, worlds: int = KNOWN_WORLDS) -> dict[str, float]:
    """METRICS of one tree in each of `worlds` known worlds, different ones per seed."""
    settings = params.model_copy(update={"stop": params.stop.model_copy(update={"policy_tokens": KNOWN_TOKENS})})
    engine = FakeEngine(width=worlds)
    names = {f"world{number:03d}": 1000 * seed + number for number in range(worlds)}
    trees = Search(engine, Chat(), Pool(), settings, seed, 10_000).grow(
        [task(name, world, "sure") for name, world in names.items()]
    )

    def exact(tree: Sequence[Row], node: int) -> tuple[float, float]:
        world, actions = names[tree[0]["task_id"]], actions_in(tree, node)
        return value(world, actions, kind="sure"), value(world, actions, best=True, kind="sure")

    tokens = sum(tree.counters["policy_tokens"] for tree in trees)
    return score_labels([row for tree in trees for row in tree.rows()], settings, exact, tokens)


class Keydoor:
    """The SFT policy of this workspace on its keydoor tasks."""

    def __init__(self, params: Params, tasks: int = TASKS, episodes: int = EPISODES) -> None:
        from stages.agent.player import open_player
        from stages.engine.engine import EngineSettings
        from stages.environments.registry import load_domain

        self.params, self.episodes = params, episodes
        (self.name,) = params.domains
        self.domain = load_domain(self.name, params.per_domain[self.name].environment)
        settings = EngineSettings.of(params.resources, params.model.max_length, params.model.thinking)
        self.player = open_player(Path("data/models/sft"), settings)
        shares = read_json(Path("data/rollouts") / self.name / "difficulty.json")
        curated = permutation(read_tasks(Path("data/curated") / self.name / "tasks.parquet", "train"), 0, "mcts_labels.tasks")
        some = [one for one in curated if 0 < shares.get(one.task_id, 0) < 1][:tasks]
        if not some:
            raise ParamsError(
                "no training task is solved sometimes but not always; set rollout.tasks above 0 if it is 0, or change sft.epochs"
            )
        self.tasks = sorted(some, key=lambda one: one.task_id)

    def _pool(self) -> Any:
        from stages.agent.environment_pool import EnvironmentPool

        return EnvironmentPool(lambda: self.domain.make(Path("data/curated") / self.name / "worlds"))

    def _play(self) -> list[Episode]:
        from stages.agent.rollout import Labels, attempts, collect
        from stages.engine.engine import Sampling

        sampling = Sampling(**self.params.section("annotate", self.name).sampling.model_dump())
        with self._pool() as pool:
            return collect(
                *(self.player.engine, self.player.chat, pool, attempts(self.tasks, self.episodes), sampling),
                Labels(self.params.seed, stream="mcts_labels"),
                max_length=self.params.model.max_length,
                width=self.params.resources.slots,
            )

    def table(self) -> Mapping[str, Mapping[str, float]]:
        """Counts of the policy's actions per state, made once for all runs in this workspace."""
        path = Path(f"policy-{len(self.tasks)}-{self.episodes}.json")
        if not path.exists():
            with locked(path.with_suffix(".lock"), wait=True):  # concurrent runs need the same table
                if not path.exists():
                    atomic_text(path, json.dumps(policy_table(self._play()), sort_keys=True))
        return read_json(path)

    def measure(self, seed: int) -> tuple[dict[str, float], int]:
        """METRICS of one tree per task, and their environment steps."""
        from stages.environments.keydoor.exact import ExactValues, from_table

        table = from_table(self.table())
        of_policy = {one.task_id: ExactValues(one, self.domain.settings, table) for one in self.tasks}
        of_best = {one.task_id: ExactValues(one, self.domain.settings, gamma=GAMMA) for one in self.tasks}
        params = self.params.section("annotate", self.name)
        with self._pool() as pool:
            search = Search(self.player.engine, self.player.chat, pool, params, seed, self.params.model.max_length)
            trees = search.grow(self.tasks)

        def exact(tree: Sequence[Row], node: int) -> tuple[float, float]:
            actions = []
            name = tree[0]["task_id"]
            while node:
                actions.append(action_key(tree[node]["action"]))
                node = tree[node]["parent"]
            policy, best = (values[name].episode(actions[::-1])[-1].q for values in (of_policy, of_best))
            return policy, best

        tokens = sum(tree.counters["policy_tokens"] for tree in trees)
        steps = sum(tree.counters["environment_steps"] for tree in trees)
        return score_labels([row for tree in trees for row in tree.rows()], params, exact, tokens), steps


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.claims.mcts_labels", description=(__doc__ or "").strip())
    parser.add_argument("--settings", type=Path, required=True, help="the run's params.yaml")
    parser.add_argument("--result", type=Path, required=True, help="where its metrics are written")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--tasks", type=int, default=TASKS, help=f"tasks of keydoor (default: {TASKS})")
    parser.add_argument("--episodes", type=int, default=EPISODES, help=f"episodes of each for the policy (default: {EPISODES})")
    options = parser.parse_args()
    die_with_parent()
    import torch

    torch.set_num_threads(options.threads)
    try:
        params = parse_params(yaml.safe_load(options.settings.read_text(encoding="utf-8")), str(options.settings))
        section, seed = params.section("annotate", params.domains[0]), params.rl.seed or 0
        if uses_value_model(section.evaluation):
            raise ParamsError("lane labels needs rollouts; set annotate.evaluation.kind to rollout")
        on_keydoor, steps = Keydoor(params, options.tasks, options.episodes).measure(seed)
    except ParamsError as error:
        print(f"mcts labels: {error}", file=sys.stderr)
        return 2
    found = {"labels.known": known(section, seed), "labels.keydoor": on_keydoor}
    flat = {f"{world}.{name}": round(number, 6) for world, metrics in found.items() for name, number in metrics.items()}
    write_json(options.result, {**flat, "environment_steps": steps})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
