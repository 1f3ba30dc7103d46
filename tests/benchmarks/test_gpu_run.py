"""What is kept of a run on a GPU: stages that used one, their parts, and the gain of rl with its interval."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks import gpu_run

COST = {
    "inputs": "0123456789abcdef",
    "seconds": 20.0,
    "machine": "a processor, 8 cores, a GPU",
    "peak_gpu_bytes": 3 * 2**30,
    "done": True,
    "spans": {"start": 5.0, "engine": 8.0, "training.forward": 2.0, "training.backward": 3.0, "training.optimiser": 0.5},
    "counts": {"sampled_tokens": 4000, "fed_tokens": 9000},
}
SUCCESS = [0.1, 0.3, 0.2, 0.4, 0.5, 0.4, 0.7, 0.9, 0.8]


def run_folder(folder: Path) -> Path:
    """A checkout in which rl@search ran on a GPU, curate@search on the CPU, and rl@code did not finish."""
    costs = folder / ".bellwether" / "costs"
    costs.mkdir(parents=True)
    for name, changes in {"rl@search": {}, "curate@search": {"peak_gpu_bytes": 0}, "rl@code": {"done": False}}.items():
        (costs / f"{name}.json").write_text(json.dumps(COST | changes))
    reports = folder / "reports" / "rl"
    reports.mkdir(parents=True)
    lines = [f"{step},{success},0.1,2,9,64" for step, success in enumerate(SUCCESS, start=1)]
    for domain in ("search", "code"):
        (reports / f"{domain}_history.csv").write_text("\n".join([",".join(gpu_run.CURVE), *lines]) + "\n")
        (reports / f"{domain}.json").write_text(
            json.dumps({"algorithm": "grpo", "mean_logprob_difference": 0.004, "max_logprob_difference": 0.2})
        )
    return folder


def test_only_finished_stages_on_a_gpu_are_kept(tmp_path: Path) -> None:
    kept = gpu_run.collected(run_folder(tmp_path))
    assert (list(kept["stages"]), list(kept["rl"])) == (["rl@search"], ["search"])
    assert kept["stages"]["rl@search"]["parts"]["training"] == 5.5
    assert kept["rl"]["search"]["history"]["success"] == SUCCESS
    assert kept["device"] == COST["machine"]


def test_a_folder_without_such_a_stage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="records no stage that ran on a GPU"):
        gpu_run.collected(tmp_path)


def test_gain_is_welch_between_first_and_last_third() -> None:
    before, after, difference, low, high = gpu_run.gain(SUCCESS)
    first, last = np.array(SUCCESS[:3]), np.array(SUCCESS[-3:])
    assert (before, after, difference) == pytest.approx((0.2, 0.8, 0.6))
    half = stats.t.ppf(0.975, 4) * np.sqrt(first.var(ddof=1) / 3 + last.var(ddof=1) / 3)  # equal variances: 4 degrees of freedom
    assert (low, high) == pytest.approx((0.6 - half, 0.6 + half))


def test_block_names_device_speed_and_gain(tmp_path: Path) -> None:
    text = gpu_run.block(gpu_run.collected(run_folder(tmp_path)))
    assert "| `rl@search` | 20 | 5 | 8 | 6 | 500 | 3.0 GiB |" in text
    assert "a processor, 8 cores, a GPU." in text
    assert (
        "9 steps of 64 episodes: success on training tasks 20.0 % in the first 3 steps, 80.0 % in the last; +60.0 points" in text
    )
    assert "differ by 0.0040 on average, 0.20 at most" in text


def test_no_gain_is_claimed_of_a_few_steps(tmp_path: Path) -> None:
    kept = gpu_run.collected(run_folder(tmp_path))
    history = kept["rl"]["search"]["history"]
    kept["rl"]["search"]["history"] = {name: values[: gpu_run.LEAST_STEPS - 1] for name, values in history.items()}
    assert "points" not in gpu_run.block(kept)


def test_panels_are_those_of_evaluate_on_a_gpu(tmp_path: Path) -> None:
    """Of the comparisons, each specialist's with sft on its own panel; not a report that a checkout has from a CPU."""
    folder = run_folder(tmp_path)
    success = {"sft": {"search": 0.25, "shop": 0.5}, "rl@search": {"search": 0.375, "shop": 0.5}}
    models = {model: {domain: {"success": {"mean": mean}} for domain, mean in of.items()} for model, of in success.items()}
    common = {"a": "rl@search", "difference": 0.125, "low": 0.0251, "high": 0.2249, "p": 0.0125, "n": 400, "verdict": "better"}
    comparisons = [common | {"b": b, "domain": domain} for b in ("sft", "base") for domain in ("search", "shop")]
    (folder / "reports" / "evaluation.json").write_text(json.dumps({"models": models, "comparisons": comparisons}))
    assert gpu_run.collected(folder)["panels"] == []
    (folder / ".bellwether" / "costs" / "evaluate.json").write_text(json.dumps(COST))
    kept = gpu_run.collected(folder)
    assert [(of["domain"], of["success_b"], of["success_a"]) for of in kept["panels"]] == [("search", 0.25, 0.375)]
    assert "| search | 400 | 25.0 % | 37.5 % | +12.5 (+2.5 to +22.5) | 0.013 |" in gpu_run.block(kept)
