"""The benchmarks' numbers: pairs and their order, ratios, resumed runs, result files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from benchmarks import default_run, documents, measure, nodes, scaling, side_by_side, suite, workers
from benchmarks.measure import Options, Result, Sample, Side, alternate, fastest, timed, turns
from stages.params import load_params
from stages.runtime.costs import Cost, cost_file
from stages.runtime.files import atomic_text
from stages.runtime.lineage import identity

ROOT = Path(__file__).parents[2]


def sample(amount: float, wall: float) -> Sample:
    return Sample(amount, wall, wall)


RESULT = Result("s", "x", "seconds", [sample(1, 1.0)], [sample(1, 2.0)]).raw()


def test_pairs_alternate_and_warm_up_is_discarded(tmp_path: Path):
    """Contract: the order changes from pair to pair; the first pair is not counted."""
    order: list[str] = []
    sides = [Side(name, lambda name=name: order.append(name) or 1.0) for name in "AB"]
    ours, theirs = alternate(*sides, Options(tmp_path, tmp_path, repeats=3))
    assert "".join(order) == "AB" + "BA" + "AB" + "BA"
    assert len(ours) == len(theirs) == 3
    assert turns(3) == [(0, 1), (1, 0), (0, 1)]


class Clock:
    """A clock that advances on demand."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    return clock


def test_preparation_is_not_timed(clock: Clock):
    side = Side("slow to start", lambda: clock.advance(2.0), before=lambda: clock.advance(5.0))
    assert timed(side).wall == 2.0


def test_ratio_is_paired_and_above_one_if_ours_is_faster():
    """Pairs of 2/1, 6/2 and 4/1 tokens a second."""
    ours, theirs = [sample(2, 1), sample(6, 1), sample(4, 1)], [sample(1, 1), sample(4, 2), sample(1, 1)]
    rates = Result("tokens/s", "x", "rate", ours, theirs).summary()
    assert rates["ratio"] == {"median": 3.0, "low": 2.0, "high": 4.0}
    assert (rates["ours"], rates["theirs"]) == (4.0, 1.0)
    seconds = Result("s", "x", "seconds", [sample(1, 2.0)], [sample(1, 5.0)]).summary()
    assert seconds["ratio"]["median"] == 2.5
    assert (seconds["ours"], seconds["theirs"]) == (2.0, 5.0)
    limit = Result("s", "x", "limit", [sample(1, 0.5)], limit=1.0).summary()
    assert limit["ratio"]["median"] == 2.0
    assert limit["theirs"] == 1.0


def test_fastest_setting_is_chosen_and_failing_ones_are_skipped(tmp_path: Path, clock: Clock):
    def broken() -> Side:
        raise NotImplementedError("no such cache here")

    closed: list[str] = []

    def candidate(name: str, seconds: float) -> Callable[[], Side]:
        return lambda: Side(name, lambda: clock.advance(seconds), close=lambda: closed.append(name))

    candidates = [broken, candidate("slow", 4.0), candidate("fast", 2.0)]
    side, rates = fastest(candidates, Options(tmp_path, tmp_path))
    assert side.label == "fast"
    assert rates == {"slow": 0.25, "fast": 0.5}
    assert closed == ["slow"]
    with pytest.raises(RuntimeError, match="no such cache"):
        fastest([broken, broken], Options(tmp_path, tmp_path))


def test_exponents_of_power_laws():
    rows = [{"x": x, "y": 3 * x**0.5} for x in (1.0, 4.0, 16.0)]
    assert [row.get("exponent") for row in scaling.with_exponents(rows, "x", "y")] == [None, 0.5, 0.5]


def test_files_keep_scenarios_that_were_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = Options(ROOT, tmp_path)
    outcomes = {"merge": {"results": {"merge_ram": RESULT}}, "mcts": {"results": {"mcts": RESULT}}}
    monkeypatch.setattr(suite, "measure_in_process", lambda name, options: outcomes[name])
    assert suite.run(["merge"], options, tmp_path) == []
    assert suite.run(["mcts"], options, tmp_path) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {"merge_ram", "mcts"}
    assert set(summary["mcts"]) == set(suite.SUMMARY)
    assert summary["mcts"]["cores"] == options.cores
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["scenarios"]["mcts"]["repeats"]["ours"] == [{"amount": 1, "wall_s": 1.0, "cpu_s": 1.0}]
    assert {"commit", "cpu", "nproc", "threads", "versions"} <= set(raw["machine"])
    assert "share of our time" not in documents.block(raw, Path("docs/benchmarks.md"))
    raw["tables"]["profiles"] = {"rows": [{"scenario": "mcts", "attention": 0.25, "python": 0.75}]}
    text = documents.block(raw, Path("docs/benchmarks.md"))
    assert "| share of our time | attention | python |\n|---|---:|---:|\n| `mcts` | 25 % | 75 % |" in text
    assert "| `mcts` | 1 | 2 | s | **2** (2 to 2) | x |" in text
    assert documents.figure(raw).startswith("<svg")


