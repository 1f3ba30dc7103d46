"""The annotation experiment: hand-computed metrics, known worlds, equal cost of the arms, shared start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stages.annotation.settings import Annotate
from stages.claims import mcts_labels
from stages.claims.arms import arm_values, common_values, run_values
from stages.claims.checks import check_experiment
from stages.claims.experiment import FOLDER, Experiment, load_experiment
from stages.claims.known_tree import ARMS, value
from stages.claims.label_metrics import METRICS, WORLDS, first_error_accuracy, rank_correlation, score_labels
from stages.claims.plan import metrics_of
from stages.claims.runner import ExperimentRunner
from stages.params import ROOT
from stages.records.episode import write_json
from stages.runtime.workspace import EvaluationWorkspace


def row(node: int, parent: int, n: int, c: int, end: bool = False) -> dict[str, Any]:
    base = {"task_id": "t", "node": node, "parent": parent, "depth": 1, "action": f"go {node}", "N": n, "W": float(c)}
    base |= dict.fromkeys(("R", "R2"), 0.0 if end else float(c))
    return {**base, "n_success": c, "n_rollouts": n, "reward": float(end and c > 0), "terminal": end, "truncated": False}


def test_label_metrics_of_a_small_tree() -> None:
    """Two labelled actions with q 1 and 0.5 compared with exact values; the pair prefers the one of lower Q*."""
    tree = [
        row(0, -1, 8, 6),
        row(1, 0, 4, 4),
        row(2, 0, 4, 2),
        row(3, 1, 4, 4, True),
        row(4, 2, 2, 2, True),
        row(5, 2, 2, 0, True),
    ]
    exact = {1: (0.7, 0.4), 2: (0.5, 0.9), 3: (1.0, 1.0), 4: (1.0, 1.0), 5: (0.0, 0.0)}
    found = score_labels(tree, Annotate(labels={"pool": False}), lambda tree, node: exact[node], tokens=500)
    assert tuple(found) == METRICS
    assert found["rmse_policy"] == pytest.approx((0.09 / 2) ** 0.5)
    assert found["rmse_best"] == pytest.approx(((0.36 + 0.16) / 2) ** 0.5)
    assert (found["rank_policy"], found["rank_best"]) == (pytest.approx(1.0), pytest.approx(-1.0))
    assert found["pair_accuracy_policy"] == 1.0
    # By Q*, preferring 1 to 2 is wrong; below 2, preferring the success to the failure is right.
    assert (found["pair_accuracy"], found["right_pairs"], found["labels"]) == (0.5, 0.0, 4.0)
    assert found["trees_with_pairs"] == 1.0
    assert found["first_error_accuracy"] == 1.0, "the last step of the only failure"
    assert rank_correlation(np.array([1.0, 1.0]), np.array([0.0, 1.0])) == 0.0


def test_first_error_accuracy() -> None:
    """Contract: of two failures the tree locates one's first error, the last step; below the other's first step no rollout
    succeeded, though the policy may still succeed from there."""
    tree = [
        row(0, -1, 3, 1),
        row(1, 0, 2, 1),
        row(2, 0, 1, 0),
        row(3, 1, 1, 1, True),
        row(4, 1, 1, 0, True),
        row(5, 2, 1, 0, True),
    ]
    exact = {1: 0.5, 2: 0.3, 3: 1.0, 4: 0.0, 5: 0.0}
    assert first_error_accuracy([tree], lambda tree, node: (exact[node], 0.0)) == 0.5
    exact[2] = 0.0
    assert first_error_accuracy([tree], lambda tree, node: (exact[node], 0.0)) == 1.0
    assert first_error_accuracy([tree[:4]], lambda tree, node: (exact[node], 0.0)) == 0.0


def test_known_worlds_have_exact_values() -> None:
    """Contract: in worlds of kind sure Q* is 0 or 1, the policy's Q is at most that, and a long search finds both."""
    for world in range(20):
        for arm in range(ARMS):
            policy, best = value(world, (arm,), kind="sure"), value(world, (arm,), best=True, kind="sure")
            assert best in (0.0, 1.0)
            assert policy <= best
    few = mcts_labels.known(Annotate(iterations=200, expand_k=8), seed=1, worlds=8)
    again = mcts_labels.known(Annotate(iterations=200, expand_k=8), seed=1, worlds=8)
    other = mcts_labels.known(Annotate(iterations=200, expand_k=8), seed=2, worlds=8)
    assert few == again != other
    assert mcts_labels.KNOWN_TOKENS * 8 <= few["tokens"] < (mcts_labels.KNOWN_TOKENS + 12) * 8
    assert few["pair_accuracy"] > 0.6
    assert few["rank_policy"] > 0.5


