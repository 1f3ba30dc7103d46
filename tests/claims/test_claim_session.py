"""Running an experiment: gate, tuning, looks, and resuming after a failure or a kill, with a runner that trains nothing."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stages.claims import __main__ as command
from stages.claims import session as sessions
from stages.claims import verdict
from stages.claims.confirm import confirm
from stages.claims.cost import cost_of
from stages.claims.experiment import FOLDER, Experiment, load_experiment
from stages.claims.gates import rises
from stages.claims.plan import Outcome
from stages.claims.results import Results, result_path
from stages.claims.runner import ExperimentRunner
from stages.claims.session import Session
from stages.reporting.board.conditions import conditions
from stages.runtime.workspace import RunFailedError

SPEC: dict[str, Any] = {
    **{"family": "credit", "method": "RLOO", "paper": "p", "switch": "s", "environment": "search"},
    "looks": [4, 6, 8],
    "budget": {"environment_steps": 1000},
    "untuned": "arms share everything",
    "ungated": "a test",
    "arms": {"rloo": {"rl": {"algorithm": "rloo"}}, "grpo": {"rl": {"algorithm": "grpo"}}},
    "claims": [{"says": "RLOO is better.", "arm": "rloo", "against": "grpo", "threshold": 0.02}],
}
TUNE = {"untuned": None, "tune": {"key": "rl.learning_rate", "values": [0.001, 0.01, 0.1]}}
GATE = {"ungated": None, "gate": {"baseline": "grpo"}}
PARAMS: dict[str, Any] = {
    **{"seed": 3, "domains": ["search"], "resources": {"device": "cpu", "threads": 2}, "curate": {}, "evaluate": {}},
    **{"rl": {"learning_rate": 0.01}, "per_domain": {"search": {}}},
}


class FakeRunner(ExperimentRunner):
    """Runs no stages. `success` depends on (algorithm, seed, learning rate); curves rise from the start to it."""

    code = "f" * 16
    start_of = 0.4
    validation_tasks = 96

    def __init__(self, root: Path, program: str = "rl") -> None:
        super().__init__(root, "c" * 40, program=program)
        self.played: list[str] = []
        self.failing, self.released = "", 0

    def success(self, algorithm: str, seed: int, rate: float) -> float:
        base, factor = {"rloo": (0.8, 7), "grpo": (0.6, 3)}.get(algorithm, (0.7, 1))
        return base + 0.01 * (seed * factor % 5)

    def start_success(self, values: Mapping[str, Any]) -> float:
        return self.start_of

    def release(self, name: str) -> None:
        self.released += 1

    def train_and_evaluate(self, name, values, metrics, trains=True, required=None) -> Outcome:  # type: ignore[no-untyped-def]
        rl, split = values["rl"], values["evaluate"].get("split", "test")
        algorithm = rl["algorithm"] if trains else "sft"
        self.played.append(f"{algorithm}/{rl['seed']}" + (f" {rl['learning_rate']} {split}" if split != "test" else ""))
        if self.failing == self.played[-1]:
            raise RunFailedError("no room left")
        success = self.success(algorithm, rl["seed"], rl["learning_rate"])
        shares = [self.start_of + (success - self.start_of) * step / 9 for step in range(10)] if trains else []
        shares = np.float32(shares).tolist()  # as the file keeps them
        line = {"environment_steps": 0, "reward_mean": 0.0, "entropy": 0.0}
        curve = [{"step": step, "success": share, **line} for step, share in enumerate(shares)]
        found = {metric: success if metric.startswith("panel.") else None for metric in metrics}
        rows = [{}] * self.validation_tasks if split == "valid" else []
        return Outcome(found, 9, 60.0, self.commit, self.code, rows, curve)


class Equal(FakeRunner):
    """Arms of equal success whose differences scatter by 8 points."""

    def success(self, algorithm: str, seed: int, rate: float) -> float:
        return 0.6 + 0.08 * ((seed + (algorithm == "rloo")) % 2)


def experiment(root: Path, slug: str = "rloo", **changes: Any) -> Experiment:
    values = {key: one for key, one in {**SPEC, **changes}.items() if one is not None}
    path = root / FOLDER / f"{slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return load_experiment(path)


def run(root: Path, one: Experiment, runner: FakeRunner | None = None, slug: str = "rloo") -> tuple[FakeRunner, int]:
    runner = runner or FakeRunner(root)
    return runner, Session(root, slug, one, PARAMS, runner, jobs=2).run()


def saved(root: Path, slug: str = "rloo") -> dict[str, Any]:
    return json.loads(result_path(root, slug).read_text())


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


def test_a_gallery_runs_each_arm_itself(tmp_path: Path) -> None:
    """Contract: a gallery's arms run once per seed and reuse no other experiment's run, which may have no curve."""
    run(tmp_path, experiment(tmp_path))
    gallery = experiment(tmp_path, "gallery", claims=None, looks=[1], gate=None, ungated="nothing is judged")
    runner, failed = run(tmp_path, gallery, slug="gallery")
    assert (failed, len(runner.played)) == (0, len(gallery.arms))
    assert run(tmp_path, gallery, slug="gallery")[0].played == []


def test_tuning_uses_at_least_96_validation_tasks() -> None:
    one = Experiment.model_validate({key: value for key, value in {**SPEC, **TUNE}.items() if value is not None})
    trials = sessions.trial_runs(one, PARAMS)
    assert {run.values["evaluate"]["split"] for run in trials} == {"valid"}
    assert all(run.values["curate"] == {"valid": 96, "seeds": {"valid": 1}} for run in trials)
    more = sessions.trial_runs(one, {**PARAMS, "curate": {"valid": 120}})
    assert all(run.values["curate"] == {"valid": 120} for run in more)


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
    """Contract: after Ctrl-C the runs in progress finish and no others start."""
    started, ended = [], threading.Event()

    def play(one: str) -> str:
        started.append(one)
        if one != "first":
            ended.wait(60)
        return one

    results = sessions.outcomes(["first", "second", "third", "fourth"], play, jobs=2)  # type: ignore[arg-type, list-item]
    assert next(results) == ("first", "first")
    threading.Timer(0.2, ended.set).start()
    results.close()
    assert "fourth" not in started


def test_cost_before_and_after_the_runs(tmp_path: Path) -> None:
    """2 arms x 3 values of tuning and 4 seeds each without results, 8 at most; nothing once it is decided. Arms whose differences
    do not scatter need only the first look."""
    one = experiment(tmp_path, **TUNE)
    cost = cost_of(one, PARAMS, Results(), [])
    assert (cost.trials, cost.runs, cost.most, cost.seconds, cost.still_open) == (6, 6 + 16, 6 + 16, None, 1)
    timed = Results(outcomes={"x/0": {"environment_steps": 500, "seconds": 30.0, "key": "", "metrics": {}}})
    assert cost_of(one, PARAMS, Results(), [timed]).seconds == pytest.approx(22 * 60.0)
    assert "22 runs (6 of them tuning), at most 22, 22,000 environment steps, time unknown" in cost.line(one, 2)
    run(tmp_path, one)
    done = cost_of(one, PARAMS, Results.load(tmp_path, "rloo"), [])
    assert (done.runs, done.most, done.still_open) == (0, 0, 0)
    assert done.line(one, 2) == "nothing to run; 1 claims, 0 open"


def test_cost_of_an_open_comparison_follows_its_scatter(tmp_path: Path) -> None:
    """Contract: expected seeds follow from the spread of the differences so far, between the next look and the last."""
    one = experiment(tmp_path)
    runner = Equal(tmp_path)
    runner.failing = "grpo/5"
    run(tmp_path, one, runner)
    cost = cost_of(one, PARAMS, Results.load(tmp_path, "rloo"), [])
    assert 1 <= cost.runs <= cost.most == 5
    assert cost.seconds == 60.0 * cost.runs


@pytest.mark.parametrize(
    ("states", "claim", "code"),
    [
        (["reproduced", "reproduced"], None, 0),
        (["reproduced", "not reproduced"], None, 1),
        (["undecided", "not reproduced"], None, 1),
        (["reproduced", "undecided"], None, 2),
        (["gate failed", "gate failed"], None, 2),
        ([None, "reproduced"], 1, 2),
        (["not reproduced", "reproduced"], 2, 0),
        (["not reproduced", "reproduced"], 1, 1),
        (["reproduced", "reproduced"], 3, 64),
    ],
)
def test_verdict_command_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: list, claim: int | None, code: int
) -> None:
    one = experiment(tmp_path, claims=[*SPEC["claims"], *SPEC["claims"]])
    content = {"fixed": one.fixed, "claims": [{"verdict": state} for state in states]}
    result_path(tmp_path, "rloo").write_text(json.dumps(content))
    monkeypatch.chdir(tmp_path)
    arguments = ["rloo", *([] if claim is None else [str(claim)])]
    try:
        found = verdict.main(arguments)
    except SystemExit as end:
        found = end.code
    assert found == code


def test_verdict_of_a_changed_experiment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment(tmp_path)
    result_path(tmp_path, "rloo").write_text(json.dumps({"fixed": "0" * 16, "claims": [{"verdict": "reproduced"}]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["claims", "verdict", "rloo"])
    assert command.main() == 2
    assert "rloo 1: changed since it was run: RLOO is better." in capsys.readouterr().out
    with pytest.raises(SystemExit) as end:
        verdict.main(["lite-ppo"])
    assert end.value.code == 64
    assert "unknown experiment lite-ppo; reports/claims has rloo" in capsys.readouterr().err


def test_judging_again_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Contract: verdicts follow a changed margin or look without new runs, and runs that the experiment no longer describes are
    dropped."""
    run(tmp_path, experiment(tmp_path))
    stricter = experiment(tmp_path, claims=[{**SPEC["claims"][0], "threshold": 0.5}])
    command.judge_again(tmp_path, {"rloo": stricter}, PARAMS)
    assert saved(tmp_path)["claims"][0]["verdict"] == "not reproduced"
    other = experiment(tmp_path, budget={"environment_steps": 50})
    command.judge_again(tmp_path, {"rloo": other}, PARAMS)
    assert (saved(tmp_path)["runs"], saved(tmp_path)["claims"][0]["verdict"]) == ({}, None)
    assert "judged 0 runs; 8 of other settings dropped" in capsys.readouterr().out


