"""Uses of annotate's step-value model in rl besides step credit: initial critics and task sampling."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stages import rl
from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.policy import load_policy
from stages.algorithms.algorithm import resolve
from stages.algorithms.parts.turn_critic import TurnCritic
from stages.algorithms.settings import Rl
from stages.algorithms.sources.static import TaskSampler
from stages.runtime.resources import Resources
from stages.training.common.batches import trajectory_batch, turn_boundaries
from stages.training.common.loop import make_processes
from stages.training.rl import online
from stages.training.rl.curriculum import first_values
from stages.training.rl.models import Models
from stages.values.settings import HeadParams
from stages.values.step_value import StepValueModel
from training.toys import FirstLetterEnvironment, as_processes, letter_tasks, make_episode

RL: dict[str, Any] = {
    "steps": 2,
    "tasks_per_step": 3,
    "group_size": 3,
    "learning_rate": 0.01,
    "warmup_steps": 0,
    "checkpoint_every": 1,
    "sampling": {"max_tokens": 3},
}


def store_value_model(folder: Path, tiny_policy: Path, head: HeadParams, spread: float = 0.3) -> StepValueModel:
    """Save a step-value model as annotate does, with values that differ between histories."""
    model = StepValueModel(load_policy(tiny_policy, attention="sdpa").model.base_model, head)
    torch.nn.init.normal_(model.output.weight, std=spread, generator=torch.Generator().manual_seed(2))
    if head.loss == "mse":
        torch.nn.init.constant_(model.output.bias, 0.5)
    model.save(folder / "value_model")
    return StepValueModel.load(folder / "value_model")


@pytest.mark.parametrize("algorithm", ["ppo", "a2c", "archer"])
@pytest.mark.parametrize("shared", [False, True])
def test_critic_starts_from_the_step_value_model(tiny_policy, tmp_path, algorithm: str, shared: bool):
    """Contract: before the first update the critic's values of histories before turns are the step-value model's."""
    head = HeadParams()
    model = store_value_model(tmp_path, tiny_policy, head)
    section = {"algorithm": algorithm, "critic": {"init": "value_model", "head": head}, "share_prefixes": shared}
    algorithm_ = resolve(Rl.model_validate(section), 64)
    processes = make_processes(Resources(threads=1))
    policy = load_policy(tiny_policy, attention="sdpa").model
    shapes = (("0", "a", [3, 2], 1.0), ("1", "a", [1], 0.0), ("2", "b", [2, 2, 1], 0.0))
    batch = trajectory_batch([make_episode(*shape) for shape in shapes])
    found = Models.make(algorithm_, policy, tmp_path, processes, 512).annotate(batch, algorithm_)
    before = turn_boundaries(batch)
    real = before >= 0
    expected = model.turn_values(batch.token_ids, batch.lengths, before)[real]
    assert float(expected.std()) > 0.001
    if algorithm == "archer":
        for twin in range(2):
            torch.testing.assert_close(found.get(TurnCritic).v[..., twin][real], expected, atol=1e-5, rtol=1e-5)
    else:
        assert found.values is not None
        rows = real.nonzero()[:, 0]
        torch.testing.assert_close(found.values[rows, before[real] + 1], expected, atol=1e-5, rtol=1e-5)
    untrained = resolve(Rl.model_validate({**section, "critic": {"head": head}}), 64)
    plain = Models.make(untrained, policy, tmp_path, processes, 512).annotate(batch, untrained)
    values = plain.get(TurnCritic).v if algorithm == "archer" else plain.values
    assert values is not None
    assert float(values[values != 0].std()) < 1e-5


def test_step_value_model_with_another_head_is_rejected(tiny_policy, tmp_path):
    store_value_model(tmp_path, tiny_policy, HeadParams(loss="mse"))
    algorithm = resolve(Rl(algorithm="ppo", critic={"init": "value_model"}), 64)
    with pytest.raises(ValueError, match=r"rl\.critic\.init: value_model needs the step-value model's head"):
        Models.make(algorithm, load_policy(tiny_policy).model, tmp_path, make_processes(Resources(threads=1)), 512)


def test_ppo_trains_from_the_step_value_model(make_context, tiny_policy):
    section = {**RL, "algorithm": "ppo", "critic": {"init": "value_model", "warmup_steps": 0}}
    context = make_context("rl", rl=section)
    with pytest.raises(FileNotFoundError, match="value_model"):
        rl.run(context)
    store_value_model(context.root / "data/annotated/toy", tiny_policy, HeadParams())
    rl.run(context)
    with (context.root / "reports/rl/toy_history.csv").open() as handle:
        rows = list(csv.DictReader(handle))
    assert all(float(row["critic_mse"]) < 2 for row in rows)


def test_tasks_are_drawn_by_the_value_of_their_first_state(make_context, tiny_policy, monkeypatch):
    """curriculum.kind value: p of every task is the model's value after the first observation; tasks are drawn with weight
    p (1 - p) + floor, and rollouts update p."""
    made: list[tuple[TaskSampler, dict[str, float]]] = []

    def make(*arguments: Any) -> TaskSampler:
        made.append((TaskSampler(*arguments), dict(arguments[1])))
        return made[-1][0]

    monkeypatch.setattr(online, "TaskSampler", make)
    context = make_context("rl", rl={**RL, "steps": 1, "curriculum": {"kind": "value", "floor": 0.01}})
    with pytest.raises(FileNotFoundError, match="value_model"):
        rl.run(context)
    model = store_value_model(context.root / "data/annotated/toy", tiny_policy, HeadParams(loss="mse"), 0.03)
    rl.run(context)
    ((sampler, given),) = made
    chat = Chat(load_policy(tiny_policy).tokenizer)
    tasks = [task for task in letter_tasks(16) if task.split == "train"]
    expected = {}
    for task in tasks:
        prompt = torch.tensor([chat.prompt_tokens(f"{task.prompt}\nyou are in room {task.seed}")])
        length = prompt.shape[1]
        (value,) = model.turn_values(prompt, torch.tensor([length]), torch.tensor([[length - 1]])).flatten().tolist()
        expected[task.task_id] = min(max(value, 0.0), 1.0)
    assert len(set(expected.values())) > 6
    assert given == pytest.approx(expected, abs=1e-5)
    weights = TaskSampler(given, given, sampler.params, 3).weights()
    assert weights == pytest.approx([p * (1 - p) + 0.01 for _, p in sorted(expected.items())], abs=1e-5)
    assert sum(sampler.success[name] != value for name, value in given.items()) == 3


def test_processes_split_the_scoring_of_tasks(tiny_policy):
    """Contract: two processes split the tasks, and both get all values, equal to those of one process."""
    policy = load_policy(tiny_policy)
    model = StepValueModel(policy.model.base_model, HeadParams(loss="mse"))
    torch.nn.init.constant_(model.output.bias, 1.5)
    chat, tasks = Chat(policy.tokenizer), letter_tasks(5)

    parts: list[list[list[Any]]] = []

    def values(index: int, count: int, gather: Callable[[list[Any]], list[list[Any]]]) -> dict[str, float]:
        def joined(own: list[Any]) -> list[Any]:
            parts.append(gather(own))
            return [items[turn] for turn in range(len(parts[-1][0])) for items in parts[-1] if turn < len(items)]

        processes = SimpleNamespace(
            device=torch.device("cpu"),
            index=index,
            count=count,
            shard=lambda items: [(item, True) for item in items[index::count]],
            gather=joined,
        )
        with EnvironmentPool(FirstLetterEnvironment) as pool:
            return first_values(tasks, pool, chat, model, 64, processes)

    found = as_processes(2, lambda index, gather: values(index, 2, gather))
    assert all(parts[-1])
    assert found == [values(0, 1, lambda own: [own])] * 2
    assert sorted(found[0]) == sorted(task.task_id for task in tasks)
    assert {value for half in found for value in half.values()} == {1.0}
