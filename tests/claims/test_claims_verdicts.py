"""Verdicts from paired differences, and the board's pages made from the result files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rloo_experiment import PARAMS, SPEC, experiment, fill, outcome, write

from stages.claims.judging import report
from stages.claims.judging import write as write_results
from stages.claims.plan import metrics_of, planned_runs, required_of
from stages.claims.results import Results
from stages.reporting.board.experiment_page import page_of
from stages.reporting.board.index import PAGE
from stages.reporting.board.pages import pages as board_pages
from stages.reporting.board.rows import OUTDATED
from stages.reporting.board.rows import rows as board_rows
from stages.runtime.validation import ParamsError

RLOO, GRPO = [0.5, 0.6, 0.7, 0.8, 0.9], [0.4, 0.5, 0.6, 0.7, 0.7]
"""Differences 0.1, 0.1, 0.1, 0.1, 0.2: mean 0.12, standard error 0.02."""
NOT_WORSE = [
    {**{key: one for key, one in SPEC["claims"][0].items() if key != "threshold"}, "kind": "non_inferiority", "margin": 0.1}
]


def test_measured_metrics_are_kept_and_shown(tmp_path: Path) -> None:
    """Contract: `measured` metrics are in every run and, as means over seeds, on the page."""
    shown = ["panel.pass_at_k.1", "panel.turns"]
    one = write(tmp_path, measured=shown, claims=NOT_WORSE)
    assert set(shown) < set(metrics_of(one))
    assert one.fixed != experiment().fixed
    runs, results = planned_runs(one, PARAMS, seeds=range(5)), Results()
    for run in runs:
        results.add(run, outcome(0.5, **{"panel.pass_at_k.1": 0.2 + 0.1 * run.seed, "panel.turns": 3.0}))
    write_results(tmp_path, "rloo", one, results)
    text = board_pages(tmp_path)[page_of("rloo")]
    assert "| arm | `panel.pass_at_k.1` | `panel.turns` |" in text
    assert "| `grpo` | 40.0 % | 3 |" in text


def test_metric_missing_in_an_arm_is_a_dash_unless_claimed(tmp_path: Path) -> None:
    """Contract: a claim's metric is required in the runs of its arms; in other arms it may be missing."""
    values = "report.recovered.accuracy"
    arms = {"a": {}, "b": {"rl": {"epochs": 2}}, "c": {"rl": {"epochs": 3}}}
    claims = [{**NOT_WORSE[0], "arm": "a", "against": against} for against in ("b", "c")]
    claims[0] |= {"metric": values, "margin": 0.05}
    one = write(tmp_path, arms=arms, claims=claims, measured=[values])
    assert [set(required_of(one, arm, 0)) for arm in arms] == [{values, "panel.success"}, {values}, {"panel.success"}]
    runs, results = planned_runs(one, PARAMS, seeds=range(5)), Results()
    for run in runs:
        results.add(run, outcome(0.5, **{values: None if run.arm == "c" else 0.75}))
    write_results(tmp_path, "rloo", one, results)
    text = board_pages(tmp_path)[page_of("rloo")]
    assert "| `c` | – |" in text
    assert "| `b` | 0.75 |" in text


def test_verdict_compares_paired_difference_to_threshold(tmp_path: Path) -> None:
    """One look at five seeds, all of alpha: t(0.975, 4) = 2.776445. p: twice the tail of t(4) beyond 6."""
    one = experiment(looks=[5])
    runs, results = planned_runs(one, PARAMS), Results()
    fill(results, runs, RLOO, GRPO[:4])
    early = report(one, results)["claims"][0]
    assert (early["verdict"], early["looks"], len(early["per_seed"]["grpo"])) == (None, [], 4)
    fill(results, runs, RLOO, GRPO)
    found = report(one, results)
    claim = found["claims"][0]
    assert (claim["verdict"], claim["effect"], claim["seeds"]) == ("reproduced", "better", 5)
    assert claim["difference"] == pytest.approx(0.12)
    assert (claim["low"], claim["high"]) == pytest.approx((0.12 - 0.0555289, 0.12 + 0.0555289), abs=1e-5)
    assert claim["p"] == pytest.approx(0.003883, abs=1e-6)
    assert claim["looks"][0].items() >= {"seeds": 5, "alpha": 0.05, "clusters": 0}.items()
    assert found["cost"] == {"environment_steps": 10100, "seconds": 20.0}
    assert found["commits"] == ["c" * 40]
    assert {"arms", "looks", "budget", "environment", "fixed", "family"} <= set(found)


