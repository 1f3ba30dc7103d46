"""Runs of an experiment's session: its looks, their cost, and resuming after a failure or a kill."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_runner import GATE, PARAMS, SPEC, TUNE, FakeRunner, experiment, run, saved
from rloo_experiment import CHOICE

from stages.claims import session as sessions
from stages.claims.cost import cost_of
from stages.claims.experiment import Experiment
from stages.claims.plan import Outcome, Run, planned_runs
from stages.claims.results import Results, result_path
from stages.claims.session import Session, in_turn
from stages.runtime.workspace import RunFailedError

TWO_STARTS = {**CHOICE, "arms": {**CHOICE["arms"], "q": {"annotate": {"iterations": 9}, "evaluate": {"models": ["sft+q"]}}}}


class Equal(FakeRunner):
    """Arms of equal success whose differences scatter by 8 points."""

    def success(self, algorithm: str, seed: int, rate: float) -> float:
        return 0.6 + 0.08 * ((seed + (algorithm == "rloo")) % 2)


def test_decided_comparison_gets_no_further_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner, failed = run(tmp_path, experiment(tmp_path))
    assert (failed, len(runner.played), runner.released) == (0, 8, 8)
    (claim,) = saved(tmp_path)["claims"]
    assert (claim["verdict"], claim["seeds"], [look["seeds"] for look in claim["looks"]]) == ("reproduced", 4, [4])
    assert "look at 4 of 8 seeds: 0 of 1 comparisons open" in capsys.readouterr().out
    assert run(tmp_path, experiment(tmp_path))[0].played == []


def test_workspaces_of_stored_runs_are_removed(tmp_path: Path) -> None:
    """Contract: a session that is killed between storing a run and removing its workspace leaves nothing for good."""
    run(tmp_path, experiment(tmp_path))
    again, _ = run(tmp_path, experiment(tmp_path))
    assert (again.played, again.released) == ([], 8)


def test_only_arms_of_open_comparisons_get_further_seeds(tmp_path: Path) -> None:
    """Contract: grpo and pacs are compared up to the last look, rloo's claim is decided at the first; an arm that no claim names
    is measured only at the first look."""
    pacs = {"says": "PACS is better.", "arm": "pacs", "against": "grpo"}
    one = experiment(
        tmp_path,
        arms={**SPEC["arms"], "pacs": {"rl": {"algorithm": "pacs"}}, "ppo": {"rl": {"algorithm": "ppo"}}},
        claims=[*SPEC["claims"], pacs],
    )

    class Close(FakeRunner):
        def success(self, algorithm: str, seed: int, rate: float) -> float:
            if algorithm == "rloo":
                return 0.9 + 0.01 * (seed % 2)
            return 0.6 + 0.08 * ((seed + (algorithm == "pacs")) % 2)

    runner, failed = run(tmp_path, one, Close(tmp_path))
    assert failed == 0
    assert Counter(name.split("/")[0] for name in runner.played) == {"rloo": 4, "grpo": 8, "pacs": 8, "ppo": 4}
    first, second = saved(tmp_path)["claims"]
    assert (first["verdict"], second["verdict"]) == ("reproduced", "undecided")
    assert [look["seeds"] for look in second["looks"]] == [4, 6, 8]
    assert [look["alpha"] for look in second["looks"]] == pytest.approx([0.01, 0.015, 0.025])


def test_after_each_look_the_rest_is_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, experiment(tmp_path), Equal(tmp_path))
    said = capsys.readouterr().out
    assert "look at 4 of 8 seeds: 1 of 1 comparisons open\nclaim: rloo: about 8 runs, at most 8, 8,000 environment steps" in said
    assert "look at 8 of 8 seeds: 0 of 1 comparisons open\nclaim: rloo: nothing to run; 1 claims, 0 open" in said


def test_arm_without_training_is_run_once(tmp_path: Path) -> None:
    arms = {"rloo": SPEC["arms"]["rloo"], "grpo": {"evaluate": {"models": ["sft"]}}}
    runner, _ = run(tmp_path, experiment(tmp_path, arms=arms))
    assert Counter(name.split("/")[0] for name in runner.played) == {"rloo": 4, "sft": 1}
    assert saved(tmp_path)["claims"][0]["verdict"] == "reproduced"


@pytest.mark.parametrize(
    ("spec", "workers", "first"),
    [
        (CHOICE, 1, ["plain/0", "plain/1", "plain/2", "plain/3", "q/0"]),
        (TWO_STARTS, 1, ["plain/0", "plain/1", "plain/2", "plain/3", "q/0"]),
        (SPEC, 2, ["rloo/0", "grpo/0", "rloo/1"]),
    ],
    ids=["a start per seed", "two starts per seed", "one start"],
)
def test_starts_are_taken_in_turn(tmp_path: Path, spec: dict[str, Any], workers: int, first: list[str]) -> None:
    """Contract: runs side by side do not wait for one start, unless it is that of all runs, which gets all processes."""
    one = Experiment.model_validate(spec)
    session = Session(tmp_path, "rloo", one, PARAMS, FakeRunner(tmp_path, one.program), jobs=2)
    runs = planned_runs(one, PARAMS, seeds=range(4))
    turn = [run.name for run in in_turn(session._by_start(runs))]
    assert turn[: len(first)] == first
    assert sorted(turn) == sorted(run.name for run in runs)

    def play(run: Run) -> Outcome:
        raise RunFailedError("no room left")

    session.play = play  # type: ignore[method-assign]
    session._play(runs)
    assert session.runner.workers == workers


def test_a_gallery_runs_each_arm_itself(tmp_path: Path) -> None:
    """Contract: a gallery's arms run once per seed and reuse no other experiment's run, which may have no curve."""
    run(tmp_path, experiment(tmp_path))
    gallery = experiment(tmp_path, "gallery", claims=None, looks=[1], gate=None, ungated="nothing is judged")
    runner, failed = run(tmp_path, gallery, slug="gallery")
    assert (failed, len(runner.played)) == (0, len(gallery.arms))
    assert run(tmp_path, gallery, slug="gallery")[0].played == []


def test_equal_settings_of_another_problem_are_another_run(tmp_path: Path) -> None:
    """Contract: a key is a hash of settings, which two problems of lane control may share, as their metrics' names."""
    control: dict[str, Any] = {**dict.fromkeys(("budget", "untuned", "ungated")), "lane": "control", "looks": [2]}
    control["claims"] = [{"says": "x", "arm": "a", "against": "b", "metric": "control.return_mean", "margin": 1.0}]
    for slug, problem, arm, found in (
        ("theirs", "linear_mdp", {"robust": "none"}, 0.1),
        ("mine", "detour", {"learner": "bc"}, 0.9),
    ):
        one = experiment(tmp_path, slug, **control, environment=problem, arms={"a": {}, "b": arm})
        session = Session(tmp_path, slug, one, PARAMS, FakeRunner(tmp_path, one.program), jobs=1)
        outcome = Outcome({"control.return_mean": found}, 0, 1.0, "c" * 40, "f" * 16)
        session.play = lambda run, outcome=outcome: outcome  # type: ignore[method-assign, misc]
        session.run()
    theirs, mine = (saved(tmp_path, slug)["runs"] for slug in ("theirs", "mine"))
    assert theirs["a/1"]["key"] == mine["a/1"]["key"]
    assert [one["metrics"]["control.return_mean"] for one in mine.values()] == [0.9] * 4