def test_all_arms_spend_the_same_tokens() -> None:
    """Contract: every arm spends the same tokens in the known worlds, up to its last rollouts, except OmegaPRM, which may run out
    of rollouts to search."""
    experiment = load_experiment(ROOT / FOLDER / "mcts_annotation.yaml")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    checked = check_experiment(experiment, params, "mcts_annotation.yaml")
    for arm, one in checked.items():
        section = one.section("annotate", "keydoor")
        assert section.stop.policy_tokens == 2400, arm
        spent = mcts_labels.known(section, seed=0, worlds=4)["tokens"] / 4
        least = 0 if arm == "omega" else mcts_labels.KNOWN_TOKENS
        assert least <= spent <= mcts_labels.KNOWN_TOKENS + 64, (arm, spent)


def test_arms_share_a_start_and_differ_only_in_annotate() -> None:
    """Contract: everything before the trees is the same for all arms and seeds; the seed is that of the searches."""
    experiment = load_experiment(ROOT / FOLDER / "mcts_annotation.yaml")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    common = common_values(experiment, params)
    assert common["annotate"]["iterations"] == 4
    for arm in experiment.arms:
        values = run_values(experiment, arm, 3, params)
        assert values["rl"]["seed"] == 3, "read by stages/claims/mcts_labels.py"
        assert values["seed"] == params["seed"]
        assert {**values, "annotate": 0, "rl": 0} == {**common, "annotate": 0, "rl": 0}
        assert arm_values(experiment, arm, params)["annotate"] == values["annotate"]
    assert set(metrics_of(experiment)) == {f"labels.{world}.{name}" for world in WORLDS for name in METRICS}


def test_labels_lane_rejects_a_training_budget() -> None:
    values = yaml.safe_load((ROOT / FOLDER / "mcts_annotation.yaml").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="lane labels plays no episodes"):
        Experiment.model_validate({**values, "budget": {"environment_steps": 5}})
    with pytest.raises(ValueError, match="it ends the runs of lane rl"):
        Experiment.model_validate({**values, "lane": "rl"})


def test_label_run_uses_the_shared_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a run of lane labels works in the workspace that all arms start from, with the arm's parameters, and returns all
    metrics."""
    experiment = load_experiment(ROOT / FOLDER / "mcts_annotation.yaml")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    started, commands = [], []
    metrics = dict.fromkeys(metrics_of(experiment), 0.5)

    def start(self: ExperimentRunner, values: Any) -> EvaluationWorkspace:
        started.append(values)
        return EvaluationWorkspace(tmp_path)

    def run(runner: ExperimentRunner, workspace: EvaluationWorkspace, programs: list[list[str]], values: Any) -> float:
        (arguments,) = programs
        commands.append(arguments[:1])
        folder = workspace.folder
        settings = yaml.safe_load((folder / arguments[arguments.index("--settings") + 1]).read_text(encoding="utf-8"))
        assert settings["annotate"]["selection"]["rule"] == "flat"
        write_json(folder / arguments[arguments.index("--result") + 1], {**metrics, "environment_steps": 7})
        return 1.5

    monkeypatch.setattr(ExperimentRunner, "start", start)
    monkeypatch.setattr(ExperimentRunner, "_run", run)
    values, common = run_values(experiment, "flat", 1, params), common_values(experiment, params)
    monkeypatch.setattr(ExperimentRunner, "code", "")
    found = ExperimentRunner(tmp_path, "c" * 40, program="labels").measure("run", values, common, metrics_of(experiment))
    assert started == [common]
    assert commands == [["stages.claims.mcts_labels"]]
    assert (found.metrics, found.environment_steps, found.commit) == (metrics, 7, "c" * 40)
