"""A design search from its first design to its results, with the evaluate stage replaced by arithmetic; task splits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from search_checkout import VALUES, of_params

from stages.agent.model_names import model_names
from stages.designs import __main__ as command
from stages.designs.evaluations import DesignEvaluations, standard_error, summarise, workspace_key
from stages.designs.session import Session, best_so_far
from stages.designs.settings import SearchParams, load_search, parse_search
from stages.designs.space import Space
from stages.designs.tasks import split_tasks
from stages.designs.tree import Node
from stages.environments.search import SearchDomain
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.params import load_params
from stages.records.episode import read_json, read_tasks, write_json, write_table
from stages.records.sections import deep_merge
from stages.runtime.overlay import overlaid, write_params
from stages.runtime.validation import ParamsError


def session_of(root: Path, **design: Any) -> tuple[Session, SearchParams]:
    values = deep_merge(VALUES, {"design": design})
    params = parse_search(values)
    return Session(DesignEvaluations.open(root, of_params(values), params, Space.of(params))), params


def play(folder: Path, better: str = "task") -> None:
    """Writes what the stage would: designs that recall the task score higher, greedy ones lower."""
    params = load_params(folder / "params.yaml")
    evaluate, split = params.evaluate, params.evaluate.split
    good = 0.5 + 0.3 * (evaluate.scaffold.recall == better) - 0.2 * (evaluate.sampling.temperature == 0)
    tasks = [task for task in read_tasks(folder / "data/curated/search/tasks.parquet") if task.split == split]
    rows = []
    for number, task in enumerate(tasks):
        for attempt in range(evaluate.attempts):
            row = dict.fromkeys(EVALUATION_SCHEMA.names)
            row |= {"model": evaluate.models[0], "domain": "search", "task_id": task.task_id, "attempt": attempt}
            row |= {"cluster": task.cluster, "panel": "p", "policy_hash": "h", "turns": 2, "tokens": 9, "cost": 1.0}
            row |= {"success": number < good * len(tasks), "reward": float(number < good * len(tasks)), "accepted": 1.0}
            rows.append({**row, "difficulty": 1.0, "stop_reason": "terminated"})
    write_table(folder / "data/evaluation/rows.parquet", EVALUATION_SCHEMA, rows)


def search(root: Path, **design: Any) -> tuple[Session, list[dict[str, Any]]]:
    """Runs a search to its end; returns the session and its steps."""
    steps: list[dict[str, Any]] = []
    session, _ = session_of(root, **design)
    step = session.step()
    while step is not None:
        steps.append(step)
        play(Path(step["folder"]))
        # A new session for each step, as in the flow, which runs each in a process.
        session, _ = session_of(root, **design)
        step = session.step(1.0)
    return session, steps


def test_search_selects_confirms_and_evaluates_the_winner(source: Path) -> None:
    """Contract: designs are selected on validation tasks, the best are confirmed on others, only the winner and the default play
    the panel, and evaluations are reused, whatever the method."""
    session, steps = search(source)
    assert [step["kind"] for step in steps] == ["search"] * 7 + ["confirm"] * 3 + ["panel"] * 2
    assert steps[0]["label"] == "as params.yaml has it"
    plan = session.evaluations.plan["domains"]["search"]
    assert (len(plan["search"]), len(plan["confirm"])) == (6, 3)
    workspace = Path(steps[0]["folder"])
    valid = [task for task in read_tasks(workspace / "data/curated/search/tasks.parquet") if task.split == "valid"]
    assert sorted(task.task_id for task in valid) == plan["search"]
    clusters = {task.cluster for task in valid}
    other = [t for t in read_tasks(workspace.parent / "confirm/data/curated/search/tasks.parquet") if t.split == "valid"]
    assert sorted(task.task_id for task in other) == plan["confirm"]
    assert not clusters & {task.cluster for task in other}, "no world is in both"
    assert load_params(workspace / "params.yaml").evaluate.split == "valid"
    assert load_params(workspace.parent / "confirm/params.yaml").evaluate.split == "test", "the panel came last"

    results = session.results()
    assert results["winner"]["evaluate"]["scaffold"]["recall"] == "task"
    assert results["winner"]["evaluate"]["sampling"]["temperature"] == 0.5
    assert results["best"] == best_so_far([node["score"] for node in results["nodes"]])
    assert (results["panel"]["default"], results["panel"]["winner"]) == (0.5, 0.875)
    assert results["panel"]["domains"]["search"]["comparison"]["difference"] == pytest.approx(0.375)
    assert [one["name"] for one in results["finalists"]][-1] == results["default"]
    assert json.loads(json.dumps(results)) == results
    assert results["designs"] == 2 * 2 * (1 + 1 + 2), "greedy, one draw, votes of 3 and, the default, of 5"

    again, steps = search(source, budget=9)
    kinds = [step["kind"] for step in steps]
    assert kinds[:2] == ["search", "search"], "a larger budget continues the search"
    assert "search" not in kinds[2:]
    assert len(kinds) <= 4, "confirmed designs are reused"
    assert [node.design for node in again.nodes[:7]] == [node.design for node in session.nodes]
    drawn, steps = search(source, method="random", budget=12)
    new = {node.design for node in drawn.nodes} - {node.design for node in again.nodes}
    assert len(drawn.nodes) == 12
    assert len([step for step in steps if step["kind"] == "search"]) == len(new) < 12, "evaluated designs are reused"


def test_interrupted_search_repeats_its_pending_step(source: Path) -> None:
    first = session_of(source, attempts=1)[0].step()
    again = session_of(source, attempts=1)[0].step()
    assert first == again
    assert first is not None
    with pytest.raises(FileNotFoundError, match="did not finish there"):
        session_of(source, attempts=1)[0].step(1.0)


def test_journal_without_a_newer_factor_is_continued(source: Path) -> None:
    """Contract: its designs lack the newer factor and get the value of params.yaml."""
    design = {"attempts": 1, "method": "random", "budget": 3}
    session_of(source, **design)[0].step()
    for _ in range(2):
        session, _ = session_of(source, **design)
        play(session.evaluations.folder / "search")
        session.step(1.0)
    saved = read_json(session.path)
    short = {"nodes": [{**node, "design": node["design"][:-1]} for node in saved["nodes"]]}
    write_json(session.path, {**short, "pending": {**saved["pending"], "design": saved["pending"]["design"][:-1]}})
    again, _ = session_of(source, **design)
    assert [node.design for node in again.nodes] == [node.design for node in session.nodes]
    assert len(again.nodes) == 2
    play(again.evaluations.folder / "search")
    again.step(1.0)
    assert len(again.nodes) == 3
    assert again.nodes[2].design == tuple(saved["pending"]["design"]), "the pending design is resumed"


@pytest.mark.parametrize(
    ("change", "shared"),
    [
        *(("resources.precision=bfloat16", False), ("resources.device=cuda", False), ("resources.engine.kind=vllm", False)),
        *(("resources.tokens_per_batch=999", False), ("resources.slots=4", True)),
    ],
)
def test_results_of_other_settings_are_not_read(source: Path, change: str, shared: bool) -> None:
    """Contract: searches share the results of evaluations that would be equal, and no others."""
    keys = [workspace_key(source, load_search(source, changes)[1]) for changes in ([], [change])]
    assert (keys[0] == keys[1]) is shared


def test_workspace_code_is_updated(source: Path) -> None:
    """Contract: code that is not part of the key is updated, too, since an outdated copy would reject new keys of params.yaml;
    unchanged files are not copied."""
    session, _ = session_of(source, attempts=1)
    workspaces = [session.evaluations.folder / name for name in ("search", "confirm")]
    module = source / "stages" / "params.py"
    try:
        module.write_text("KEY = 1\n")
        assert session_of(source, attempts=1)[0].evaluations.folder == session.evaluations.folder
        assert all((workspace / "stages/params.py").read_text() == "KEY = 1\n" for workspace in workspaces)
        kept = [(workspace / "stages/code.py").stat().st_ino for workspace in workspaces]
        session_of(source, attempts=1)
        assert [(workspace / "stages/code.py").stat().st_ino for workspace in workspaces] == kept
    finally:
        module.unlink()
    session_of(source, attempts=1)
    assert not any((workspace / "stages/params.py").exists() for workspace in workspaces)


def test_failed_design_scores_zero(source: Path) -> None:
    """Contract: it stays in the tree with the reason; a failure of the design of params.yaml is an error, since the search starts
    from it."""
    design = {"tasks": 5, "method": "random", "budget": 3}
    session_of(source, **design)[0].step()
    with pytest.raises(ParamsError, match=r"'as params\.yaml has it' could not be evaluated: no such head"):
        session_of(source, **design)[0].step(1.0, "no such head")
    step = session_of(source, **design)[0].step()
    assert step is not None
    play(Path(step["folder"]))
    session_of(source, **design)[0].step(1.0)
    session, _ = session_of(source, **design)
    session.step(1.0, "a prompt too long")
    assert (session.nodes[1].score, session.nodes[1].failed) == (0.0, "a prompt too long")
    assert session.nodes[1].design not in session.finalists()


def test_command_line_runs_a_search_step_by_step(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: JSON on standard output, an overlay that params.yaml accepts, and exit code 2 with the key for mistakes."""
    monkeypatch.chdir(source)
    monkeypatch.setenv("BELLWETHER_TRACKING", "off")
    changes = ["--set", "design.budget=2", "design.method=unguided", "design.tasks=4"]

    def step(*arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["design", *arguments, *changes])
        assert command.main() == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    output = step()
    kinds = []
    while output["kind"] != "done":
        kinds.append(output["kind"])
        play(Path(output["folder"]))
        output = step("--ended", "2.5")
    assert kinds[:2] == ["search", "search"]
    assert read_json(source / output["result"])["settings"]["method"] == "unguided"
    path = source / "copy.yaml"
    path.write_text(yaml.safe_dump(of_params(VALUES)))
    write_params(path, overlaid(path, source / output["overlay"]))
    models = load_params(path).evaluate.models
    assert models is None or models == [*model_names(["search"]), "sft+vote"], "the other models are still evaluated"
    for wrong, message in ((["design.budgets=3"], "budgets"), (["design.budget"], "KEY=VALUE")):
        monkeypatch.setattr(sys, "argv", ["design", "--set", *wrong])
        assert command.main() == 2
        assert message in capsys.readouterr().err


