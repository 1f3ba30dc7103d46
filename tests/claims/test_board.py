"""The board's pages: which differences the correction counts, gate, tuning and curves of an experiment, and their figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import yaml

from stages.claims.experiment import FOLDER, Experiment, Family, load_experiment
from stages.claims.judging import write
from stages.claims.results import Results
from stages.claims.sequential import adjusted
from stages.claims.tuning import FIRST_SEED
from stages.reporting.board.experiment_page import page_of
from stages.reporting.board.figures import FOREST, curves_figure, tradeoff_figure
from stages.reporting.board.index import FAMILIES, PAGE, count_verdicts, total_cost
from stages.reporting.board.pages import pages
from stages.reporting.board.rows import Row, rows, saved_results
from stages.reporting.figures.claim_curves import POINTS, binned
from stages.reporting.figures.forest import Mark, Panel, forest
from stages.runtime.validation import ParamsError

EXPLAINED = {"checked": "by hand", "world": "yes"}
SPEC: dict[str, Any] = {
    "family": "credit",
    "method": "Credit",
    "paper": "arXiv 1",
    "switch": "rl.credit.kind",
    "environment": "search",
    "looks": [4, 6],
    "budget": {"environment_steps": 1000},
    "tune": {"key": "rl.learning_rate", "values": [0.001, 0.003]},
    "gate": {"baseline": "b", "runs": 2, "require": [{"arm": "a", "metric": "history.entropy.last", "range": [0.1, 1.0]}]},
    "learnt": "Credit helps. A longer horizon would change our mind.",
    "arms": {"a": {}, "b": {"rl": {"epochs": 2}}},
    "claims": [
        {"says": "A exceeds B.", "arm": "a", "against": "b", **EXPLAINED},
        {"says": "A keeps up with B.", "arm": "a", "against": "b", "kind": "non_inferiority", **EXPLAINED},
        {"says": "A is found to exceed B.", "arm": "a", "against": "b", "exploratory": True, **EXPLAINED},
        {"says": "B exceeds A.", "arm": "b", "against": "a", **EXPLAINED},
        {"says": "A takes more turns.", "arm": "a", "against": "b", "metric": "panel.turns", "margin": 2.0, **EXPLAINED},
    ],
}


def experiment(root: Path, slug: str = "credit", **changes: Any) -> Experiment:
    path = root / FOLDER / f"{slug}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**SPEC, **changes}), encoding="utf-8")
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    return load_experiment(path)


def run(key: str, **metrics: float) -> dict[str, Any]:
    return {"metrics": metrics, "environment_steps": 1000, "seconds": 2.0, "commit": "c" * 40, "code": "0", "key": key}


def curve(values: list[float]) -> list[dict[str, Any]]:
    steps = enumerate(values, start=1)
    return [{"step": n, "environment_steps": 100, "success": one, "reward_mean": one, "entropy": 0.3} for n, one in steps]


def board(root: Path, end: float = 0.6, seeds: int = 4, **changes: Any) -> Experiment:
    """Arm a exceeds b by about 10 points, and by two turns or so."""
    one = experiment(root, **changes)
    results = Results(starts={"a": 0.4, "b": 0.4})
    for seed in range(seeds):
        for arm, gain in (("a", 0.1 + 0.01 * (seed % 3)), ("b", 0.0)):
            name = f"{arm}/{seed}"
            turns = 5.0 + 30 * gain - 0.1 * seed * (arm == "a")
            found = {"panel.success": end + gain, "panel.turns": turns, "history.entropy.last": 0.3}
            results.outcomes[name] = run(name, **found, **{"history.success.first": 0.4, "history.success.last": end})
            results.tables.curves[name] = curve([0.4, 0.5 + gain, end + gain])
    for arm in ("a", "b"):
        for value, success in (("0.001", 0.5), ("0.003", 0.625)):
            name = f"{arm}/{value}/{FIRST_SEED}"
            results.trials[name] = run(name, **{"panel.success": success})
    write(root, "credit", one, results)
    return one


def test_every_family_has_its_heading() -> None:
    assert set(FAMILIES) == set(get_args(Family))


def test_the_correction_counts_what_p_tests(tmp_path: Path) -> None:
    """Contract: Benjamini-Hochberg is over judged claims of superiority; others, and those added after a look, neither count nor
    are they kept."""
    board(tmp_path)
    found = rows(tmp_path)
    assert [row.tested for row in found] == [True, False, False, True, True]
    tested = [row for row in found if row.tested and row.result]
    corrected = [row.correction[0] for row in tested if row.correction]
    assert corrected == adjusted([row.result["p"] for row in tested if row.result])
    assert "keeps **3 of 3** differences" in pages(tmp_path)[PAGE]
    assert count_verdicts(found) == {
        **{"reproduced": 3, "not reproduced": 1, "undecided": 1},
        **{"gate failed": 0, "not judged yet": 0},
    }


def test_a_page_shows_looks_gate_tuning_and_what_was_learnt(tmp_path: Path) -> None:
    board(tmp_path)
    page = pages(tmp_path)[page_of("credit")]
    assert "| 1 | 4 | 2 % | +10.8 points" in page
    assert "A is found to exceed B. *(exploratory)*" in page
    assert "| 2 | A keeps up with B. | **reproduced** | better |" in page
    assert "| non-inferiority, margin 5.0 |" in page
    assert "**Passed.** Seeds 0 to 1." in page
    assert "| of `b` late in training | 60.0 % (60.0, 60.0) | above early (one-sided, 95 %) |" in page
    assert "| `history.entropy.last` of `a` | 0.3 (0.3, 0.3) | 0.1 to 1 |" in page
    assert "| `a` | 50.0 % | **62.5 %** |" in page
    assert "## What we learnt, and what would change our mind\n\nCredit helps." in page
    assert "- Claims 1, 2, 3, 4, 5: yes." in page
    assert "One panel, and one start policy" in page
    assert "12 of 12 runs are of older code" in page


def test_a_gate_without_curves_says_what_it_compared(tmp_path: Path) -> None:
    """Contract: success before and after training is not called success early and late in training."""
    one = board(tmp_path)
    results = Results.load(tmp_path, "credit")
    results.tables.curves = {}
    for found in results.outcomes.values():
        found["metrics"] = {name: value for name, value in found["metrics"].items() if not name.startswith("history.success")}
    write(tmp_path, "credit", one, results)
    page = pages(tmp_path)[page_of("credit")]
    assert "| of `b` before training, as it has no curve | 40.0 % (40.0, 40.0) | – |" in page
    assert "| of `b` after training, as it has no curve | 60.0 % (60.0, 60.0) | above before (one-sided, 95 %) |" in page


def test_what_was_learnt_is_free_text(tmp_path: Path) -> None:
    assert experiment(tmp_path).fixed == experiment(tmp_path, learnt="Something else.").fixed
    experiment(tmp_path, learnt=None)
    assert "What we learnt" not in pages(tmp_path)[page_of("credit")]


def test_a_gate_that_fails_says_why_and_leaves_no_mark_in_the_plot(tmp_path: Path) -> None:
    board(tmp_path, end=0.98)
    files = pages(tmp_path)
    assert "**Failed**: 'b' ends at 98.0% of the panel, not between 5% and 95%. Seeds 0 to 1." in files[page_of("credit")]
    assert "| **all** | 0 | 0 | 0 | 5 | 0 | 5 |" in files[PAGE]
    assert FOREST not in files
    assert "No claim of superiority has been judged yet." in files[PAGE]


def test_figures_are_there_and_always_alike(tmp_path: Path) -> None:
    board(tmp_path)
    files = pages(tmp_path)
    assert "](figures/board.svg)" in files[PAGE]
    assert "](figures/credit_curves.svg)" in files[page_of("credit")]
    for figure in (FOREST, curves_figure("credit")):
        assert files[figure].startswith("<svg")
        assert pages(tmp_path)[figure] == files[figure]


def test_cost_against_success_is_drawn_once_every_arm_has_runs(tmp_path: Path) -> None:
    """Contract: the curve has the arms that the experiment names, and is fixed by no hash, since it decides nothing."""
    one = board(tmp_path, tradeoff=["a", "b"])
    assert one.fixed == experiment(tmp_path, "other").fixed
    assert tradeoff_figure("credit") not in pages(tmp_path), "these runs have no cost"
    results = Results.load(tmp_path, "credit")
    for name, found in results.outcomes.items():
        found["metrics"]["panel.cost"] = 30.0 if name.startswith("a/") else 80.0
    write(tmp_path, "credit", one, results)
    files = pages(tmp_path)
    assert files[tradeoff_figure("credit")].startswith("<svg")
    assert "The line joins `a`, `b`." in files[page_of("credit")]
    with pytest.raises(ParamsError, match="tradeoff names"):
        experiment(tmp_path, tradeoff=["c"])


def test_absent_curves_are_said(tmp_path: Path) -> None:
    one = board(tmp_path)
    results = Results.load(tmp_path, "credit")
    results.tables.curves = {name: of for name, of in results.tables.curves.items() if name.startswith("b/")}
    write(tmp_path, "credit", one, results)
    assert "No curve: `a`." in pages(tmp_path)[page_of("credit")]
    del results.tables.curves["b/3"]
    write(tmp_path, "credit", one, results)
    assert "No curve: `a`, `b` (1 of 4 runs)." in pages(tmp_path)[page_of("credit")]
    results.tables.curves = {}
    write(tmp_path, "credit", one, results)
    files = pages(tmp_path)
    assert "No curves are stored" in files[page_of("credit")]
    assert curves_figure("credit") not in files


def test_results_of_another_experiment_are_not_shown(tmp_path: Path) -> None:
    board(tmp_path)
    changed = experiment(tmp_path, looks=[4, 7])
    assert saved_results(tmp_path, "credit", changed) is None
    page = pages(tmp_path)[page_of("credit")]
    assert "This experiment has changed since it was run." in page
    assert "12 of 12" not in page


def test_a_run_that_several_experiments_use_is_paid_once() -> None:
    shared, own = run("shared", x=1.0), run("own", x=1.0)
    stored = [
        {"environment": "search", "runs": {"a/0": shared, "a/1": own}},
        {"environment": "search", "runs": {"c/0": shared}, "trials": {"c/1": own}},
    ]
    assert total_cost(stored).startswith("All 2 runs stored: 2k environment steps, 4.0 s")
    own["start_seconds"] = 50.0
    assert total_cost(stored).startswith("All 2 runs stored: 2k environment steps, 54 s")
    stored.append({"environment": "tabular", "runs": {"a/0": shared}})
    assert total_cost(stored).startswith("All 3 runs stored"), "problems of lane control with equal settings share keys"


def test_a_curve_is_averaged_over_equal_parts_and_ends_with_its_run() -> None:
    """By hand: an axis to 80 has parts of 2; steps at 1 and 1.5 are in the first, the one at 5 in the third."""
    line = binned((np.array([1.0, 1.5, 5.0]), np.array([0.2, 0.4, 0.9])), 2.0 * POINTS)
    assert np.allclose(line[:3], [0.3, 0.6, 0.9])
    assert np.isnan(line[3:]).all()


def test_an_interval_beyond_the_axis_ends_with_an_arrow() -> None:
    marks = [Mark("inside", "reproduced", 2.0, 1.0, 3.0, 1.0), Mark("beyond", "undecided", 2.0, -9.0, 30.0, 1.0)]
    (axes,) = forest([Panel("Shares", "points", {"Credit": marks}, 10.0)]).axes
    assert [line.get_marker() for line in axes.lines if line.get_marker() not in ("None", None)] == ["o", ">", "D"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["Credit", "inside", "beyond"]
    assert max(max(line.get_xdata()) for line in axes.lines if len(line.get_xdata()) == 2) == 10.0


def test_a_row_before_its_first_look_counts_seeds(tmp_path: Path) -> None:
    board(tmp_path, seeds=3)
    row: Row = rows(tmp_path)[0]
    assert (row.state, row.seeds, row.verdict, row.difference) == ("3 of 4 seeds", "3 of 4", "not judged yet", "–")