def test_failed_run_keeps_the_others_and_is_retried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, runner = experiment(tmp_path), FakeRunner(tmp_path)
    runner.failing = "grpo/2"
    assert run(tmp_path, one, runner)[1] == 1
    assert (len(runner.played), runner.released) == (8, 7)
    assert "grpo/2 failed: no room left" in capsys.readouterr().err
    assert saved(tmp_path)["claims"][0]["verdict"] is None
    again, failed = run(tmp_path, one)
    assert (failed, again.played) == (0, ["grpo/2"])
    assert saved(tmp_path)["start"] == {"grpo": 0.4, "rloo": 0.4}


def test_a_task_without_its_package_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: no run is started that can only fail; the experiments after it are not concerned."""
    pytest.importorskip("gymnasium")
    one = experiment(
        tmp_path,
        **{"lane": "control", "environment": "gymnasium", "budget": None, "untuned": None, "ungated": None},
        arms={"rloo": {"task": "Nowhere-v1"}, "grpo": {"task": "Nowhere-v1", "critic": "gaussian"}},
        claims=[{"says": "x", "arm": "rloo", "against": "grpo", "metric": "control.return_end", "margin": 1.0}],
    )
    runner, failed = run(tmp_path, one)
    assert (runner.played, failed) == ([], 8)
    assert "none of 8 runs is started: task: Gymnasium has no Nowhere-v1" in capsys.readouterr().err


def test_killed_session_repeats_no_stored_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: killed before or after any write, a session resumes gate, tuning and seeds, repeats no stored run and ends with
    the same result."""

    def stored() -> set[str]:
        found = saved(root) if result_path(root, "rloo").exists() else {"runs": {}, "trials": {}}
        trials = [name.split("/") for name in found["trials"]]
        return {*found["runs"], *(f"{arm}/{seed} {value} valid" for arm, value, seed in trials)}

    whole = {"claims", "gate", "tuning", "chosen", "start"}
    one = experiment(tmp_path / "a", **TUNE, **GATE)
    runner, _ = run(tmp_path / "a", one)
    expected, played = saved(tmp_path / "a"), Counter(runner.played)
    one, root = experiment(tmp_path / "b", **TUNE, **GATE), tmp_path / "b"
    seen, real, writes = set(), sessions.write, 0

    def killed(*arguments: Any) -> Any:
        nonlocal writes
        writes += 1
        if writes % 4 == 0:
            raise KeyboardInterrupt
        found = real(*arguments)
        if writes % 4 == 2:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(sessions, "write", killed)
    for _ in range(100):
        runner, before = FakeRunner(root), stored()
        try:
            Session(root, "rloo", one, PARAMS, runner, jobs=1).run()
        except KeyboardInterrupt:
            assert not before & set(runner.played)
            seen |= set(runner.played)
        else:
            break
    assert {key: saved(root)[key] for key in whole} == {key: expected[key] for key in whole}
    assert seen | set(runner.played) == set(played)