def test_rows_of_one_panel_add_the_error_over_clusters(tmp_path: Path) -> None:
    """Contract: the error is over seeds and clusters if every run has rows on one panel, and over seeds alone if a run lacks them
    or differs."""
    one = experiment(looks=[5])
    runs, results = planned_runs(one, PARAMS), Results()

    def rows(run: Any, task: str = "t") -> list[dict[str, Any]]:
        hits = (run.seed + (run.arm == "rloo")) % 3
        values = dict.fromkeys(("reward", "turns", "tokens", "accepted", "cost"), 0.0)
        of = [{"task_id": f"{task}{n}", "cluster": f"c{n % 5}", "difficulty": 1.0, "attempts": 2} | values for n in range(10)]
        return [{**row, "successes": (n + hits) % 3} for n, row in enumerate(of)]

    for run in runs:
        results.add(run, replace(outcome(0.5), rows=rows(run)))
    assert report(one, results)["claims"][0]["looks"][0]["clusters"] == 5
    results.tables.rows["grpo/3"] = rows(runs[0], "other")
    assert report(one, results)["claims"][0]["looks"][0]["clusters"] == 0
    del results.tables.rows["grpo/3"]
    assert report(one, results)["claims"][0]["looks"][0]["clusters"] == 0


def test_a_look_is_over_its_own_runs() -> None:
    """Contract: later runs on another panel, or without rows, change no look that was taken before them."""
    one, gain = experiment(looks=[4, 6], claims=[{**SPEC["claims"][0], "threshold": 0.0}]), {"rloo": 1, "grpo": 0}
    values = dict.fromkeys(("reward", "turns", "tokens", "accepted", "cost"), 0.0)
    panel = [{"task_id": f"t{n}", "cluster": f"c{n % 5}", "difficulty": 1.0, "attempts": 20} | values for n in range(10)]
    results = Results()
    for run in planned_runs(one, PARAMS):
        rows = [{**row, "successes": 5 + (7 * n + 3 * run.seed) % 4 + gain[run.arm]} for n, row in enumerate(panel)]
        rows[run.seed]["successes"] += 2 * gain[run.arm]
        results.add(run, replace(outcome(sum(row["successes"] for row in rows) / 200), rows=rows if run.seed < 4 else []))
        if run.name == "grpo/3":
            before = report(one, results)["claims"][0]
    after = report(one, results)["claims"][0]
    assert [look["clusters"] for look in before["looks"]] == [5]
    assert (after["looks"], after["verdict"]) == (before["looks"], before["verdict"])


def test_exploratory_claim_needs_fresh_seeds() -> None:
    """Contract: an exploratory claim is not reproduced by seeds that were already seen; the fresh ones decide it."""
    results, numbers = Results(), (*RLOO, *RLOO)
    fill(results, planned_runs(experiment(), PARAMS), list(numbers), [*GRPO, *(0.9 for _ in range(5))])
    found = {
        fresh: report(experiment(looks=[5], claims=[{**SPEC["claims"][0], "exploratory": True, "fresh_from": fresh}]), results)
        for fresh in (0, 5)
    }
    first, fresh = (found[of]["claims"][0] for of in (0, 5))
    assert (first["effect"], first["verdict"], first["looks"][0]["verdict"]) == ("better", "undecided", "reproduced")
    assert (fresh["effect"], fresh["verdict"], fresh["per_seed"]["grpo"]) == ("worse", "not reproduced", [0.9] * 5)


