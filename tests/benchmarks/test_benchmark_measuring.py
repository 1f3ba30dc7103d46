"""What the benchmarks' numbers mean: pairs, their order, ratios, and the files they go to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import documents, measure, scaling, suite
from benchmarks.measure import Options, Result, Sample, Side, alternate, fastest, timed, turns


def sample(amount: float, wall: float) -> Sample:
    return Sample(amount, wall, wall)


def test_pairs_alternate_and_warm_ups_are_thrown_away(tmp_path: Path):
    """Contract: who goes first changes from pair to pair; the first pair is not counted."""
    order: list[str] = []
    sides = [Side(name, lambda name=name: order.append(name) or 1.0) for name in "AB"]
    ours, theirs = alternate(*sides, Options(tmp_path, tmp_path, repeats=3))
    assert "".join(order) == "AB" + "BA" + "AB" + "BA"
    assert len(ours) == len(theirs) == 3
    assert turns(3) == [(0, 1), (1, 0), (0, 1)]


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def pass_(self, seconds: float) -> float:
        self.now += seconds
        return 1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock.now)
    return clock


def test_preparation_is_not_timed(clock: Clock):
    side = Side("slow to start", lambda: clock.pass_(2.0), before=lambda: clock.pass_(5.0))
    assert timed(side).wall == 2.0


def test_ratio_is_of_pairs_and_above_one_where_ours_is_faster():
    """By hand: pairs 2/1, 6/2 and 4/1 tokens a second."""
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


def test_the_fastest_setting_is_chosen_and_one_that_fails_is_left_out(tmp_path: Path, clock: Clock):
    def broken() -> Side:
        raise NotImplementedError("no such cache here")

    candidates = [broken, lambda: Side("slow", lambda: clock.pass_(4.0)), lambda: Side("fast", lambda: clock.pass_(2.0))]
    side, rates = fastest(candidates, Options(tmp_path, tmp_path))
    assert side.label == "fast"
    assert rates == {"slow": 0.25, "fast": 0.5}
    with pytest.raises(RuntimeError, match="no such cache"):
        fastest([broken, broken], Options(tmp_path, tmp_path))


def test_exponents_are_those_of_power_laws():
    rows = [{"x": x, "y": 3 * x**0.5} for x in (1.0, 4.0, 16.0)]
    assert [row.get("exponent") for row in scaling.with_exponents(rows, "x", "y")] == [None, 0.5, 0.5]


def test_files_keep_what_was_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    result = Result("s", "x", "seconds", [sample(1, 1.0)], [sample(1, 2.0)]).raw()
    outcomes = {"merge": {"results": {"merge_ram": result}}, "mcts": {"results": {"mcts": result}}}
    monkeypatch.setattr(suite, "measure_in_process", lambda name, options: outcomes[name])
    options = Options(Path(__file__).parents[2], tmp_path)
    assert suite.run(["merge"], options, tmp_path) == []
    assert suite.run(["mcts"], options, tmp_path) == []
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary) == {"merge_ram", "mcts"}
    assert set(summary["mcts"]) == {"ratio", "ours", "theirs", "unit", "against"}
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["scenarios"]["mcts"]["repeats"]["ours"] == [{"amount": 1, "wall_s": 1.0, "cpu_s": 1.0}]
    assert {"commit", "cpu", "nproc", "threads", "versions"} <= set(raw["machine"])
    assert "share of our time" not in documents.block(raw, Path("docs/benchmarks.md"))
    raw["tables"]["profiles"] = {"rows": [{"scenario": "mcts", "attention": 0.25, "python": 0.75}]}
    text = documents.block(raw, Path("docs/benchmarks.md"))
    assert "| share of our time | attention | python |\n|---|---:|---:|\n| `mcts` | 25 % | 75 % |" in text
    assert "| `mcts` | 1 | 2 | s | **2** (2 to 2) | x |" in text
    assert documents.figure(raw).startswith("<svg")


def test_a_scenario_that_fails_is_named_and_the_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def outcome(name: str, options: Options) -> dict:
        if name == "merge":
            raise RuntimeError("merge failed")
        return {"skipped": "nothing here"}

    monkeypatch.setattr(suite, "measure_in_process", outcome)
    options = Options(Path(__file__).parents[2], tmp_path)
    assert suite.run(["merge", "noop_repro"], options, tmp_path) == ["merge failed"]
    assert json.loads((tmp_path / "raw.json").read_text())["skipped"] == {"noop_repro": "nothing here"}
