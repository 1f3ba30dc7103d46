"""The graph comes from dvc.yaml, and what DVC did is told apart: ran, restored, up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.pipeline import ROOT, StageFailedError, run_stage, stage_graph


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
