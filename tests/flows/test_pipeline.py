"""The graph comes from dvc.yaml; results distinguish stages that ran, were restored or are up to date."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from served import until
from small_project import add_work, set_behaviour
from test_supervise import gone

from flows.pipeline import (
    BAD_PARAMETERS,
    ROOT,
    StageFailedError,
    StageResult,
    concurrent_stages,
    gpu_stages,
    item_graph,
    outdated,
    run_items,
    run_stage,
    stage_graph,
    stage_items,
    up_to,
)
from flows.schedule import run_graph


@pytest.mark.parametrize(
    ("path", "weights", "memory", "stages"),
    [
        ("model", 1 << 20, 64 << 20, 2),
        ("model", 1 << 20, 16 << 20, 1),
        ("hub:org/name", 0, 1 << 40, 1),
        ("missing", 0, 64 << 20, 2),
    ],
)
def test_stages_run_side_by_side_where_memory_holds_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, weights: int, memory: int, stages: int
) -> None:
    """Contract: two stages of 13 times the model's size each must fit; the size of a hub model is not known."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(weights))
    (tmp_path / "params.yaml").write_text(yaml.safe_dump({"model": {"path": path}}))
    monkeypatch.setattr("flows.pipeline.available_cores", lambda: 4)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=memory))
    assert concurrent_stages(tmp_path) == stages


def test_stage_graph_comes_from_dvc_yaml(project: Path) -> None:
    """Contract: order and dependencies come from dvc.yaml alone, whatever the order of its entries."""
    assert stage_graph(project) == {"make": [], "join": ["make"]}
    assert list(stage_graph(project)) == ["make", "join"]


def test_lifecycle_stages_are_in_dependency_order() -> None:
    graph = stage_graph(ROOT)
    assert list(graph) == ["curate", "transfer", "sft", "rollout", "annotate", "rl", "merge", "evaluate", "report"]
    assert "rl" in graph["merge"]
    assert "annotate" not in graph["merge"]
    assert "merge" in graph["evaluate"]


def test_run_stage_reports_ran_unchanged_and_restored(project: Path) -> None:
    lines: list[str] = []
    first = run_stage("make", project, echo=lines.append)
    assert first.ran == ("make@a", "make@b")
    assert any("Running stage 'make@a'" in line for line in lines)
    assert run_stage("make", project, echo=lines.append).unchanged == ("make@a", "make@b")
    params = (project / "params.yaml").read_text()
    (project / "params.yaml").write_text(params.replace("scale: 1", "scale: 2"))
    assert run_stage("make", project, echo=lines.append).ran == ("make@a", "make@b")
    (project / "params.yaml").write_text(params)
    assert run_stage("make", project, echo=lines.append).restored == ("make@a", "make@b")


def test_stage_receives_the_run_id_and_a_failing_one_is_named(project: Path) -> None:
    text = (project / "dvc.yaml").read_text().replace("echo ${item.domain} ${scale} >", "echo $LIFECYCLE_RUN_ID >")
    (project / "dvc.yaml").write_text(text)
    run_stage("make", project, {"LIFECYCLE_RUN_ID": "one"}, echo=lambda line: None)
    assert (project / "made" / "a.txt").read_text() == "one\n"
    (project / "dvc.yaml").write_text(text.replace("cat made", "false; cat missing"))
    with pytest.raises(StageFailedError, match="join"):
        run_stage("join", project, echo=lambda line: None)


def test_matrix_stage_has_one_item_per_value(project: Path) -> None:
    assert stage_items(project) == {"join": ["join"], "make": ["make@a", "make@b"]}


def test_item_depends_only_on_its_inputs() -> None:
    graph = item_graph(ROOT)
    assert graph["rollout@search"] == ["curate@search", "sft"]
    assert set(graph["sft"]) == {"curate@search", "curate@textworld"}
    assert set(graph["merge"]) == {"curate@search", "curate@textworld", "sft", "rl@search", "rl@textworld"}
    assert list(up_to("sft", ROOT)) == [*graph["sft"], "sft"]


BARRIER = (
    "touch here-${item.domain}; for i in $(seq 600); do [ $(ls here-* | wc -l) = 2 ] && break; sleep 0.1; done; [ $i != 600 ]"
)


def test_items_run_in_parallel(project: Path) -> None:
    """Each of two items waits until the other has started; then the one that needs both runs."""
    text = (project / "dvc.yaml").read_text()
    (project / "dvc.yaml").write_text(text.replace("cmd: mkdir -p made", f"cmd: {BARRIER} && mkdir -p made"))
    ticks: list[int] = []
    done = run_items(outdated(project), project, echo=lambda line: None, jobs=2, tick=lambda: ticks.append(1))
    assert done == {item: StageResult(ran=(item,)) for item in ("make@a", "make@b", "join")}
    assert ticks
    assert set(yaml.safe_load((project / "dvc.lock").read_text())["stages"]) == {"make@a", "make@b", "join"}


