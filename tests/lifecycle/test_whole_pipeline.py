"""Whole pipelines on the tiny profile: what a run leaves, and what an edit re-runs.

The runs take most of the time, so all tests share one undisturbed run."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from checkout import DVC, Checkout

from benchmarks.nodes import CLUSTERS
from stages.records.episode import read_rows

pytestmark = [pytest.mark.timeout(900), pytest.mark.long(250)]
STAGES = ["curate@textworld", "curate@search", "sft", "rollout@textworld", "rollout@search", "annotate@textworld"]
STAGES += ["annotate@search", "rl@textworld", "rl@search", "merge", "evaluate", "report"]


def test_repro_of_a_finished_run_does_nothing(done: Checkout) -> None:
    assert done.repro() == ([], [])
    assert sorted(done.lock) == sorted(STAGES)
    checkpoints = done.root / ".bellwether" / "checkpoints"
    assert not [path for path in checkpoints.rglob("*") if path.is_file()]


def test_evaluation_has_the_documented_structure(undisturbed: Checkout) -> None:
    """reports/evaluation.json: panels, models by domain with success and its interval, comparisons."""
    evaluation = json.loads((undisturbed.root / "reports" / "evaluation.json").read_text())
    assert set(evaluation["panels"]) == {"textworld", "search"}
    assert list(evaluation["models"]) == sorted(["base", "sft", "rl@textworld", "rl@search", "merged", "merged_linear"])
    for by_domain in evaluation["models"].values():
        for domain in ("textworld", "search"):
            assert {"mean", "low", "high", "n"} <= set(by_domain[domain]["success"])
            assert by_domain[domain]["success"]["n"] == 10
    assert {"a", "b", "domain", "difference", "low", "high", "p", "verdict"} <= set(evaluation["comparisons"][0])
    rows = read_rows(undisturbed.root / "data" / "evaluation" / "rows.parquet")
    assert len(rows) == 6 * 2 * 10
    hashes = {row["model"]: row["policy_hash"] for row in rows}
    assert len(set(hashes.values())) == 6, "every stage changes the weights"
    page = (undisturbed.root / "reports" / "report.html").read_text()
    assert str(undisturbed.root) not in page


def test_merged_model_loads_with_transformers(undisturbed: Checkout) -> None:
    """Plain from_pretrained loads it, and its tokenizer's chat template renders a conversation."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for name in ("merged", "merged_linear"):
        folder = undisturbed.root / "data" / "models" / name
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": "look"}, {"role": "assistant", "content": "open door"}]
        encoded = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
        assert model(**encoded).logits.shape[-1] == model.config.vocab_size
        assert "open door" in tokenizer.apply_chat_template(messages, tokenize=False)


def test_mlflow_has_one_parent_run_with_a_child_per_stage_and_domain(undisturbed: Checkout) -> None:
    """Each child has parameters, curves, commit, params hash, and hashes of inputs and outputs."""
    with sqlite3.connect(undisturbed.root / "mlflow.db") as database:
        runs = dict(database.execute("SELECT name, run_uuid FROM runs WHERE name NOT LIKE 'lifecycle%'"))
        states = {state for (state,) in database.execute("SELECT status FROM runs")}
        parents = database.execute("SELECT run_uuid FROM runs WHERE name LIKE 'lifecycle%'").fetchall()
        tags: dict[str, dict[str, str]] = {}
        for run, key, value in database.execute("SELECT run_uuid, key, value FROM tags"):
            tags.setdefault(run, {})[key] = value
        points = dict(database.execute("SELECT run_uuid, COUNT(*) FROM metrics WHERE key NOT LIKE 'system/%' GROUP BY run_uuid"))
        params = dict(database.execute("SELECT run_uuid, COUNT(*) FROM params GROUP BY run_uuid"))
    assert sorted(runs) == sorted(STAGES)
    assert states == {"FINISHED"}
    assert len(parents) == 1
    for name, run in runs.items():
        assert tags[run]["mlflow.parentRunId"] == parents[0][0], name
        assert {"git.commit", "params.hash", "stage", "domain"} <= set(tags[run]), name
        assert any(key.startswith("in:") for key in tags[run]), name
        assert any(key.startswith("out:") for key in tags[run]), name
        assert points.get(run), f"{name} logged no metric"
        assert params.get(run), f"{name} logged no parameter"
    assert not list((undisturbed.root / ".bellwether" / "tracking").glob("*.jsonl"))


SEARCH_RATE = {"per_domain": {"search": {"rl": {"learning_rate": 0.0001}}}}


def test_edit_concerns_only_dependents_and_its_revert_none(done: Checkout) -> None:
    """One domain's RL setting concerns that domain's rl and what follows; one of merge.method begins with merge."""
    params = (done.root / "params.yaml").read_bytes()
    done.edit({"merge": {"method": "ties"}})
    assert done.changed == ["merge", "report"]  # evaluate reads no parameter of the merge, it follows the merged model
    (done.root / "params.yaml").write_bytes(params)
    done.edit(SEARCH_RATE)
    assert done.changed == ["report", "rl@search"]
    (done.root / "params.yaml").write_bytes(params)
    assert done.changed == []


