"""The graph comes from dvc.yaml, and what DVC did is told apart: ran, restored, up to date."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from served import until
from small_project import add_work, do
from test_supervise import gone

from flows.pipeline import (
    BAD_PARAMETERS,
    ROOT,
    StageFailedError,
    StageResult,
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


def test_the_graph_is_dvc_yamls(project: Path) -> None:
    """The flow has no second list of stages: order and dependencies come from dvc.yaml, however its entries are ordered."""
    assert stage_graph(project) == {"make": [], "join": ["make"]}
    assert list(stage_graph(project)) == ["make", "join"]


def test_the_lifecycle_runs_in_the_order_of_the_data() -> None:
    graph = stage_graph(ROOT)
    assert list(graph) == ["curate", "sft", "rollout", "annotate", "rl", "merge", "evaluate", "report"]
    assert "rl" in graph["merge"]
    assert "annotate" not in graph["merge"]
    assert "merge" in graph["evaluate"]


def test_ran_up_to_date_and_restored_are_told_apart(project: Path) -> None:
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


def test_a_stage_sees_the_lifecycles_id_and_a_failing_one_is_named(project: Path) -> None:
    text = (project / "dvc.yaml").read_text().replace("echo ${item.domain} ${scale} >", "echo $LIFECYCLE_RUN_ID >")
    (project / "dvc.yaml").write_text(text)
    run_stage("make", project, {"LIFECYCLE_RUN_ID": "one"}, echo=lambda line: None)
    assert (project / "made" / "a.txt").read_text() == "one\n"
    (project / "dvc.yaml").write_text(text.replace("cat made", "false; cat missing"))
    with pytest.raises(StageFailedError, match="join"):
        run_stage("join", project, echo=lambda line: None)


def test_items_of_a_stage_are_dvcs_own(project: Path) -> None:
    assert stage_items(project) == {"join": ["join"], "make": ["make@a", "make@b"]}


def test_an_item_needs_only_what_it_reads() -> None:
    graph = item_graph(ROOT)
    assert graph["rollout@search"] == ["curate@search", "sft"]
    assert set(graph["sft"]) == {"curate@search", "curate@textworld"}
    assert set(graph["merge"]) == {"sft", "rl@search", "rl@textworld"}
    assert list(up_to("sft", ROOT)) == [*graph["sft"], "sft"]


MEET = "touch here-${item.domain}; for i in $(seq 600); do [ $(ls here-* | wc -l) = 2 ] && break; sleep 0.1; done; [ $i != 600 ]"


def test_items_run_side_by_side(project: Path) -> None:
    """Two items truly run at once: each of these waits for the other to have started. Then what needs both runs."""
    text = (project / "dvc.yaml").read_text()
    (project / "dvc.yaml").write_text(text.replace("cmd: mkdir -p made", f"cmd: {MEET} && mkdir -p made"))
    ticks: list[int] = []
    done = run_items(outdated(project), project, echo=lambda line: None, jobs=2, tick=lambda: ticks.append(1))
    assert done == {item: StageResult(ran=(item,)) for item in ("make@a", "make@b", "join")}
    assert ticks
    assert set(yaml.safe_load((project / "dvc.lock").read_text())["stages"]) == {"make@a", "make@b", "join"}


def test_only_what_changed_and_what_follows_is_run(project: Path) -> None:
    quiet: dict[str, Any] = {"root": project, "echo": lambda line: None}
    assert list(outdated(project)) == ["make@a", "make@b", "join"]
    run_items(outdated(project), **quiet)
    assert outdated(project) == {}
    (project / "made" / "b.txt").unlink()
    assert outdated(project) == {"make@b": [], "join": ["make@b"]}
    assert run_items(outdated(project), **quiet)["make@b"].state == "Restored"


def test_an_item_that_fails_leaves_the_other_at_work_and_says_why(project: Path) -> None:
    text = (project / "dvc.yaml").read_text()
    command = "if [ ${item.domain} = a ]; then echo no such key >&2; exit 2; fi; mkdir -p made"
    (project / "dvc.yaml").write_text(text.replace("cmd: mkdir -p made", f"cmd: {command}"))
    with pytest.raises(StageFailedError, match="no such key") as caught:
        run_items(item_graph(project), project, echo=lambda line: None, jobs=2)
    assert caught.value.code == BAD_PARAMETERS
    assert caught.value.bad_parameters
    assert "dvc repro make@a" in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).bad_parameters  # it crosses processes and Prefect's results
    assert (project / "made" / "b.txt").exists()
    assert not (project / "joined.txt").exists()


def test_a_failure_that_is_not_about_parameters_can_be_tried_again(project: Path) -> None:
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
def test_nothing_is_left_of_a_run_whose_process_is_killed(project: Path, number: signal.Signals) -> None:
    do(add_work(project), "hold")
    (project / "joined.txt").write_text("joined\n")
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(project)], cwd=ROOT, start_new_session=True)
    until(lambda: (project / "pids").exists() and (project / "pids").read_text(), "the stage at work")
    started = [item.pid for item in psutil.Process(flow.pid).children(recursive=True)]
    assert len(started) >= 4  # the supervisor, DVC, the stage and its child in another session
    flow.send_signal(number)
    flow.wait()
    assert all(gone(pid) for pid in started)
    do(project, "end")
    assert run_stage("work", project, echo=lambda line: None).ran == ("work",)


def test_the_gpu_and_the_number_of_jobs_bound_what_runs_at_once() -> None:
    graph = {"a": [], "b": [], "c": [], "d": ["a"]}
    running: set[str] = set()
    most: list[set[str]] = []

    def work(item: str) -> str:
        running.add(item)
        most.append(set(running))
        time.sleep(0.05)
        running.discard(item)
        return item.upper()

    with ThreadPoolExecutor(4) as pool:
        for jobs in (1, 2, 4):
            most.clear()
            done = run_graph(graph, lambda item: pool.submit(work, item), jobs, alone={"a", "b", "d"})
            assert done == {item: item.upper() for item in graph}
            assert max(map(len, most)) == min(jobs, 2)
            assert all(len(at_once & {"a", "b", "d"}) == 1 or at_once == {"c"} for at_once in most)


def test_after_a_failure_nothing_more_starts_and_what_runs_ends() -> None:
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


def test_stages_on_the_gpu_are_those_that_depend_on_its_key(project: Path) -> None:
    values = {"resources": {"device": "cpu"}}
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    assert gpu_stages(project) == frozenset()
    values["resources"]["device"] = "cuda:0"
    (project / "params.yaml").write_text(yaml.safe_dump(values))
    (project / "dvc.yaml").write_text((project / "dvc.yaml").read_text().replace("[scale]", "[scale, resources.device]"))
    assert gpu_stages(project) == {"make"}