@pytest.mark.slow
def test_only_changed_items_and_their_dependents_run(project: Path) -> None:
    quiet: dict[str, Any] = {"root": project, "echo": lambda line: None}
    assert list(outdated(project)) == ["make@a", "make@b", "join"]
    run_items(outdated(project), **quiet)
    assert outdated(project) == {}
    (project / "made" / "b.txt").unlink()
    assert outdated(project) == {"make@b": [], "join": ["make@b"]}
    assert run_items(outdated(project), **quiet)["make@b"].state == "Restored"


def test_failed_item_gives_the_reason_and_the_other_finishes(project: Path) -> None:
    text = (project / "dvc.yaml").read_text()
    command = "if [ ${item.domain} = a ]; then echo no such key >&2; exit 2; fi; mkdir -p made"
    (project / "dvc.yaml").write_text(text.replace("cmd: mkdir -p made", f"cmd: {command}"))
    with pytest.raises(StageFailedError, match="no such key") as caught:
        run_items(item_graph(project), project, echo=lambda line: None, jobs=2)
    assert caught.value.code == BAD_PARAMETERS
    assert caught.value.bad_parameters
    assert "dvc repro make@a" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).bad_parameters  # it is sent between processes and stored in Prefect's results
    assert (project / "made" / "b.txt").exists()
    assert not (project / "joined.txt").exists()


def test_failure_other_than_parameters_can_be_retried(project: Path) -> None:
    text = (project / "dvc.yaml").read_text()
    (project / "dvc.yaml").write_text(text.replace("cmd: mkdir -p made", "cmd: kill -9 $$; mkdir -p made"))
    with pytest.raises(StageFailedError) as caught:
        run_stage("make@a", project, echo=lambda line: None)
    assert not caught.value.bad_parameters


FLOW = """
import sys
from pathlib import Path
from flows.pipeline import run_items

run_items({"work": []}, Path(sys.argv[1]), jobs=1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_run_leaves_no_process(project: Path, number: signal.Signals) -> None:
    set_behaviour(add_work(project), "hold")
    (project / "joined.txt").write_text("joined\n")
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(project)], cwd=ROOT, start_new_session=True)
    until(lambda: (project / "pids").exists() and (project / "pids").read_text(), "the stage is running")
    started = [item.pid for item in psutil.Process(flow.pid).children(recursive=True)]
    assert len(started) >= 4  # the supervisor, DVC, the stage and its child in another session
    flow.send_signal(number)
    flow.wait()
    assert all(gone(pid) for pid in started)
    set_behaviour(project, "end")
    assert run_stage("work", project, echo=lambda line: None).ran == ("work",)


def test_concurrency_is_limited_by_jobs_and_gpu() -> None:
    graph = {"a": [], "b": [], "c": [], "d": ["a"]}
    running: set[str] = set()
    concurrent: list[set[str]] = []

    def work(item: str) -> str:
        running.add(item)
        concurrent.append(set(running))
        time.sleep(0.05)
        running.discard(item)
        return item.upper()

    with ThreadPoolExecutor(4) as pool:
        for jobs in (1, 2, 4):
            concurrent.clear()
            done = run_graph(graph, lambda item: pool.submit(work, item), jobs, alone={"a", "b", "d"})
            assert done == {item: item.upper() for item in graph}
            assert max(map(len, concurrent)) == min(jobs, 2)
            assert all(len(at_once & {"a", "b", "d"}) == 1 or at_once == {"c"} for at_once in concurrent)


def test_failure_stops_new_items_and_lets_running_ones_finish() -> None:
    started: list[str] = []

    def work(item: str) -> None:
        started.append(item)
        if item == "bad":
            raise StageFailedError("no")
        if item == "worse":
            time.sleep(0.05)
            raise StageFailedError("no such key", BAD_PARAMETERS)

    with ThreadPoolExecutor(2) as pool, pytest.raises(StageFailedError, match="no such key"):
        run_graph({"bad": [], "worse": [], "later": [], "last": ["bad"]}, lambda item: pool.submit(work, item), 2)
    assert started == ["bad", "worse"]


def test_gpu_stages_are_those_that_depend_on_the_device(project: Path) -> None:
    values = {"resources": {"device": "cpu"}}
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    assert gpu_stages(project) == frozenset()
    values["resources"]["device"] = "cuda:0"
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    (project / "dvc.yaml").write_text((project / "dvc.yaml").read_text().replace("[scale]", "[scale, resources.device]"))
    assert gpu_stages(project) == {"make"}
