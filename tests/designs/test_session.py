"""A design search from its first design to its results, with the evaluate stage replaced by arithmetic; task splits; the claims
lane."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flows import design as flow
from stages.agent.chat import Chat
from stages.agent.model_names import model_names
from stages.agent.policy import load_policy, save_policy
from stages.claims import design_search
from stages.claims.arms import common_values, run_values
from stages.claims.checks import check_experiment
from stages.claims.design_metrics import METRICS
from stages.claims.experiment import FOLDER, load_experiment
from stages.claims.plan import metrics_of, planned_runs
from stages.claims.runner import ExperimentRunner
from stages.curation.panel import make_panel, write_panel
from stages.designs import __main__ as command
from stages.designs.evaluations import DesignEvaluations, standard_error, summarise
from stages.designs.session import Session, best_so_far
from stages.designs.settings import SETTINGS, SearchParams, parse_search
from stages.designs.space import INDEX, Space
from stages.designs.tasks import choose_tasks, split_tasks
from stages.designs.tree import Node
from stages.environments.search import SearchDomain
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.params import ROOT, load_params
from stages.records.episode import Owner, read_json, read_rows, read_tasks, write_json, write_table, write_tasks
from stages.records.sections import deep_merge
from stages.runtime.overlay import overlaid, write_params
from stages.runtime.validation import ParamsError
from stages.runtime.workspace import EvaluationWorkspace

VALUES: dict[str, Any] = {
    "domains": ["search"],
    "resources": {"threads": 1, "workers": 1, "slots": 8},
    "evaluate": {"attempts": 1, "resamples": 100},
    "design": {
        **{"budget": 7, "tasks": 6, "attempts": 2, "labels": {"balanced": 2}, "confirm": {"designs": 2, "tasks": 3}},
        "space": {
            **{"model": ["sft"], "choose": ["none", "vote"], "think": ["none"], "window": [1, None], "recall": ["none", "task"]},
            **{"draws": [3], "temperature": [0.0, 0.5], "top_p": [0.95]},
        },
    },
    "per_domain": {"search": {}},
}


def of_params(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without the search's own settings: what params.yaml holds."""
    return {name: value for name, value in values.items() if name != "design"}