def save_outcomes(root: Path, rloo: list[float], grpo: list[float], **changes: Any) -> None:
    one = write(root, **{"looks": [5], **changes})
    results = Results(starts={"rloo": 0.31, "grpo": 0.31})
    fill(results, planned_runs(one, PARAMS), rloo, grpo)
    write_results(root, "rloo", one, results)


def test_board_pages_are_made_from_the_result_files(tmp_path: Path) -> None:
    save_outcomes(tmp_path, RLOO, GRPO)
    write(tmp_path, "zzz", method="Other")
    pages = board_pages(tmp_path)
    index, page = pages[PAGE], pages[page_of("rloo")]
    reproduced = "RLOO is better than GRPO. | **reproduced** | better | +12.0 points (+6.4 to +17.6) |"
    assert f"| {reproduced} 5 | 0.004 | **0.004** |" in index
    assert "| **[RLOO](rloo.md)** (search; 10k environment steps, 20 s) |" in index
    assert "| **[Other](zzz.md)** (search; not run yet) |" in index
    assert "keeps **1 of 1** differences" in index
    assert "| Policy optimisation | 1 | 0 | 0 | 0 | 1 | 2 |" in index
    assert f"| 1 | {reproduced} at least +2.0, margin 5.0 | 5 | 0.004 | **0.004** |" in page
    assert "| 1 | RLOO is better than GRPO. | not judged yet | – | – |" in pages[page_of("zzz")]
    assert "This experiment is not run yet." in pages[page_of("zzz")]
    assert "`rloo`: 50.0, 60.0, 70.0, 80.0, 90.0 | `grpo`: 40.0, 50.0, 60.0, 70.0, 70.0" in page
    assert "`rl.algorithm: rloo` | 31.0 %" in page
    assert "Cost: 10k environment steps, 20 s; commit `cccccccccccc`." in page
    assert "10 of 10 runs are of older code" in page
    assert "Intervals are over seeds alone" in page
    assert board_pages(tmp_path) == pages


def test_board_marks_unfinished_and_outdated_results(tmp_path: Path) -> None:
    save_outcomes(tmp_path, [0.5, 0.6], [0.4])
    assert board_rows(tmp_path)[0].state == "1 of 5 seeds"
    write(tmp_path, looks=[6])
    assert board_rows(tmp_path)[0].state == OUTDATED
    assert board_rows(tmp_path)[0].difference == "–"


def test_claim_that_is_not_reproduced_requires_checked_and_world(tmp_path: Path) -> None:
    """`checked` is added after the result and does not make it another experiment."""
    save_outcomes(tmp_path, GRPO, RLOO)
    with pytest.raises(ParamsError, match=r"rloo\.yaml: claim 1 was not reproduced.*'checked' and 'world'"):
        board_pages(tmp_path)
    checked = [{**SPEC["claims"][0], "checked": "advantages against tests/x.py", "world": "No: one turn."}]
    write(tmp_path, claims=checked, looks=[5])
    page = board_pages(tmp_path)[page_of("rloo")]
    assert "| **not reproduced** |" in page
    assert "- Claim 1: advantages against tests/x.py." in page
    assert "- Claim 1: No: one turn." in page


def test_differences_of_other_metrics_keep_their_unit(tmp_path: Path) -> None:
    claims = [{**SPEC["claims"][0], "metric": "panel.cost", "threshold": 0.0, "margin": 0.1}]
    save_outcomes(tmp_path, [0.5, 0.6, 0.5, 0.6, 0.5], [0.6, 0.5, 0.6, 0.5, 0.4], claims=claims)
    row = board_rows(tmp_path)[0]
    assert row.signed(-1.25) == "−1.25"
    assert row.signed(-4650.0) == "−4,650"
