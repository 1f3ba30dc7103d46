"""From trees to step credit with graded rewards: annotate and rl on the shop environment with a tiny policy."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from stages import annotate, rl
from stages.environments.protocol import Observation, Step
from stages.environments.registry import load_domain
from stages.params import parse_params
from stages.records.episode import read_json, read_rows, write_json, write_tasks
from stages.records.task import Task
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker
from stages.values.step_value import StepValueModel

VALUES: dict[str, Any] = {
    "domains": ["shop"],
    "per_domain": {"shop": {}},
    "resources": {"threads": 1, "slots": 16, "tokens_per_batch": 1024},
    "model": {"max_length": 160},
    "annotate": {
        "tasks": 4,
        "iterations": 12,
        "expand_k": 3,
        "sampling": {"max_tokens": 2, "top_k": 3},
        "labels": {"min_visits": 1},
        "value_model": {"rollouts": False},
    },
    "rl": {
        "steps": 1,
        "tasks_per_step": 3,
        "group_size": 4,
        "dead_groups": "keep",
        "sampling": {"max_tokens": 2},
        "credit": {"kind": "annotated"},
    },
}


class ShortShop:
    """The shop for a random policy: a hash of its text picks a move, sometimes the expert's; pages are shortened."""

    def __init__(self, domain: Any, folder: Path) -> None:
        self.domain, self.shop = domain, domain.make(folder)

    def reset(self, task: Task) -> Observation:
        self.shop.reset(task)
        return Observation("shop")

    def step(self, action: str) -> Step:
        moves = [self.domain.expert(self.shop), *(move for move in self.shop.admissible() if "buy" in move)]
        moves += [*self.shop.admissible()][:1]
        move = hashlib.sha256(action.encode()).digest()[0] % len(moves)
        step = self.shop.step(moves[move])
        return Step(Observation(f"door {move}"), step.reward, True, step.terminated, step.truncated, 1.0, step.terms)

    def snapshot(self) -> Any:
        return self.shop.snapshot()

    def restore(self, state: Any) -> None:
        self.shop.restore(state)

    def state_key(self) -> str:
        return self.shop.state_key()

    def close(self) -> None: ...


@pytest.fixture
def shop(tmp_path: Path, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> StageContext:
    own = load_domain("shop", {"max_turns": 5})
    worlds = tmp_path / "data/curated/shop/worlds"
    worlds.mkdir(parents=True)
    tasks = own.build([record for record in own.recipes(24, 0) if record["split"] == "train"], worlds, 1)
    domain = SimpleNamespace(make=lambda folder: ShortShop(own, folder), settings=own.settings)
    monkeypatch.setattr(annotate, "open_domain", lambda name, settings: domain)
    monkeypatch.setattr(rl, "open_domain", lambda name, settings: domain)
    write_tasks(tmp_path / "data/curated/shop/tasks.parquet", tasks)
    write_json(tmp_path / "data/rollouts/shop/difficulty.json", {task.task_id: 0.5 for task in tasks})
    shutil.copytree(tiny_policy, tmp_path / "data/models/sft")
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(VALUES))
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": {"rl": {"params": list(VALUES)}}}))
    return StageContext("annotate", "shop", parse_params(VALUES), tmp_path, Tracker())


def test_step_credit_uses_values_of_graded_returns(shop: StageContext):
    """Contract: labels lie between graded returns and are not success rates, the value model learns them, and rl credits turns
    with its r + V' - V, by which the advantages of an episode's turns differ."""
    annotate.run(shop)
    rows = read_rows(shop.root / "data/annotated/shop/nodes.parquet")
    paid = {row["reward"] for row in rows} - {0.0, 1.0}
    assert paid, "some purchases are partly correct"
    roots = [row for row in rows if not row["node"]]
    assert sum(row["R"] for row in roots) > sum(row["n_success"] for row in roots)
    report = read_json(shop.reports / "annotate/shop.json")["value_model"]
    expected = sum(row["R"] for row in roots) / sum(row["n_rollouts"] for row in roots)
    assert report["train"]["mean_value"] == pytest.approx(expected, abs=0.3)
    values = StepValueModel.load(shop.root / "data/annotated/shop/value_model")
    rl.run(StageContext("rl", "shop", shop.params, shop.root, Tracker()))
    samples = read_rows(shop.root / "data/rl/shop/samples.parquet")
    checked = 0
    for row in samples:
        starts = [turn["start"] - 1 for turn in row["turns"]]
        tokens = torch.tensor([row["token_ids"]])
        v = values.turn_values(tokens, torch.tensor([tokens.shape[1]]), torch.tensor([starts]))[0].tolist()
        rewards = [turn["reward"] for turn in row["turns"]]
        credit = [reward + after - before for reward, before, after in zip(rewards, v, [*v[1:], 0.0], strict=True)]
        advantages = [row["advantages"][turn["start"]] for turn in row["turns"]]
        for turn in range(1, len(advantages)):
            assert advantages[turn] - advantages[0] == pytest.approx(credit[turn] - credit[0], abs=1e-4)
            checked += 1
        assert sum(credit) == pytest.approx(row["reward"] - v[0], abs=1e-5)
        assert row["credit"] == pytest.approx(credit, abs=1e-4), "kept for the viewer"
    assert checked > 10
