"""FakeClock spans of a process, its threads and its forks."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stages.runtime import spans
from stages.runtime.costs import Cost, measured, read_cost
from stages.runtime.speed import PARTS, duration, part_seconds, row, speed, table
from stages.runtime.team import started


class FakeClock:
    now = 100.0

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeClock]:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    spans.restart()
    yield clock
    monkeypatch.undo()
    spans.restart()


def test_every_second_is_charged_once_to_the_innermost_span(clock: FakeClock) -> None:
    """Time before the first span is `start`, later time outside spans is `other`."""

    def fail() -> None:
        clock.advance(8)
        raise ValueError("broken")

    spans.restart(uptime=3)
    clock.advance(2)
    with spans.span("training"):
        clock.advance(1)
        with spans.span("waiting"):
            clock.advance(4)
        with pytest.raises(ValueError, match="broken"), spans.span("training.forward"):
            fail()
        clock.advance(16)
    clock.advance(32)
    expected = {"start": 5, "training": 17, "waiting": 4, "training.forward": 8, "other": 32}
    assert {name: seconds for name, seconds in spans.totals().seconds.items() if seconds} == expected


def test_decorated_function_can_call_itself(clock: FakeClock) -> None:
    @spans.span("engine")
    def work(depth: int) -> None:
        clock.advance(1)
        if depth:
            work(depth - 1)

    work(3)
    assert spans.totals().seconds["engine"] == 4


def test_other_threads_do_not_change_main_thread_times(clock: FakeClock) -> None:
    @spans.span("environment")
    def step() -> None:
        spans.count("environment_steps")
        clock.advance(2)

    with ThreadPoolExecutor(1) as pool, spans.span("engine"):
        pool.submit(step).result()
    found = spans.totals()
    assert (found.seconds["engine"], found.seconds["environment"], found.beside["environment"]) == (2, 0, 2)
    assert found.counts["environment_steps"] == 1


def test_waiting_for_a_pool_is_not_counted(clock: FakeClock) -> None:
    def arriving() -> Iterator[tuple[str, spans.Totals]]:
        for name in "ab":
            clock.advance(50)
            done = spans.Totals()
            done.seconds["engine"] = 7
            yield name, done

    assert list(spans.collected(arriving())) == ["a", "b"]
    found = spans.totals()
    assert found.seconds["engine"] == 14
    assert sum(found.seconds.values()) == 14


def test_pause_is_no_part_of_the_stages_time(clock: FakeClock, tmp_path: Path) -> None:
    """Contract: a stage that trains 5 s and is paused 100 s took 5 s, also where another process paused with it."""
    with measured(tmp_path, "rl@search", "a"):
        with spans.span("training"):
            clock.advance(5)
            with spans.span(spans.PAUSED):
                clock.advance(100)
        other = spans.Totals()
        other.seconds.update({"training": 5.0, spans.PAUSED: 100.0})
        spans.add(other)
    cost = read_cost(tmp_path, "rl@search")
    assert cost is not None
    assert cost.seconds == 5
    assert {name: seconds for name, seconds in cost.spans.items() if seconds} == {"training": 10}


def test_forks_count_from_zero_and_are_summed() -> None:
    spans.restart(uptime=1000)
    spans.count("sampled_tokens", 5)
    with started(2) as team:
        spans.count("sampled_tokens", 2 + team.index)
        found = team.gather(spans.totals())
        if team.index:
            os._exit(0)
    spans.add(found[1])
    total = spans.totals()
    assert found[1].counts == {"sampled_tokens": 3}
    assert total.counts == {"sampled_tokens": 10}
    assert 1000 < sum(total.seconds.values()) < 1900
    spans.restart()


def test_libraries_are_imported_before_forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with started(3, ["slow_to_import"]) as team:
        importers = team.gather(importlib.import_module("slow_to_import").IMPORTED_BY)
        if team.index:
            os._exit(0)
    assert importers == [os.getpid()] * 3


def test_spans_of_a_resumed_run_add_up(tmp_path: Path) -> None:
    def stop() -> None:
        spans.count("sampled_tokens", 5)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), measured(tmp_path, "rl@search", "a", 2.0):
        stop()
    with measured(tmp_path, "rl@search", "a", 3.0), spans.span("engine"):
        spans.count("sampled_tokens", 6)
    cost = read_cost(tmp_path, "rl@search")
    assert cost is not None
    assert cost.counts == {"sampled_tokens": 11}
    assert cost.spans["start"] >= 5
    assert sum(cost.spans.values()) == pytest.approx(cost.seconds, abs=0.5)  # a busy machine loses time between spans
    assert cost.peak_tree_bytes >= cost.peak_bytes > 1_000_000


COST = Cost(
    "a",
    seconds=100,
    cpu_seconds=150,
    cores=2,
    peak_tree_bytes=1_500_000_000,
    spans={"start": 10, "engine": 90, "training": 20, "training.forward": 30, "unknown": 50},
    beside={"environment": 4},
    counts={"sampled_tokens": 5000, "environment_steps": 2000, "environment_hits": 1500},
    done=True,
)


def test_speed_metrics_of_a_cost() -> None:
    found = speed(COST)
    assert found["cpu_use"] == 0.75
    assert found["share/training"] == 0.25
    assert found["share/training.forward"] == 0.15
    assert found["share/other"] == 0.25
    assert sum(found[f"share/{part}"] for part in PARTS) == pytest.approx(1)
    assert (found["sampled_tokens_per_s"], found["environment_ms"], found["memory_bytes"]) == (50, 2, 1.5e9)
    assert (found["environment_remembered"], found["environment_saved_s"]) == (0.75, 12), "500 steps took 4 s, so 1,500 take 12"
    assert part_seconds({"nothing.known": 3})["other"] == 3
    cells = row("rl@search", COST)
    assert cells[:10] == ["rl@search", "1 min 40 s", "75 %", "50", "–", "20", "2", "75 %", "12 s", "1.5 GB"]
    assert speed(Cost("a")) == {}


def test_table_lists_finished_stages_in_pipeline_order(tmp_path: Path) -> None:
    assert table(tmp_path) == ""
    for title in ("rl@search", "curate@search"):
        with measured(tmp_path, title, "a"):
            pass
    with pytest.raises(ValueError, match="broken"), measured(tmp_path, "sft", "a"):
        raise ValueError("broken")
    lines = table(tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ["stage", "curate@search", "rl@search"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(("seconds", "text"), [(0.44, "0.4 s"), (41.2, "41 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")])
def test_durations_are_formatted_for_readers(seconds: float, text: str) -> None:
    assert duration(seconds) == text
