"""Stored runs: which are kept, repeated or reused, and their rows and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rloo_experiment import CHOICE, PARAMS, SPEC, experiment, fill, outcome, write

from stages.claims.experiment import FOLDER, Experiment, load_experiment
from stages.claims.judging import write as write_results
from stages.claims.plan import planned_runs, shaping
from stages.claims.results import Results
from stages.claims.rows import Tables, curve_of, paths, task_rows
from stages.claims.session import drop_outdated
from stages.records.sections import params_hash

ROOT = Path(__file__).resolve().parents[2]


def missing(results: Results, runs: list) -> list[str]:
    return [run.name for run in results.missing(runs)]


def test_finished_runs_are_kept_unless_parameters_change(tmp_path: Path) -> None:
    one = write(tmp_path, looks=[3, 5])
    runs, results = planned_runs(one, PARAMS), Results()
    assert [run.name for run in runs[:3]] == ["rloo/0", "grpo/0", "rloo/1"], "seed by seed"
    fill(results, runs, [0.5, 0.5, 0.5], [0.4])
    write_results(tmp_path, "rloo", one, results)
    loaded = Results.load(tmp_path, "rloo")
    assert missing(loaded, runs) == ["grpo/1", "grpo/2", "rloo/3", "grpo/3", "rloo/4", "grpo/4"]
    faster = planned_runs(one, {**PARAMS, "resources": {"device": "cpu", "threads": 64, "slots": 8}, "report": {"episodes": 1}})
    assert len(loaded.missing(faster)) == 6, "resources and report are not part of a run"
    spelled = planned_runs(one, {**PARAMS, "sft": {"epochs": 4.0}, "rl": {**PARAMS["rl"], "credit": {"key": None}}})
    assert len(loaded.missing(spelled)) == 6, "nor are explicit defaults"
    changed = {**PARAMS, "rl": {"learning_rate": 0.002}}
    assert len(loaded.missing(planned_runs(one, changed))) == 10
    assert drop_outdated(one, PARAMS, loaded) == 0
    assert drop_outdated(one, changed, loaded) == 4
    assert loaded.outcomes == {}


def test_run_key_depends_only_on_its_parameters() -> None:
    """Contract: a run stays valid if a claim or metric is added; each seed's key is the hash of its own settings."""
    more = experiment(
        measured=["panel.reward"], claims=[*SPEC["claims"], {**SPEC["claims"][0], "metric": "panel.turns", "margin": 1}]
    )
    runs = planned_runs(experiment(), PARAMS)
    assert [run.key for run in runs] == [run.key for run in planned_runs(more, PARAMS)]
    for run in (runs[0], runs[-1]):
        assert run.key == params_hash(shaping(experiment(), run.values))
    assert len({run.key for run in runs}) == 2 * 20
    annotate = Experiment.model_validate(CHOICE)
    for run in planned_runs(annotate, PARAMS, seeds=[0, 1, 5]):
        assert run.key == params_hash(shaping(annotate, run.values)), run.name


def test_keys_outlive_a_changed_default() -> None:
    """Contract: 48 trees were the default when the first runs were made, whose keys do not name them; no trees are named."""
    (run, *_), usual = planned_runs(experiment(), PARAMS), {**PARAMS.get("annotate", {})}
    shaped = {count: shaping(experiment(), {**run.values, "annotate": {**usual, "tasks": count}}) for count in (0, 8, 48)}
    assert "tasks" not in shaped[48].get("annotate", {})
    assert [shaped[count]["annotate"]["tasks"] for count in (0, 8)] == [0, 8]
    usual = {**PARAMS.get("rollout", {})}
    shaped = {count: shaping(experiment(), {**run.values, "rollout": {**usual, "tasks": count}}) for count in (0, 96)}
    assert "tasks" not in shaped[96].get("rollout", {})
    assert shaped[0]["rollout"]["tasks"] == 0


def test_keys_of_several_domains_outlive_it_too() -> None:
    """Contract: lane merge repeats what its arms share for every domain, which then overrides the section."""
    merge = load_experiment(ROOT / FOLDER / "merge_sparse.yaml")
    usual = planned_runs(merge, PARAMS, seeds=[1])[0]
    assert usual.values["per_domain"]["search"]["rollout"] == {"tasks": 96}
    assert shaping(merge, usual.values)["per_domain"]["search"].get("rollout") is None
    fewer = planned_runs(merge.model_copy(update={"shared": {**merge.shared, "rollout": {"tasks": 8}}}), PARAMS, seeds=[1])[0]
    assert fewer.key != usual.key


def test_run_without_a_metric_is_repeated_unless_rows_give_it() -> None:
    """Contract: pass@k and difficulty can be computed after the runs; metrics that were not measured cannot."""
    rows = [
        {"task_id": name, "cluster": name, "difficulty": level, "attempts": 4, "successes": hits}
        | dict.fromkeys(("reward", "turns", "tokens", "accepted", "cost"), 0.5)
        for name, level, hits in (("a", 1.0, 4), ("b", 1.0, 2), ("c", 2.0, 0))
    ]
    (run, *_), results = planned_runs(experiment(), PARAMS), Results()
    results.add(run, replace(outcome(0.5), rows=rows, curve=curve([0.0, 0.2, 0.4, 0.6, 0.8])))
    found = {
        **{"panel.pass_at_k.2": (1.0 + 5 / 6 + 0.0) / 3, "panel.difficulty.1": 0.75, "panel.reward": 0.5},
        **{"history.success.first": 0.0, "history.success.last": 0.8, "history.success.mean": 0.4, "panel.success": 0.5},
    }
    for metric, value in found.items():
        required = replace(run, required=(metric,))
        assert results.missing([required]) == []
        assert results.value(run.name, metric) == pytest.approx(value), metric
    for metric in (
        "panel.pass_at_k.8",
        "panel.difficulty.3",
        "history.entropy.mean",
        "report.dead_groups",
        "panel.solutions_differ",
    ):
        assert results.missing([replace(run, required=(metric,))]), metric