def test_interrupt_starts_no_further_runs() -> None:
    """Contract: after Ctrl-C the runs in progress finish and no others start, nor those that would have had the same training."""
    started, ended = [], threading.Event()

    def play(one: str) -> str:
        started.append(one)
        if one != "first":
            ended.wait(60)
        return one

    groups = [["first"], ["second", "its variant"], ["third", "its variant"], ["fourth"]]
    results = sessions.outcomes(groups, play, jobs=2)  # type: ignore[arg-type]
    assert next(results) == [("first", "first")]
    threading.Timer(0.2, ended.set).start()
    results.close()
    assert not {"fourth", "its variant"} & set(started)


def test_arms_that_differ_after_training_are_trained_once(tmp_path: Path) -> None:
    """Contract: such runs of a seed follow each other in one workspace, also for the gate; it is removed after the last."""
    arms = {**SPEC["arms"], "thrice": {**SPEC["arms"]["grpo"], "evaluate": {"attempts": 3}}}
    used: list[str] = []

    class Named(FakeRunner):
        def train_and_evaluate(self, name, values, *rest) -> Outcome:  # type: ignore[no-untyped-def]
            used.append(name)
            return super().train_and_evaluate(name, values, *rest)

        def release(self, name: str) -> None:
            super().release(name)
            used.append(f"{name} removed")

    one = experiment(tmp_path, arms=arms, looks=[4], **GATE)
    assert Session(tmp_path, "rloo", one, PARAMS, Named(tmp_path), jobs=1).run() == 0
    assert len(saved(tmp_path)["runs"]) == 12
    names = [name for name in used if not name.endswith("removed")]
    counts = Counter(names)
    assert sorted(counts.values()) == [1] * 4 + [2] * 4
    shared = [name for name in counts if counts[name] == 2]
    assert names[: 2 * one.gate.runs] == [name for name in shared[: one.gate.runs] for _ in range(2)]
    for name in shared:
        assert [entry for entry in used if entry.startswith(name)] == [name, name, f"{name} removed"]