def test_summary_of_two_tasks() -> None:
    """Two tasks of two attempts, 1/2 and 1: mean 0.75, standard error 0.5 / sqrt(2), the least for two tasks; shares of rejected
    turns and of truncated episodes."""
    base = {"domain": "d", "turns": 4, "accepted": 0.75, "stop_reason": "terminated"}
    rows = [{**base, "task_id": task, "success": won} for task, won in (("a", 1), ("a", 0), ("b", 1), ("b", 1))]
    rows[1] |= {"stop_reason": "turn_limit", "accepted": 0.25}
    found = summarise(rows, "success")
    assert found.by_domain == {"d": (0.75, pytest.approx(0.353553, abs=1e-6))}
    assert found.failures == {"refused": 0.375, "cut": 0.25}
    assert standard_error([1.0, 1.0, 1.0, 1.0]) == 0.125, "four successes leave some uncertainty"
    assert standard_error([0.0, 1.0]) == pytest.approx(0.5)


def test_tasks_are_split_by_world() -> None:
    domain = SearchDomain()
    tasks = [one for one in domain.recipes(1200, 0) if one["split"] == "valid"]
    from stages.records.task import Task

    made = [Task(one["task_id"], "search", "valid", 0, "q", {}, 1.0, cluster=f"w{one['world']}") for one in tasks]
    first, second = split_tasks(made, 24, 8, 0)
    assert (len(first), len(second)) == (24, 8)
    assert not {task.cluster for task in first} & {task.cluster for task in second}
    few = split_tasks(made[:32], 24, 8, 0)
    assert [len(part) for part in few] == [16, 8]
    assert [len({task.cluster for task in part}) for part in (first, second, *few)] == [7, 2, 2, 2], "spread over their worlds"
    assert split_tasks(made[:16], 24, 8, 0)[1] == [], "too few worlds to split"


def test_node_round_trips_through_json() -> None:
    node = Node(("sft", None), -1, "root", 0.5, 0.1, {"d": (0.5, 0.1)}, failures={"cut": 0.1})
    assert Node.from_json(json.loads(json.dumps(node.to_json()))) == node