@pytest.mark.slow
def test_edit_reruns_only_dependents_and_its_revert_reruns_nothing(done: Checkout) -> None:
    params, lock = (done.root / "params.yaml").read_bytes(), done.lock
    done.edit(SEARCH_RATE)
    assert done.repro()[0] == ["rl@search", "merge", "evaluate", "report"]
    changed = done.lock
    assert changed["rl@textworld"] == lock["rl@textworld"]
    assert changed["rl@search"]["outs"] != lock["rl@search"]["outs"]
    (done.root / "params.yaml").write_bytes(params)
    assert done.repro() == ([], ["rl@search", "merge", "evaluate", "report"])
    assert done.lock == lock


@pytest.mark.slow
def test_edit_of_merge_method_reruns_merge_evaluate_and_report(done: Checkout) -> None:
    done.edit({"merge": {"method": "ties"}})
    assert done.repro()[0] == ["merge", "evaluate", "report"]


def test_edit_of_resources_reruns_only_the_report(done: Checkout) -> None:
    """The report depends on all of params.yaml; any other stage would write the same bytes."""
    done.edit({"resources": {"slots": 32, "workers": 3}})
    assert done.changed == ["report"]


INSTALLED = [name for name in CLUSTERS if importlib.util.find_spec(f"prefect_{name}")]


@pytest.mark.slow
@pytest.mark.parametrize(("runner", "nodes"), [("processes", 0), *((name, nodes) for name in INSTALLED for nodes in (0, 2))])
def test_shards_write_same_bytes_as_the_stage_alone(done: Checkout, tmp_path: Path, runner: str, nodes: int) -> None:
    """`dvc repro` with resources.shards: three processes play rollout's tasks. Dask and Ray run on this machine and on a cluster
    of two nodes where their extras are installed: pip install 'bellwether[dask]', 'bellwether[ray]'."""
    outs = done.lock["rollout@search"]["outs"]
    done.environment["BELLWETHER_TRACKING"] = "off"
    with ExitStack() as running:
        log = running.enter_context((tmp_path / "cluster.log").open("w"))
        address = running.enter_context(CLUSTERS[runner](done.root, nodes, log)) if nodes else None
        done.edit({"resources": {"shards": {"count": 3, "runner": runner, "address": address}}})
        assert done.repro("--force", "--single-item", "rollout@search") == (["rollout@search"], [])
    assert done.lock["rollout@search"]["outs"] == outs


@pytest.mark.slow
def test_removed_domain_leaves_no_trace_and_is_restored_when_listed_again(done: Checkout) -> None:
    params, lock = (done.root / "params.yaml").read_text(), done.lock
    done.edit({"domains": ["search"]})
    assert done.repro("sft")[0] == ["sft"]
    assert not (done.root / "data" / "curated" / "textworld").exists()
    curated = {item["path"]: item for item in done.lock["sft"]["deps"]}["data/curated"]
    assert curated["nfiles"] < {item["path"]: item for item in lock["sft"]["deps"]}["data/curated"]["nfiles"]
    assert done.repro()[0][-3:] == ["merge", "evaluate", "report"]
    assert done.changed == []
    (done.root / "params.yaml").write_text(params)
    ran, restored = done.repro()
    assert ran == []
    assert "sft" in restored
    assert done.lock == lock


@pytest.mark.slow
def test_stage_whose_parameters_were_edited_while_it_ran_runs_again(done: Checkout) -> None:
    """Contract: DVC hashes parameters when a stage has ended, and yet records no results of earlier ones."""
    done.edit({"per_domain": {"search": {"rl": {"steps": 20}}}})
    command = [*DVC, "repro", "--single-item", "rl@search"]
    with subprocess.Popen(command, cwd=done.root, env=done.env, stderr=subprocess.PIPE, text=True) as process:
        while not list((done.root / ".bellwether/checkpoints/rl@search").glob("*/*.pt")):
            assert process.poll() is None, "rl ended before it wrote a checkpoint"
            time.sleep(0.01)
        done.edit({"per_domain": {"search": {"rl": {"steps": 3}}}})
        message = process.communicate()[1]
    assert process.returncode
    assert "rl@search: edited in params.yaml or the code while the stage ran: per_domain.search.rl." in message
    assert done.repro("--single-item", "rl@search") == (["rl@search"], [])
    assert done.lock["rl@search"]["params"]["params.yaml"]["per_domain.search.rl"] == {"steps": 3}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"merge": {"metod": "ties"}}, r"unknown key 'merge\.metod'\. Did you mean 'method'\?"),
        pytest.param(
            *({"evalute": {"attempts": 3}}, r"unknown key 'evalute'\. Did you mean 'evaluate'\?"), marks=pytest.mark.slow
        ),
    ],
)
def test_invalid_parameter_stops_the_run_and_is_named(done: Checkout, edit: dict, message: str) -> None:
    done.edit(edit)
    with pytest.raises(AssertionError, match=message):
        done.repro()
    assert done.lock["merge"]
