"""Pausing, resuming and stopping a training stage between steps changes no byte; what it tells can be read while it runs."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from stages import rl
from stages.records.episode import Owner, read_rows
from stages.runtime import live
from stages.runtime import stage as runtime_stage
from stages.runtime.live import FOLDER, PAUSE, RESUME, STOP, Live, StoppedError, read_history, read_state, request, states
from stages.training.common.steering import Steering
from training.toys import SHORT_RUN, as_processes, outputs

SECTION: dict[str, Any] = {**SHORT_RUN, "steps": 5, "checkpoint_every": 4}
TITLE = "rl@toy"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """Step -> request that is made while the step runs. A paused stage is asked to go on half a second later."""
    at: dict[int, str] = {}
    tell = Live.step
    monkeypatch.setattr(live, "EPISODES_EVERY_S", 0.0)

    def go_on(root: Any) -> None:
        deadline = time.monotonic() + 60
        while (state := read_state(root / FOLDER / TITLE)) is None or state.phase != "paused":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        request(root, TITLE, RESUME, "test")

    def step(self: Live, row: Any) -> None:
        root = self.folder.parents[2]
        if wanted := at.pop(self.state.step + 1, None):
            request(root, TITLE, wanted, "test")
            if wanted == PAUSE:
                threading.Thread(target=go_on, args=(root,), daemon=True).start()
        tell(self, row)

    monkeypatch.setattr(Live, "step", step)
    return at


def noting(context: Any) -> Any:
    """The context, whose tracker keeps tags."""
    context.tracker.tagged = {}
    context.tracker.tags = context.tracker.tagged.update
    return context


def test_paused_stopped_and_resumed_runs_write_the_same_bytes(make_context: Any, asked: dict[int, str]) -> None:
    """Contract: a run that is paused after a step, stopped after another, and started again writes what an undisturbed one
    writes; each request is recorded in its run."""
    plain = noting(make_context("rl", "plain", rl=SECTION))
    rl.run(plain)
    steered = noting(make_context("rl", "steered", rl=SECTION))
    asked.update({2: PAUSE, 3: STOP})
    started = time.monotonic()
    with pytest.raises(StoppedError, match=r"stopped after step 3, as requested \(test\); run the stage again to go on"):
        rl.run(steered)
    assert time.monotonic() - started > 0.5
    told = steered.tracker.tagged["control"].split("; ")
    assert told[0] == "paused after step 2 (test)"
    assert told[1].startswith("went on after ")
    assert told[2] == "stopped after step 3 (test)"
    assert steered.tracker.metrics["control/paused_s"][0] >= 0.5
    assert not (steered.root / "data/models/rl").exists()
    folder = steered.root / FOLDER / TITLE
    assert (read_state(folder).phase, read_state(folder).step) == ("stopped", 3)

    again = noting(make_context("rl", "steered", rl=SECTION))
    rl.run(again)
    assert len(again.tracker.metrics["success"]) == 2  # steps 4 and 5 only
    assert outputs(again.root) == outputs(plain.root)
    assert plain.tracker.tagged == again.tracker.tagged == {}
    assert (read_state(folder).phase, read_state(folder).step) == ("finished", 5)


def test_a_run_tells_its_history_and_newest_episodes(make_context: Any, asked: dict[int, str]) -> None:
    context = make_context("rl", rl=SECTION)
    rl.run(context)
    folder = context.root / FOLDER / TITLE
    history = read_history(folder)
    assert [row["step"] for row in history] == [1, 2, 3, 4, 5]
    assert [row["success"] for row in history] == context.tracker.metrics["success"]
    kept = sorted((folder / "episodes").iterdir())
    assert [path.stem for path in kept] == ["00000002", "00000003", "00000004", "00000005"]
    rows = read_rows(kept[-1])
    assert len(rows) == 12
    assert {row["step"] for row in rows} == {5}
    for row in rows:
        assert len(row["advantages"]) == len(row["token_ids"])
        assert any(owner == Owner.POLICY for owner in row["owner"])


def test_stop_after_the_last_step_just_ends(make_context: Any, asked: dict[int, str]) -> None:
    context = make_context("rl", rl={**SECTION, "steps": 2})
    asked[2] = STOP
    rl.run(context)
    assert (context.root / "data/models/rl/toy").exists()
    assert read_state(context.root / FOLDER / TITLE).phase == "finished"


def test_requests_to_stages_that_do_not_run_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match=r"rl@toy does not run$"):
        request(tmp_path, TITLE, PAUSE, "test")
    Live(tmp_path, "sft").begin("training", 3, [])
    with pytest.raises(ValueError, match="rl@toy does not run; running: sft"):
        request(tmp_path, TITLE, PAUSE, "test")
    with pytest.raises(ValueError, match="unknown request 'halt'; known: pause, resume, stop"):
        request(tmp_path, "sft", "halt", "test")


def test_an_earlier_request_is_void_and_a_dead_stage_is_stopped(tmp_path: Any) -> None:
    first = Live(tmp_path, TITLE)
    first.begin("training", 3, [])
    request(tmp_path, TITLE, STOP, "test")
    assert first.wanted() == (STOP, "test")
    second = Live(tmp_path, TITLE)
    second.begin("training", 3, [{"step": 1.0}])
    assert second.wanted() == ("", "")
    assert [state.step for state in states(tmp_path)] == [1]
    second._tell(second.state.__class__(TITLE, "training", 3, 2, "running", 2**22 + 1, "1"))
    assert read_state(second.folder).phase == "stopped"


def test_request_during_the_last_step_of_a_warm_start_reaches_the_training(tmp_path: Any) -> None:
    """Contract: what a request was promised happens, although the loop that it was made to has no step left."""
    first = Live(tmp_path, TITLE)
    first.begin("warm_start", 1, [])
    request(tmp_path, TITLE, STOP, "test")
    first.step({"step": 1.0})
    first.end("finished")
    second = Live(tmp_path, TITLE)
    second.begin("training", 3, [])
    assert second.wanted() == (STOP, "test")
    second.note("stopped after step 1 (test)", "stopped")
    third = Live(tmp_path, TITLE)
    third.begin("training", 3, [])
    assert third.wanted() == ("", "")


def test_all_processes_stop_together(tmp_path: Any) -> None:
    """The first process reads the request; the others, which might otherwise wait for it in vain, follow."""
    Live(tmp_path, TITLE).begin("training", 3, [])
    request(tmp_path, TITLE, STOP, "test")
    saved = []

    def process(index: int, gather: Any) -> str:
        tracker = SimpleNamespace(tags=lambda values: None, metric=lambda *values: None)
        context = SimpleNamespace(root=tmp_path, title=TITLE, main=index == 0, shard=None, tracker=tracker)
        group = SimpleNamespace(count=2, gather=lambda own: [item for items in gather(own) for item in items])
        steering = Steering.__new__(Steering)
        steering.context, steering.processes = context, group  # type: ignore[assignment]
        steering.live = Live(tmp_path, TITLE) if index == 0 else None
        try:
            steering.obey(1, lambda: saved.append(index))
        except StoppedError as error:
            return str(error)
        return "goes on"

    found = as_processes(2, process)
    assert found[0] == found[1] == "stopped after step 1, as requested (test); run the stage again to go on from there"
    assert saved[-2:] == [0, 1]


def test_a_stopped_stage_exits_with_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    ends: list[str] = []
    context = SimpleNamespace(title=TITLE, main=True, tracker=SimpleNamespace(close=ends.append))

    def work() -> None:
        raise StoppedError("stopped after step 3")

    assert runtime_stage._tracked(context, work) == runtime_stage.STOPPED == 3  # type: ignore[arg-type]
    assert ends == ["KILLED"]
    assert capsys.readouterr().err == "rl@toy: stopped after step 3\n"
