"""The block of docs/results.md on what each stage added and cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stages.params import ROOT
from stages.reporting.kept import Measured, Run, Success, Work
from stages.reporting.stage_gains import block, run_of

MEANS = {"base": 0.0, "sft": 0.25, "rl@search": 0.7, "merged": 0.65}
PAIRS = {("sft", "base"): (0.2, 0.3), ("rl@search", "sft"): (0.4, 0.5), ("rl@search", "merged"): (-0.01, 0.11)}


def success(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean, "high": mean, "n": 100}


EVALUATION: dict[str, Any] = {
    "panels": {"search": "abc"},
    "models": {model: {"search": {"success": success(mean)}} for model, mean in MEANS.items()},
    "comparisons": [
        {"a": a, "b": b, "domain": "search", "difference": MEANS[a] - MEANS[b], "low": low, "high": high, "p": 0.01}
        | {"verdict": "better"}
        for (a, b), (low, high) in PAIRS.items()
    ],
}


def kept(**changes: Any) -> Run:
    found = {"seconds": 30.0, "cpu_seconds": 1.0, "peak_bytes": 1, "peak_gpu_bytes": 0, "machine": "m", "runs": 1}
    values: dict[str, Any] = {
        **{"params": {}, "code": {}, "panels": {"search": "abc"}, "solved": {}, "attempts": 1},
        "success": {model: {"search": Success.model_validate(success(mean))} for model, mean in MEANS.items()},
        "work": {name: Work(environment_steps=1000) for name in ("rl@search", "rl@shop", "annotate@search")},
        "measured": {name: Measured.model_validate(found) for name in ("rl@search", "rl@shop", "sft")},
    }
    return Run.model_validate({**values, **changes})


def test_gains_are_paired_and_costs_are_of_all_domains(tmp_path: Path) -> None:
    """Contract: success before and after, the paired interval (turned round where the evaluation has the other order), and the
    sums over domains of steps and times; stages that change no model have costs alone."""
    lines = block(tmp_path, EVALUATION, ["search"], [kept()], Path("docs/results.md")).splitlines()
    cells = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert cells["`sft`"] == ["0.0 → 25.0 % (+20.0 to +30.0)", "–", "30 s"]
    assert cells["`rl`"] == ["25.0 → 70.0 % (+40.0 to +50.0)", "2,000", "1 min 00 s"]
    assert cells["`merge`"] == ["70.0 → 65.0 % (−11.0 to +1.0)", "–", "–"]
    assert cells["`annotate`"] == ["–", "1,000", "–"]


def test_costs_are_those_of_a_run_with_the_same_results(tmp_path: Path) -> None:
    """Contract: the newest kept run with these panels and successes; without one there are gains alone."""
    other = {**kept().success, "merged": {"search": Success.model_validate(success(0.6))}}
    runs = [kept(note="first"), kept(note="second"), kept(success=other), kept(panels={"search": "xyz"})]
    found = run_of(EVALUATION, runs)
    assert found is not None
    assert found.note == "second"
    text = block(tmp_path, EVALUATION, ["search"], runs[2:], Path("docs/results.md"))
    assert "`annotate`" not in text
    assert "| `rl` | 25.0 → 70.0 % (+40.0 to +50.0) | – | – |" in text


def test_stages_without_a_gain_are_judged_by_the_experiment_on_the_life() -> None:
    text = block(ROOT, EVALUATION, ["search"], [], Path("docs/results.md"))
    assert "On search, choosing tasks by rollout's success rates is worth" in text
    assert "[lifecycle](../reports/claims/lifecycle.md)). On textworld, choosing tasks" in text
    assert "[lifecycle_textworld](../reports/claims/lifecycle_textworld.md)" in text
