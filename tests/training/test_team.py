"""Teams in stage rl: MARFT by its name, its limit, agents with adapters on a shared base, and the same bytes after a kill."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from stages.agent.policy import load_policy, policy_hash
from stages.agent.team import read_team
from stages.claims.experiment import load_experiment
from stages.engine.adapters import Adapter
from stages.engine.torch_engine import TorchEngine
from stages.evaluation.team_episodes import team_hash
from stages.records.episode import read_rows
from training.toys import KilledError, kill_at_step, outputs, read_history, run

RL: dict[str, Any] = {
    **{"algorithm": "marft", "steps": 2, "tasks_per_step": 2, "group_size": 3, "learning_rate": 0.01, "warmup_steps": 0},
    **{"checkpoint_every": 1, "sampling": {"max_tokens": 4}, "epochs": 2},
}
LORA = {"lora": {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj"]}}
FOLDER = "data/models/rl/toy"
ROOT = Path(__file__).resolve().parents[2]


def model_of(tiny_policy: Path, **keys: Any) -> dict[str, Any]:
    return {"path": str(tiny_policy), "max_length": 128, **keys}


@pytest.mark.slow
def test_adapters_on_a_shared_base_resume_to_the_same_bytes(make_context, tiny_policy: Path) -> None:
    """Contract: planner and solver train an adapter each, which load and evaluate as adapters of the start policy; a killed run
    ends with the same bytes; records say who spoke in which order."""
    model = model_of(tiny_policy, **LORA)
    whole, killed = (make_context("rl", name, rl=RL, model=model) for name in ("whole", "killed"))
    run(whole)
    kill_at_step(killed, 1)
    with pytest.raises(KilledError):
        run(killed)
    run(make_context("rl", "killed", rl=RL, model=model))
    assert outputs(whole.root) == outputs(killed.root)

    solver, planner = whole.root / FOLDER, whole.root / FOLDER / "agents" / "planner"
    found = [load_file(folder / "adapter_model.safetensors") for folder in (solver, planner)]
    assert found[0].keys() == found[1].keys()
    assert not any(found[0][name].equal(found[1][name]) for name in found[0] if "lora_B" in name)
    assert Adapter(planner).base.resolve() == tiny_policy.resolve()
    assert load_policy(planner).hash != load_policy(solver).hash
    team = read_team(solver, "toy")
    assert team is not None
    assert [(member.role, member.sees) for member in team.members] == [("planner", []), ("solver", ["planner"])]
    assert team_hash("alone", solver, ["search"]) == "alone" != team_hash("alone", solver, ["toy"])

    rows = read_history(whole.root)
    assert all(row["planner/grad_norm"] > 0 and row["solver/grad_norm"] > 0 for row in rows)
    assert all(row["planner/turns"] == row["solver/turns"] == row["turns"] == 2 for row in rows)
    assert [row["environment_steps"] for row in rows] == [12, 12], "plans are no actions"
    assert all(0 <= row["planner/followed"] <= 1 and "solver/followed" not in row for row in rows)
    report = json.loads((whole.root / "reports/rl/toy.json").read_text())
    assert report["ledger/environment_tokens_trained"] == 0
    samples = read_rows(whole.root / "data/rl/toy/samples.parquet")
    assert {(sample["role"], tuple(sample["moves"])) for sample in samples} == {("planner", (0, 2)), ("solver", (1, 3))}
    assert all(sample["play"] == sample["episode_id"].removesuffix("/planner") for sample in samples)
    written = sum(sum(owner == 1 for owner in sample["owner"]) for sample in samples) * RL["epochs"]
    trained, skipped = (report[f"ledger/policy_tokens_{what}"] for what in ("trained", "skipped"))
    assert trained + skipped == written, "both agents' tokens, once per epoch"
    assert (skipped > 0) == any(row["planner/skipped"] + row["solver/skipped"] > 0 for row in rows)


def test_one_engine_plays_all_roles_on_a_base(make_context, tiny_policy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: one engine, with one cache, for roles that share their weights and for adapters on a shared base; roles with all
    weights of their own have an engine each. The same bytes come from an engine for each adapter."""
    made: list[TorchEngine] = []
    make = TorchEngine.__init__

    def counted(self: TorchEngine, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(TorchEngine, "__init__", counted)
    whole, lora = model_of(tiny_policy), model_of(tiny_policy, **LORA)
    runs = {"adapters": (lora, {}), "shared": (whole, {"weights": "shared"}), "own": (whole, {}), "apart": (lora, {})}
    engines, found = {}, {}
    for name, (model, team) in runs.items():
        if name == "apart":
            monkeypatch.setattr("stages.training.rl.team.share_base", lambda *_: False)
        context = make_context("rl", name, rl={**RL, "steps": 1, "epochs": 1, "team": team}, model=model)
        run(context)
        engines[name], found[name] = len(made), outputs(context.root)
        made.clear()
    assert engines == {"adapters": 1, "shared": 1, "own": 2, "apart": 2}
    assert found["adapters"] == found["apart"] != found["own"]


def test_agent_by_agent_leaves_the_other_adapter_as_it_is(make_context, tiny_policy: Path) -> None:
    """Contract: while one agent is trained the other's weights are bit-identical before and after; at the level of tokens the
    order is the other one."""
    changed = {}
    for name, method in (("turns", "marft"), ("tokens", "marft_token")):
        section = {**RL, "algorithm": method, "team": {"interval": 1000}, "loss": {"kl_stop": 1.0}}
        context = make_context("rl", name, rl=section, model=model_of(tiny_policy, **LORA))
        (first, *_) = run(context)
        folders = {"solver": context.root / FOLDER, "planner": context.root / FOLDER / "agents/planner"}
        for role, folder in folders.items():
            factors = load_file(folder / "adapter_model.safetensors")
            changed[name, role] = any(bool(value.any()) for key, value in factors.items() if "lora_B" in key)
            assert changed[name, role] == (first.get(f"{role}/grad_norm", 0.0) > 0)
    assert changed == {
        **{("turns", "planner"): True, ("turns", "solver"): False},
        **{("tokens", "planner"): False, ("tokens", "solver"): True},
    }


def test_the_experiments_untrained_team_is_the_start(make_context, tiny_policy: Path) -> None:
    """Contract: the arm of the board's experiment plays and fits the critic, and leaves the weights of both members as they are;
    all arms train adapters on a shared base."""
    experiment = load_experiment(ROOT / "reports/claims/marft.yaml")
    arm = experiment.arms["untrained"]["rl"]
    context = make_context("rl", rl={**RL, "steps": 8, **arm}, model=model_of(tiny_policy, **LORA))
    rows = run(context)
    assert len(rows) == 5
    assert all(row["critic_loss"] > 0 and "grad_norm" not in row for row in rows)
    for folder in (context.root / FOLDER, context.root / FOLDER / "agents/planner"):
        factors = load_file(folder / "adapter_model.safetensors")
        assert not any(bool(value.any()) for name, value in factors.items() if "lora_B" in name)
    lora = {"rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}
    assert experiment.shared["model"]["lora"] == lora
    assert not any("model" in changes for changes in experiment.arms.values())
    assert yaml.safe_load((ROOT / "profiles/methods/marft.yaml").read_text())["model"]["lora"] == lora


PPO: dict[str, Any] = {
    "advantage": {"gamma": 1.0, "lam": 0.9},
    "loss": {"entropy_coef": 0.01, "kl_stop": 1.7e-6},
    "critic": {
        **{"head": {"loss": "mse"}, "trunk": "frozen", "hidden": [8], "learning_rate": 5e-4, "coef": 1.0, "warmup_steps": 0},
        **{"huber_delta": 10.0, "value_clip": 0.2},
    },
    "minibatches": 2,
}
"""The keys of PPO that marft_token has by default, or that the test gives both."""


def test_a_team_of_one_is_ppo(make_context, tiny_policy: Path) -> None:
    """Contract: single-agent PPO is the limit, bit for bit: the history's columns, the weights, and the skipped steps."""
    ppo = make_context("rl", "ppo", rl={**RL, **PPO, "algorithm": "ppo"})
    team = {**RL, **PPO, "algorithm": "marft_token", "team": {"members": [{"role": "solver"}]}}
    ours = make_context("rl", "ours", rl=team)
    expected, rows = run(ppo), run(ours)
    assert [{name: row[name] for name in expected[0]} for row in rows] == expected
    assert any(0 < row["skipped"] < 1 for row in rows), "minibatches after the first have drifted"
    report = json.loads((ours.root / "reports/rl/toy.json").read_text())
    counts = [report[f"ledger/policy_tokens_{what}"] for what in ("trained", "skipped", "dropped")]
    assert all(counts[:2])
    assert sum(counts) == RL["epochs"] * sum(round(row["policy_tokens"] * row["episodes"]) for row in rows)
    weights = [load_file(context.root / FOLDER / "model.safetensors") for context in (ppo, ours)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_shared_weights_are_trained_once_on_all_texts(make_context, tiny_policy: Path) -> None:
    """Contract: with weights: shared there is one policy, whose updates cover the texts of all, and no folder of agents."""
    section = {**RL, "steps": 1, "team": {"weights": "shared"}, "loss": {"kl_stop": 10.0}, "epochs": 1}
    context = make_context("rl", rl=section)
    (row,) = run(context)
    assert (context.root / FOLDER / "team.json").exists()
    assert not (context.root / FOLDER / "agents").exists()
    assert policy_hash(context.root / FOLDER) != policy_hash(tiny_policy)
    report = json.loads((context.root / "reports/rl/toy.json").read_text())
    planner = hashlib.sha256((ROOT / "data/raw/prompts/planner.txt").read_bytes()).hexdigest()
    assert report["team"] == {"roles": ["planner", "solver"], "prompts": {"planner.txt": planner}}
    written = (row["planner/policy_tokens"] + row["solver/policy_tokens"]) * row["episodes"]
    assert report["ledger/policy_tokens_trained"] == pytest.approx(written)
    assert "planner/loss" not in row
    assert row["solver/loss"] == row["loss"]
