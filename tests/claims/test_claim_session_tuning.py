"""What an experiment's session does before its seeds: every arm's tuning, and the gate."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_runner import GATE, PARAMS, SPEC, TUNE, FakeRunner, experiment, run, saved

from stages.claims import session as sessions
from stages.claims.experiment import Experiment, Tune
from stages.claims.gates import rises
from stages.claims.judging import write
from stages.claims.plan import Outcome, planned_runs
from stages.claims.results import Results


def test_every_arm_is_tuned_over_the_same_values_first(tmp_path: Path) -> None:
    """Contract: tuning uses validation tasks and its own seeds; each arm gets its best value, the smallest of equally good
    ones."""

    class Rates(FakeRunner):
        def success(self, algorithm: str, seed: int, rate: float) -> float:
            best = {"rloo": (0.1,), "grpo": (0.001, 0.01)}[algorithm]
            return super().success(algorithm, seed, rate) - 0.3 * (rate not in best)

    one = experiment(tmp_path, **TUNE)
    runner, _ = run(tmp_path, one, Rates(tmp_path))
    assert sorted(runner.played[:6]) == [f"{arm}/1000 {rate} valid" for arm in ("grpo", "rloo") for rate in (0.001, 0.01, 0.1)]
    assert not any("valid" in name for name in runner.played[6:])
    found = saved(tmp_path)
    assert found["chosen"] == {"rloo": 0.1, "grpo": 0.001}
    assert found["tuning"]["grpo"] == {"0.001": [0.6], "0.01": [0.6], "0.1": pytest.approx([0.3])}
    assert found["claims"][0]["per_seed"]["rloo"][0] == 0.8, "at its own rate"
    assert found["cost"]["environment_steps"] == 9 * 14
    assert run(tmp_path, one)[0].played == []
    other, _ = run(tmp_path, experiment(tmp_path, "again", **TUNE), slug="again")
    assert other.played == [], "tuning and runs are reused from the other experiment"


def test_tuning_uses_at_least_96_validation_tasks() -> None:
    one = Experiment.model_validate({key: value for key, value in {**SPEC, **TUNE}.items() if value is not None})
    trials = sessions.trial_runs(one, PARAMS)
    assert {run.values["evaluate"]["split"] for run in trials} == {"valid"}
    assert all(run.values["curate"] == {"valid": 96, "seeds": {"valid": 1}} for run in trials)
    more = sessions.trial_runs(one, {**PARAMS, "curate": {"valid": 120}})
    assert all(run.values["curate"] == {"valid": 120} for run in more)


def test_the_gate_waits_for_tuning(tmp_path: Path) -> None:
    """Contract: runs at a value that nobody chose, here one with which the baseline learns nothing, do not fail the gate."""

    class Still(FakeRunner):
        def success(self, algorithm: str, seed: int, rate: float) -> float:
            return super().success(algorithm, seed, rate) if rate == 0.1 else self.start_of

    run(tmp_path, experiment(tmp_path), Still(tmp_path))
    run(tmp_path, experiment(tmp_path, **TUNE, **GATE), Still(tmp_path))
    found = saved(tmp_path)
    assert found["chosen"] == {"grpo": 0.1, "rloo": 0.1}
    assert (found["gate"]["passed"], found["claims"][0]["verdict"]) == (True, "reproduced")


def test_a_choice_on_too_few_tasks_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = FakeRunner(tmp_path)
    runner.validation_tasks = 80
    _, failed = run(tmp_path, experiment(tmp_path, **TUNE), runner)
    assert (failed, len(runner.played)) == (6, 6)
    assert "rloo/0.1/1000 played 80 validation tasks, and a choice takes 96; draw them" in capsys.readouterr().err


def test_runs_before_tuning_count_if_their_value_is_chosen(tmp_path: Path) -> None:
    """Contract: finished runs are kept until the value is chosen, and dropped if it is not theirs."""
    before, _ = run(tmp_path, experiment(tmp_path))
    assert len(before.played) == 8

    class Better(FakeRunner):
        def success(self, algorithm: str, seed: int, rate: float) -> float:
            return super().success(algorithm, seed, rate) - 0.3 * (rate != {"rloo": 0.01, "grpo": 0.1}[algorithm])

    runner, _ = run(tmp_path, experiment(tmp_path, **TUNE), Better(tmp_path))
    assert sorted(runner.played[6:]) == [f"grpo/{seed}" for seed in range(4)], "rloo ran at 0.01 before"


@pytest.mark.parametrize(
    ("change", "why", "runs"),
    [
        ({"start_of": 0.7}, "the start solves 70.0% of the panel, not 20% to 60%", 0),
        ({"success": lambda *_: 0.99}, "'grpo' ends at 99.0% of the panel, not between 5% and 95%", 3),
        ({"success": lambda *_: 0.3}, "'grpo' does not learn: 39.4% at first, 30.6% at last", 3),
    ],
)
def test_failed_gate_runs_no_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict, why: str, runs: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in change.items():
        monkeypatch.setattr(FakeRunner, name, staticmethod(value) if callable(value) else value)
    runner, failed = run(tmp_path, experiment(tmp_path, **GATE))
    assert (failed, len(runner.played)) == (0, runs)
    found = saved(tmp_path)
    assert (found["gate"]["passed"], found["gate"]["why"]) == (False, why)
    assert found["claims"][0]["verdict"] == "gate failed"
    assert f"gate failed: {why}" in capsys.readouterr().out


def test_gate_may_have_further_requirements(tmp_path: Path) -> None:
    need = {"arm": "rloo", "metric": "panel.turns", "range": [0.9, 2.0]}
    runner, _ = run(tmp_path, experiment(tmp_path, **{**GATE, "gate": {"baseline": "grpo", "require": [need]}}))
    assert len(runner.played) == 6
    assert saved(tmp_path)["gate"]["why"] == "panel.turns of 'rloo' is 0.82, not 0.9 to 2"


def test_passed_gate_is_saved_with_its_figures(tmp_path: Path) -> None:
    runner, _ = run(tmp_path, experiment(tmp_path, **GATE))
    assert sorted(runner.played[:3]) == ["grpo/0", "grpo/1", "grpo/2"]
    gate = saved(tmp_path)["gate"]
    assert (gate["passed"], gate["start"], gate["end"]) == (True, 0.4, [0.6, 0.63, 0.61])
    assert gate["first"] == pytest.approx([0.4 + gain / 18 for gain in (0.2, 0.23, 0.21)], abs=1e-6)


def test_gate_tests_the_gain_over_runs() -> None:
    """t(0.95, 2) = 2.92: gains of 1, 2 and 3 have mean 2 and standard error 0.577, and 2 > 1.686; of 0, 2 and 4, 2 < 3.37."""
    assert rises([0.0, 0.0, 0.0], [1.0, 2.0, 3.0])
    assert not rises([0.0, 0.0, 0.0], [0.0, 2.0, 4.0])
    assert not rises([0.5, 0.5], [0.5, 0.5])


def test_a_start_of_other_settings_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRunner, "start_of", 0.05)
    run(tmp_path, experiment(tmp_path, **GATE))
    assert saved(tmp_path)["gate"]["why"] == "the start solves 5.0% of the panel, not 20% to 60%"
    monkeypatch.setattr(FakeRunner, "start_of", 0.4)
    run(tmp_path, experiment(tmp_path, **GATE))
    assert saved(tmp_path)["start"] == {"grpo": 0.05}, "nothing has changed"
    runner, _ = run(tmp_path, experiment(tmp_path, **GATE, shared={"sft": {"epochs": 9}}))
    assert saved(tmp_path)["start"]["grpo"] == 0.4
    assert runner.played


def test_a_start_of_runs_that_are_dropped_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: a start that came with a run, not with its own measurement, is that of the run's settings."""
    monkeypatch.setattr(FakeRunner, "start_of", 0.05)
    one = experiment(tmp_path)
    results = Results()
    for planned in planned_runs(one, PARAMS, seeds=[0]):
        results.add(planned, Outcome({"panel.success": 0.5}, 9, 60.0, "c" * 40, "f" * 16, start=0.05))
    write(tmp_path, "rloo", one, results)
    assert saved(tmp_path)["start"] == {"grpo": 0.05, "rloo": 0.05}
    monkeypatch.setattr(FakeRunner, "start_of", 0.4)
    run(tmp_path, experiment(tmp_path, **GATE, shared={"sft": {"epochs": 9}}))
    assert saved(tmp_path)["gate"]["passed"]
    assert saved(tmp_path)["start"]["grpo"] == 0.4


def test_whole_numbers_can_be_tuned() -> None:
    found = parse_tuned("rl.epochs", [1, 2])
    assert [type(value) for value in found.values] == [int, int]
    with pytest.raises(ValueError, match=r"rl\.group_size decides what a budget comes to"):
        parse_tuned("rl.group_size", [4, 8])


def parse_tuned(key: str, values: list[float]) -> Tune:
    return Tune.model_validate({"key": key, "values": values})
