"""Design searches with a policy: the table of all designs, and a search from the flow to the winner."""

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
from search_checkout import VALUES, of_params, write_files

from flows import design as flow
from stages.agent.chat import Chat
from stages.agent.policy import load_policy, save_policy
from stages.claims import design_search
from stages.designs import __main__ as command
from stages.designs.evaluations import summarise
from stages.designs.settings import parse_search
from stages.designs.space import Space
from stages.designs.tasks import choose_tasks
from stages.params import ROOT, load_params
from stages.records.episode import Owner, read_json, read_rows, write_json
from stages.records.sections import deep_merge


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