def newer(root: Path, **changes: Any) -> FakeRunner:
    """A runner of newer code, which measures other values if `changes` say so."""
    return type("Newer", (FakeRunner,), {"code": "e" * 16, **changes})(root)


def test_a_run_of_each_arm_of_older_code_is_repeated(tmp_path: Path) -> None:
    """Contract: equal results are written beside the stored ones, which stay; the page says so until the code changes again."""
    one = experiment(tmp_path)
    run(tmp_path, one)
    before, runner = saved(tmp_path), newer(tmp_path)
    assert confirm(Session(tmp_path, "rloo", one, PARAMS, runner, jobs=2))
    assert sorted(runner.played) == ["grpo/0", "rloo/0"]
    after = saved(tmp_path)
    assert after.pop("confirmed") == {"code": "e" * 16, "runs": ["grpo/0", "rloo/0"]}
    assert after == before
    page = conditions(one, saved(tmp_path), "e" * 16)
    assert "8 of 8 runs are of older code; one run of each of their arms, repeated" in page
    assert "which may or may not bear on them" in conditions(one, saved(tmp_path), "d" * 16)


def test_a_repeated_run_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = experiment(tmp_path)
    run(tmp_path, one)
    changed = newer(tmp_path, success=lambda self, algorithm, seed, rate: {"rloo": 0.8, "grpo": 0.65}[algorithm])
    assert not confirm(Session(tmp_path, "rloo", one, PARAMS, changed, jobs=2))
    assert "grpo/0 is not as stored: panel.cost 0.6, now 0.65" in capsys.readouterr().err
    assert saved(tmp_path)["confirmed"]["runs"] == ["rloo/0"]
    assert "; one run each of rloo, repeated" in conditions(one, saved(tmp_path), "e" * 16)


def test_nothing_of_todays_code_is_repeated(tmp_path: Path) -> None:
    one = experiment(tmp_path)
    run(tmp_path, one)
    runner = FakeRunner(tmp_path)
    assert confirm(Session(tmp_path, "rloo", one, PARAMS, runner, jobs=2))
    assert (runner.played, "confirmed" in saved(tmp_path)) == ([], False)