def write_files(root: Path, values: dict[str, Any]) -> None:
    (root / "params.yaml").write_text(yaml.safe_dump(of_params(values)))
    (root / SETTINGS).parent.mkdir(parents=True, exist_ok=True)
    (root / SETTINGS).write_text(yaml.safe_dump(values["design"]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Path:
    """A checkout with a panel of 8 tasks, 4 validation tasks and a policy."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "stages").mkdir()
    (root / "stages" / "code.py").write_text("")
    (root / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    write_files(root, VALUES)
    for folder in ("data/base", "data/models/sft"):
        (root / folder).mkdir(parents=True)
        for path in tiny_policy.iterdir():
            (root / folder / path.name).write_bytes(path.read_bytes())
    domain, curated = SearchDomain(), root / "data/curated/search"
    records = {split: [one for one in domain.recipes(400, 0) if one["split"] == split] for split in ("test", "valid")}
    tasks = domain.build(
        [*records["test"][:4], *records["test"][-4:], *records["valid"][:2], *records["valid"][-2:]], curated / "worlds", 1
    )
    write_tasks(curated / "tasks.parquet", tasks)
    write_panel(curated / "panel.json", make_panel(domain, tasks, curated / "worlds"))
    return root


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


def test_replay_evaluates_a_search_on_a_table() -> None:
    """Contract: the best design by validation is evaluated on the panel; a budget of all designs finds the best one."""
    values = deep_merge(VALUES, {"design": {"budget": 12, "method": "random"}})
    params = parse_search(values)
    space = Space.of(params)
    table = {}
    for index, design in enumerate(space.all()):
        warm, recall = design[INDEX["temperature"]], design[INDEX["recall"]] == "task"
        score = round(0.3 + 0.4 * warm + 0.1 * recall + 0.001 * index, 6)
        of = {"error": 0.05, "failures": {}, "failed": "", "seconds": 0.0}
        table[space.name(design)] = {
            split: {"score": one, "by_domain": {"search": [one, 0.05]}, **of}
            for split, one in (("valid", score), ("test", 1 - score))
        }
    features = {"difficulty": 1.0, "prompt_words": 4.0, "max_turns": 8.0}
    found = design_search.replay(params, table, features)
    assert tuple(found) == METRICS
    best = max(one["valid"]["score"] for one in table.values())
    assert found["best.40"] == best
    assert found["found.40"] == pytest.approx(1 - best)
    assert found["regret.40"] == pytest.approx(max(one["test"]["score"] for one in table.values()) - (1 - best))
    assert found["rank_correlation"] == 0.0
    assert found == design_search.replay(params, table, features)
    guided = parse_search(deep_merge(values, {"design": {"method": "agentswift", "budget": 8}}))
    found = design_search.replay(guided, table, features)
    assert found["rank_correlation"] > 0.5
    assert found["area"] <= found["best.10"] <= best


def test_experiment_arms_share_a_start_and_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: arms differ only in `design`, runs of a seed only in the arm; the table is made before the first run."""
    experiment = load_experiment(ROOT / FOLDER / "agentswift.yaml")
    params = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    checked = check_experiment(experiment, params, "agentswift.yaml")
    assert {len(Space.of(one).all()) for one in checked.values()} == {180}
    common = common_values(experiment, params)
    for arm in experiment.arms:
        values = run_values(experiment, arm, 3, params)
        assert values["design"]["seed"] == 3
        assert {**values, "design": 0} == {**common, "design": 0}
        assert design_search.table_path(checked[arm], Space.of(checked[arm])) == design_search.table_path(
            parse_search(common), Space.of(parse_search(common))
        )
    assert set(metrics_of(experiment)) == {f"designs.{name}" for name in METRICS}
    keys = {run.key for run in planned_runs(experiment, params)}
    assert len(keys) == len(experiment.arms) * len(experiment.seeds)

    commands: list[list[str]] = []
    numbers = dict.fromkeys(metrics_of(experiment), 0.5)

    def run(workspace: EvaluationWorkspace, arguments: list[str], threads: int) -> None:
        commands.append(arguments[2:3])
        if "--result" in arguments:
            write_json(workspace.folder / arguments[arguments.index("--result") + 1], {**numbers, "environment_steps": 0})

    monkeypatch.setattr(ExperimentRunner, "start", lambda self, values: EvaluationWorkspace(tmp_path))
    monkeypatch.setattr(EvaluationWorkspace, "python", run)
    values = {**run_values(experiment, "random", 1, params)}
    monkeypatch.setattr(ExperimentRunner, "code", "")
    found = ExperimentRunner(tmp_path, "c" * 40, program="designs").measure("run", values, common, metrics_of(experiment))
    assert commands == [["--table"], ["--settings"]]
    assert found.metrics == numbers


@pytest.mark.slow
def test_table_equals_the_results_of_the_stage(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: with a policy, every design of a small space is evaluated on both sets of tasks, existing rows are kept, and the
    default's row equals the result of the stage."""
    monkeypatch.chdir(source)
    space = {"model": ["sft"], "choose": ["none"], "think": ["none"], "window": [None], "recall": ["none", "task"]}
    sampling = {"temperature": 0.5, "top_p": 0.95, "max_tokens": 6}
    space |= {"draws": [5], "temperature": [0.5], "top_p": [0.95]}
    values = deep_merge(VALUES, {"design": {"space": space, "attempts": 1}, "evaluate": {"sampling": sampling}})
    values["design"]["space"] = {**space, "max_tokens": [6]}
    params = parse_search(values)
    panels = design_search.panels_of(params)
    assert [len(panel.tasks) for panel in panels.values()] == [4, 8]
    space_of = Space.of(params)
    outcomes = design_search.play_design(
        "data/models/sft", deep_merge(values, space_of.overrides(space_of.root)), panels, "data/models"
    )
    assert [len(one.rows) for one in outcomes] == [4, 8]
    kept = {space_of.name(space_of.all()[1]): {"valid": 1, "test": 2}}
    path = design_search.table_path(params, space_of)
    write_json(path, kept)
    table = design_search.make_table(values, params, 1)
    assert set(table) == {space_of.name(design) for design in space_of.all()}
    assert json.loads(json.dumps(table)) == read_json(path)
    assert {**table, **kept} == table, "existing rows are kept"
    path.unlink()
    (other,) = [name for name in table if name not in kept]
    assert other == space_of.name(space_of.root)

    (tmp_path / "run").mkdir()
    written = deep_merge(values, {"evaluate": {"models": ["sft"], "split": "valid"}})
    (tmp_path / "run" / "params.yaml").write_text(yaml.safe_dump(of_params(written)))
    (tmp_path / "run" / "data").symlink_to(source / "data")
    environment = {"PYTHONPATH": str(ROOT), "BELLWETHER_TRACKING": "off", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-m", "stages.evaluate"],
        cwd=tmp_path / "run",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "run/data/evaluation/rows.parquet")
    assert {row["task_id"] for row in rows} == {task.task_id for task in panels["valid"].tasks}
    assert summarise(rows, "success").by_domain == {
        name: tuple(pair) for name, pair in table[other]["valid"]["by_domain"].items()
    }


def teach(folder: Path, prompts: list[str], action: str) -> None:
    """Trains the policy in `folder` to answer `action` to each of `prompts`."""
    import torch

    policy = load_policy(folder)
    chat = Chat(policy.tokenizer)
    examples = [
        chat.encode_demonstration([{"role": "user", "content": one}, {"role": "assistant", "content": action}]) for one in prompts
    ]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=5e-3)
    for step in range(150):
        encoded = examples[step % len(examples)]
        ids = torch.tensor([encoded.token_ids])
        labels = ids.masked_fill(torch.tensor([encoded.owner]) != Owner.POLICY, -100)
        loss = policy.model(input_ids=ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.2
    shutil.rmtree(folder)
    save_policy(policy.model, policy.tokenizer, folder)


@pytest.mark.slow
def test_search_with_a_policy_end_to_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: the flow's task runs the stage in the workspaces that the command lays out; results equal the evaluated rows, and
    params.yaml accepts the winner."""
    root = tmp_path / "checkout"
    shutil.copytree(source, root, ignore=shutil.ignore_patterns(".bellwether", "reports", "stages"))
    shutil.copytree(ROOT / "stages", root / "stages", ignore=shutil.ignore_patterns("__pycache__"))
    space = {"window": [None], "recall": ["none"], "choose": ["logprob"], "per_token": [False, True], "max_tokens": [12]}
    evaluate = {"sampling": {"max_tokens": 12}, "scaffold": {"max_turns": 2}}
    design = {"method": "random", "attempts": 1, "confirm": {"designs": 1}, "space": {**space, "max_turns": [2]}}
    values = deep_merge(VALUES, {"evaluate": evaluate, "design": design})
    write_files(root, values)
    tasks = choose_tasks(root, "search", parse_search(values), tmp_path / "worlds").search
    teach(root / "data/models/sft", [task.prompt for task in tasks], f"answer {tasks[0].spec['answer']}")
    monkeypatch.setenv("BELLWETHER_TRACKING", "off")
    monkeypatch.setattr(flow, "logger", lambda: print)
    monkeypatch.setattr(flow, "environment", lambda **variables: {**os.environ, **variables})
    monkeypatch.chdir(root)

    def next_step(*arguments: str) -> dict[str, Any]:
        """Runs the flow's subprocess within this process, which saves seconds; the stage remains a process."""
        monkeypatch.setattr(sys, "argv", ["design", *arguments, "--set", "design.budget=2"])
        assert command.main() == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    kinds, step = [], next_step()
    while step["kind"] != "done":
        kinds.append(step["kind"])
        seconds, failed = flow.evaluate.fn(step, False).data
        assert failed == ""
        step = next_step("--ended", f"{seconds:.1f}")
    assert kinds[:3] == ["search", "search", "confirm"]
    assert kinds[-1] == "panel"

    results = read_json(root / "reports/design/random.json")
    (plan,) = (root / ".bellwether/design").glob("*/plan.json")
    evaluations, nodes = plan.parent / "evaluations", results["nodes"]
    assert [node["origin"] for node in nodes] == ["root", "random"]
    assert {path.stem for path in evaluations.glob("search-*.parquet")} == {f"search-{node['name']}" for node in nodes}
    for node in nodes:
        rows = read_rows(evaluations / f"search-{node['name']}.parquet")
        assert sorted(row["task_id"] for row in rows) == results["domains"]["search"]["search"]
        assert node["score"] == pytest.approx(np.mean([row["success"] for row in rows]), abs=1e-6)
        assert 0 < node["score"] < 1, "the policy knows one answer"
    winner = results["winner"]
    for side, name in (("default", results["default"]), ("winner", winner["name"])):
        played = read_rows(evaluations / f"panel-{name}.parquet")
        assert len(played) == 8
        assert results["panel"][side] == pytest.approx(np.mean([row["success"] for row in played]), abs=1e-6)

    apply = [sys.executable, "-m", "stages.params", "--apply", "reports/design/random.yaml"]
    subprocess.run(apply, cwd=root, check=True, capture_output=True)
    applied = load_params(root / "params.yaml").evaluate.model_dump()
    for section in ("best_of", "sampling", "scaffold"):
        assert winner["evaluate"][section].items() <= applied[section].items()


def test_node_round_trips_through_json() -> None:
    node = Node(("sft", None), -1, "root", 0.5, 0.1, {"d": (0.5, 0.1)}, failures={"cut": 0.1})
    assert Node.from_json(json.loads(json.dumps(node.to_json()))) == node