def test_failed_scenario_is_named_and_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def outcome(name: str, options: Options) -> dict:
        if name == "merge":
            raise RuntimeError("merge failed")
        return {"skipped": "nothing here"}

    monkeypatch.setattr(suite, "measure_in_process", outcome)
    options = Options(ROOT, tmp_path)
    assert suite.run(["merge", "noop_repro"], options, tmp_path) == ["merge failed"]
    assert json.loads((tmp_path / "raw.json").read_text())["skipped"] == {"noop_repro": "nothing here"}


def test_interrupted_run_resumes_with_missing_scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contract: results with the same key are kept; `fresh`, other settings and skipped scenarios are measured again."""
    runs: list[str] = []

    def outcome(name: str, options: Options) -> dict:
        runs.append(name)
        if name == "mcts" and runs.count("mcts") == 1:
            raise KeyboardInterrupt
        return {"skipped": "nothing here"} if name == "sandbox" else {"results": {name: RESULT}}

    monkeypatch.setattr(suite, "measure_in_process", outcome)
    options, names = Options(ROOT, tmp_path), ["merge", "sandbox", "mcts"]
    with pytest.raises(KeyboardInterrupt):
        suite.run(names, options, tmp_path)
    assert suite.run(names, options, tmp_path) == []
    assert runs == ["merge", "sandbox", "mcts", "sandbox", "mcts"]
    suite.run(["merge"], options, tmp_path, fresh=True)
    suite.run(["merge"], replace(options, workers=3), tmp_path)
    assert runs[5:] == ["merge", "merge"]


def test_key_depends_on_the_modules_of_a_scenario(tmp_path: Path):
    """Contract: another scenario's module leaves the key unchanged; the module of merge's subprocess counts."""
    used = {path.stem for path in suite.modules("merge")}
    assert {"merge", "merge_process", "measure", "models"} <= used
    assert not used & {"mcts", "suite", "trl_side"}
    machine = {"cpu": "x", "commit": "a"}
    options = Options(ROOT, tmp_path)
    key = suite.key("merge", options, machine)
    assert key == suite.key("merge", options, {**machine, "commit": "b"})
    assert key != suite.key("merge", options, {**machine, "cpu": "y"})
    assert suite.key("default_run", options, machine) == ""


def test_table_of_the_gpu_leaves_out_what_failed():
    row = {"ours": 0.25, "theirs": 0.5, "unit": "s", "ratio": {"median": 2.0, "low": 1.5, "high": 2.5}}
    row["peak_bytes"] = {"ours": 2**30, "theirs": 3 * 2**30}
    versions = {"torch": "2.11.0", "transformers": "5.17.0", "trl": "1.16.0"}
    machine = {"device": "some card", "precision": "bfloat16", "cuda": "13.0", "versions": versions}
    text = documents.on_gpu({"machine": machine, "repeats": 3, "scenarios": {"step": row, "other": {"failed": "no memory"}}})
    assert "| `step` | 0.25 s | 0.5 s | **2** (1.5 to 2.5) | 1.0 GiB | 3.0 GiB |" in text
    assert "other" not in text
    assert "some card, bfloat16" in text


def test_line_of_the_gpu_has_rollouts_and_the_range_of_training_steps():
    steps = {f"train_step_{name}": {"ratio": {"median": median}} for name, median in (("a", 1.5), ("b", 0.75), ("c", 1.0))}
    rollouts = {"ours": 2000.0, "unit": "action tokens/s", "ratio": {"median": 6.0}}
    large = {
        "machine": {"device": "some card"},
        "model": {"parameters": 387e6},
        "scenarios": {**steps, "train_step_d": {"failed": ""}},
    }
    assert documents.speed_on_gpu(large) == []
    large["scenarios"][documents.ROLLOUTS] = rollouts
    (line,) = documents.speed_on_gpu(large)
    assert "some card, 387 million weights" in line
    assert "rollouts 2,000 action tokens/s, **6 times**, and training steps **0.75 to 1.5 times**" in line


def test_serial_share_and_predicted_speedup():
    """8 s become 5 s with two workers: 2 s are serial, so four workers take 3.5 s; 4 s become 2 s: nothing is serial."""
    assert workers.serial_share(8.0, 5.0, 2) == 0.25
    assert workers.serial_share(4.0, 5.0, 2) == 1.0
    rows = {row["workers"]: row for row in workers.predicted({"rl": (8.0, 5.0), "rollout": (4.0, 2.0)}, 2)}
    assert rows[1] == {"workers": 1, "rl": 1.0, "rollout": 1.0, "together": 1.0}
    assert rows[2]["together"] == measure.rounded(12 / 7)
    assert (rows[4]["rl"], rows[4]["rollout"], rows[4]["together"]) == (measure.rounded(8 / 3.5), 4.0, measure.rounded(12 / 4.5))


@pytest.mark.parametrize("module", [nodes, side_by_side, workers])
def test_what_is_timed_has_work(module: ModuleType, tmp_path: Path) -> None:
    """Contract: rollouts are played and trees grown where a scenario times them, though the default run has none."""
    folder = workers.make_checkout(Options(ROOT, tmp_path), tmp_path / "checkout", module.EDITS)
    params, timed = load_params(folder / "params.yaml"), set(getattr(module, "STAGES", ["rollout"]))
    for domain in params.domains:
        rollout: Any = params.section("rollout", domain)
        annotate: Any = params.section("annotate", domain)
        assert rollout.tasks * rollout.attempts > 0
        assert annotate.tasks > 0 or "annotate" not in timed


def test_concurrent_stages_count_once():
    """0 to 10 and 5 to 12 overlap, 20 to 21 follows a pause; the peaks of the first two add up."""
    spans = [default_run.Span(5, 12, 1.0, 3.0), default_run.Span(0, 10, 1.0, 2.0), default_run.Span(20, 21, 1.0, 4.0)]
    assert default_run.busy_seconds(spans) == 13
    assert default_run.peak_bytes(spans) == 5.0


def test_the_default_run_is_all_its_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Contract: the report counts as every stage, memory is that of all processes of a stage, and a run of which DVC restored a
    stage from its cache, or which is of other inputs, has no time."""
    by_domain = {"cmd": "-", "matrix": {"domain": "-"}}
    stages = {"sft": {"cmd": "-"}, "rl": by_domain, "transfer": by_domain, "report": {"cmd": "-"}}
    (tmp_path / "dvc.yaml").write_text(yaml.safe_dump({"stages": stages}))
    same = identity({})
    titles = ["sft", "rl@a", "rl@b", "report"]
    for place, title in enumerate(titles):
        assert default_run.recorded(tmp_path, ["a", "b"]) == {}
        cost = Cost(same, 10.0, 12.0, peak_bytes=2, peak_tree_bytes=3 + place, done=True)
        atomic_text(cost_file(tmp_path, title), json.dumps(asdict(cost)))
    found = default_run.recorded(tmp_path, ["a", "b"])
    assert {title: (span.end - span.start, span.cpu, span.peak) for title, span in found.items()} == {
        title: (pytest.approx(10.0), 12.0, 3 + place) for place, title in enumerate(titles)
    }
    assert default_run.recorded(tmp_path, ["a", "b"], ["c"]) == {}
    atomic_text(cost_file(tmp_path, "rl@b"), json.dumps(asdict(Cost("other", 10.0, done=True))))
    assert default_run.recorded(tmp_path, ["a", "b"]) == {}


def test_claim_times_are_read_from_the_results():
    rows = default_run.claims(Options(ROOT, ROOT))
    assert "agentswift" in {row["claim"] for row in rows}
    assert all(row["low"] <= row["median"] <= row["high"] for row in rows)


def test_versions_of_packages_that_are_gone_stay_with_their_results() -> None:
    """Contract: measuring a few scenarios where mergekit is not installed leaves the version that measured the merges."""
    now = {"torch": "2.13", "mergekit": suite.MISSING, "trl": suite.MISSING}
    before = {"torch": "2.12", "mergekit": "0.1.5"}
    assert suite.known_versions(now, before) == {"torch": "2.13", "mergekit": "0.1.5", "trl": suite.MISSING}


def test_the_page_names_the_processor_of_each_scenario() -> None:
    rows = {"a": {"device": "one"}, "b": {"device": "one"}, "c": {"device": "other"}}
    assert documents.devices({"scenarios": rows, "machine": {"cpu": "other"}}) == "one (on other: `c`)"
    assert documents.devices({"scenarios": {}, "machine": {"cpu": "other"}}) == "other"