def test_steps_to_success_follow_from_the_curve_of_a_reused_run() -> None:
    """Contract: steps 10, 20, 30 ... whose last five have .4, .6 and .76 on average after 5, 6 and 7: 150, 210 and 280 in all. At
    the last step the run's budget, which no table has, may have ended it, and shares that are never reached are unknown."""
    rates = [0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0]
    tables = Tables(curves={"a/0": curve(rates), "a/1": curve([0.1, None, 0.3])})
    found = {share: tables.value("a/0", f"history.steps_to_success.{share}") for share in (40, 60, 76, 88, 90)}
    assert found == {40: 150.0, 60: 210.0, 76: 280.0, 88: None, 90: None}
    assert tables.value("a/1", "history.steps_to_success.10") is None
    assert tables.value("b/0", "history.steps_to_success.10") is None


def curve(successes: Sequence[float | None]) -> list[dict[str, Any]]:
    return [
        {"step": step, "environment_steps": 10 * step, "success": success, "reward_mean": success}
        | dict.fromkeys(("entropy", "pair_accuracy", "loss"))
        for step, success in enumerate(successes, start=1)
    ]


def test_tables_are_sorted_and_byte_identical(tmp_path: Path) -> None:
    """Contract: rows and curves of all runs are in two files; equal content gives equal bytes, and dropped runs are removed."""
    row = {"task_id": "a", "cluster": "x", "difficulty": 1.0, "attempts": 2, "successes": 1}
    row |= dict.fromkeys(("reward", "turns", "tokens", "accepted", "cost"), 0.5)
    tables = Tables({"b/10": [row], "b/9": [row], "a/3": [row]}, {"b/9": curve([0.25, 0.5])})
    tables.write(tmp_path, "x")
    rows, curves = (path.read_bytes() for path in paths(tmp_path, "x"))
    loaded = Tables.load(tmp_path, "x")
    assert list(loaded.rows) == ["a/3", "b/9", "b/10"]
    assert loaded.rows["b/9"] == [row]
    assert loaded.curves == tables.curves
    loaded.write(tmp_path, "x")
    assert [path.read_bytes() for path in paths(tmp_path, "x")] == [rows, curves]
    loaded.drop_others({"a/3"})
    loaded.write(tmp_path, "x")
    assert (list(Tables.load(tmp_path, "x").rows), Tables.load(tmp_path, "x").curves) == (["a/3"], {})


def test_a_curve_is_drawn_against_the_steps_played_so_far() -> None:
    """Rows count the environment steps of their training step alone; a step without the column counts all the same."""
    steps = [
        {"step": 1, "environment_steps": 30, "success": 0.25},
        {"step": 2, "environment_steps": 20, "success": None},
        {"step": 3, "environment_steps": 10, "success": 0.5},
    ]
    places, values = curve_of(steps, "success", played=True)
    assert (places.tolist(), values.tolist()) == ([30.0, 60.0], [0.25, 0.5])
    assert curve_of(steps, "success", played=False)[0].tolist() == [1.0, 3.0]
    assert curve_of(steps, "pair_accuracy", played=True)[0].tolist() == []


def test_rows_per_task_are_means_over_attempts() -> None:
    attempts = [
        {"task_id": task, "cluster": "x", "difficulty": 1.0, "success": turns < 3, "turns": turns}
        | dict.fromkeys(("reward", "tokens", "accepted", "cost"), float(turns))
        for task, turns in (("b", 2), ("a", 1), ("b", 5))
    ]
    first, second = task_rows(attempts)
    assert (first["task_id"], first["attempts"], first["successes"], first["turns"]) == ("a", 1, 1, 1.0)
    assert (second["task_id"], second["attempts"], second["successes"], second["turns"]) == ("b", 2, 1, 3.5)


def test_runs_of_other_experiments_are_reused() -> None:
    """Contract: runs with equal parameters and seed are reused, whatever the arm's name, if they have the required metrics."""
    claims = [{**SPEC["claims"][0], "arm": "a", "against": "b"}]
    mine = experiment(arms={"a": {"rl": {"algorithm": "grpo"}}, "b": {}}, claims=claims)
    theirs, there = planned_runs(experiment(), PARAMS), Results(starts={"grpo": 0.3, "rloo": 0.3})
    fill(there, theirs, [0.5], [0.4, 0.6])
    there.tables.curves["grpo/1"] = curve([0.5])
    runs, here = planned_runs(mine, PARAMS), Results()
    assert here.reuse([there], runs) == 4, "GRPO is the default, so arms a and b are both theirs"
    assert [here.value(name, "panel.success") for name in ("a/0", "a/1", "b/1")] == [0.4, 0.6, 0.6]
    assert here.starts == {"a": 0.3, "b": 0.3}
    assert here.tables.curves["b/1"] == curve([0.5])
    assert here.reuse([there], runs) == 0
    other = experiment(claims=[{**SPEC["claims"][0], "metric": "history.success.mean"}])
    assert Results().reuse([there], planned_runs(other, PARAMS)) == 1, "only one run has a curve"