def test_cost_before_and_after_the_runs(tmp_path: Path) -> None:
    """2 arms x 3 values of tuning and 4 seeds each without results, 8 at most; nothing once it is decided. Arms whose differences
    do not scatter need only the first look."""
    one = experiment(tmp_path, **TUNE)
    cost = cost_of(one, PARAMS, Results(), [])
    assert (cost.trials, cost.runs, cost.most, cost.seconds, cost.still_open) == (6, 6 + 16, 6 + 16, None, 1)
    timed = Results(outcomes={"x/0": {"environment_steps": 500, "seconds": 30.0, "key": "", "metrics": {}}})
    assert cost_of(one, PARAMS, Results(), [timed]).seconds == pytest.approx(22 * 60.0)
    timed.outcomes["x/0"]["start_seconds"] = 15.0
    assert cost_of(one, PARAMS, Results(), [timed]).seconds == pytest.approx(22 * 75.0), "a start per run"
    slow = {f"x/{seed}": {"environment_steps": 500, "seconds": 40.0 + 100 * seed, "key": "", "metrics": {}} for seed in range(3)}
    near = Results(outcomes=slow, environment=one.environment)
    assert cost_of(one, PARAMS, Results(), [timed, near]).seconds == pytest.approx(22 * 280.0), "the median where it plays"
    assert "22 runs (6 of them tuning), at most 22, 22,000 environment steps, time unknown" in cost.line(one, 2)
    run(tmp_path, one)
    done = cost_of(one, PARAMS, Results.load(tmp_path, "rloo"), [])
    assert (done.runs, done.most, done.still_open) == (0, 0, 0)
    assert done.line(one, 2) == "nothing to run; 1 claims, 0 open"


def test_runs_that_another_experiment_has_cost_nothing(tmp_path: Path) -> None:
    """Contract: what a session would reuse, tuning included, is not counted; runs of another environment are."""
    one = experiment(tmp_path, **TUNE)
    run(tmp_path, one)
    theirs = Results.load(tmp_path, "rloo")
    alone = cost_of(one, PARAMS, Results(), [])
    assert cost_of(one, PARAMS, Results(), [theirs]).most == 0
    del theirs.outcomes["rloo/1"], theirs.trials[min(theirs.trials)]
    shared = cost_of(one, PARAMS, Results(), [theirs])
    assert (shared.trials, shared.runs) == (1, 1 + 8 + 1), "an arm's runs are not known before all its trials are"
    assert cost_of(one, PARAMS, Results(), [replace(theirs, environment="shop")]).most == alone.most


def test_runs_of_lane_control_time_no_other_lane(tmp_path: Path) -> None:
    """Contract: where nothing comparable was timed, the time is unknown, not that of runs without a language model."""
    one = experiment(tmp_path)
    quick = {"reach/0": {"environment_steps": 500, "seconds": 0.5, "key": "", "metrics": {}}}
    control = Results(outcomes=quick, environment="reach")
    assert cost_of(one, PARAMS, Results(), [control]).seconds is None
    shop = Results(outcomes={"x/0": {**quick["reach/0"], "seconds": 30.0}}, environment="shop")
    assert cost_of(one, PARAMS, Results(), [control, shop]).seconds == pytest.approx(16 * 60.0)


def test_cost_of_an_open_comparison_follows_its_scatter(tmp_path: Path) -> None:
    """Contract: expected seeds follow from the spread of the differences so far, between the next look and the last."""
    one = experiment(tmp_path)
    runner = Equal(tmp_path)
    runner.failing = "grpo/5"
    run(tmp_path, one, runner)
    cost = cost_of(one, PARAMS, Results.load(tmp_path, "rloo"), [])
    assert 1 <= cost.runs <= cost.most == 5
    assert cost.seconds == 60.0 * cost.runs


def test_a_failed_gate_costs_nothing_more(tmp_path: Path) -> None:
    one = experiment(tmp_path, **GATE)
    assert cost_of(one, PARAMS, Results(starts={"grpo": 0.4}), []).runs == 16
    assert cost_of(one, PARAMS, Results(starts={"grpo": 0.9}), []).most == 0


def test_seeds_before_a_claims_first_cost_nothing(tmp_path: Path) -> None:
    """Contract: a claim that is judged on fresh seeds needs those alone, and none that are done."""
    one = experiment(tmp_path)
    claims = [claim.model_copy(update={"fresh_from": 40}) for claim in one.claims]
    fresh = one.model_copy(update={"claims": claims})
    assert cost_of(fresh, PARAMS, Results(), []).most == cost_of(one, PARAMS, Results(), []).most
    seeds = range(40, 40 + one.looks[-1])
    run = {"environment_steps": 0, "seconds": 1.0, "key": "", "metrics": {}}
    done = {f"{arm}/{seed}": run for arm in one.arms for seed in seeds}
    assert cost_of(fresh, PARAMS, Results(outcomes=done), []).most == 0
