"""DVC workflows: experiments and queues, comparisons, remotes, a clone that computes nothing."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from checkout import DVC, Checkout
from mlflow_server import free_port

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
NO_S3 = "not run: needs a local S3 server and DVC's S3 remote; pip install -e '.[s3]' moto"


def git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", *arguments]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True).stdout


def dvc(checkout: Checkout, *arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [*DVC, *arguments], cwd=checkout.root, env={**checkout.env, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"dvc {' '.join(arguments)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture
def committed(done: Checkout) -> Checkout:
    """The whole run with its results committed."""
    git(done.root, "add", "-A")
    git(done.root, "commit", "-q", "-m", "Results")
    return done


def experiments(checkout: Checkout) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(dvc(checkout, "exp", "show", "--csv", "--only-changed"))))


def test_queued_experiment_runs_and_can_be_compared(committed: Checkout) -> None:
    """`dvc exp run -S`, a queue, `dvc exp show` with few columns, metrics, params and plots diff, and the experiment's run in
    MLflow."""
    dvc(committed, "exp", "run", "--queue", "--name", "average", "-S", "merge.method=linear", "-S", "evaluate.resamples=150")
    dvc(committed, "queue", "start", BELLWETHER_TRACKING="on")
    deadline = time.monotonic() + 600
    while "Running" in (listed := dvc(committed, "queue", "status")) or "Queued" in listed:
        assert time.monotonic() < deadline, listed
        time.sleep(0.5)
    assert "Success" in listed, dvc(committed, "queue", "logs", "average")
    assert git(committed.root, "status", "--porcelain") == "", "an experiment leaves the working tree as it was"

    rows = experiments(committed)
    columns = set(rows[0])
    assert {"merge.method", "evaluate.resamples"} <= columns
    metrics = json.loads((committed.root / "reports" / "metrics.json").read_text())
    assert sorted(metrics) == ["search", "textworld"]
    assert all(list(of) == ["merged", "rl", "sft"] for of in metrics.values())
    assert len(columns) <= 16, sorted(columns)
    row = next(row for row in rows if row["Experiment"] == "average")
    assert row["merge.method"] == "linear"

    assert "linear" in dvc(committed, "params", "diff", "HEAD", "average")
    assert "search.merged" in dvc(committed, "metrics", "diff", "HEAD", "average", "--all")
    plots = json.loads(dvc(committed, "plots", "diff", "HEAD", "average", "--json"))["data"]
    assert any("evaluation.csv" in name for name in plots)

    committed.wait_for_tracking()
    names = mlflow_lifecycles(committed.root)
    assert names["lifecycle average"] == {"merge": "ran", "evaluate": "ran", "report": "ran"} | dict.fromkeys(
        (title for title in committed.lock if title not in ("merge", "evaluate", "report")), "cached"
    )


def mlflow_lifecycles(root: Path) -> dict[str, dict[str, str]]:
    """Parent run -> stage -> its state in DVC."""
    import sqlite3

    query = """
        SELECT parents.name, children.name, state.value FROM runs AS children
        JOIN tags AS above ON above.run_uuid = children.run_uuid AND above.key = 'mlflow.parentRunId'
        JOIN tags AS state ON state.run_uuid = children.run_uuid AND state.key = 'dvc.state'
        JOIN runs AS parents ON parents.run_uuid = above.value
    """
    found: dict[str, dict[str, str]] = {}
    with sqlite3.connect(root / "mlflow.db") as database:
        for parent, child, state in database.execute(query):
            found.setdefault(parent, {})[child] = state
    return found


def test_plots_page_loads_nothing_from_the_network(committed: Checkout) -> None:
    """Every plot is also an SVG file."""
    pytest.importorskip("vl_convert", reason="not run: needs the extra 'plots'; pip install -e '.[plots]'")
    command = [sys.executable, "-m", "stages.reporting.plots", "HEAD"]
    subprocess.run(command, cwd=committed.root, env=committed.env, capture_output=True, check=True)
    out = committed.root / "dvc_plots"
    page = (out / "index.html").read_text()
    for plot in ("evaluation_csv", "evaluation_json", "rl_search_history_csv", "rl_textworld_history_csv", "sft_history_csv"):
        assert f"vegaEmbed('#reports_{plot}'" in page
    assert 'src="http' not in page
    drawn = ("evaluation.csv", "evaluation.json", "rl_search_history.csv", "rl_textworld_history.csv", "sft_history.csv")
    assert {f"reports_{name}.svg" for name in drawn} <= {path.name for path in out.glob("*.svg")}
    assert all(path.read_text().startswith("<svg") for path in out.glob("*.svg"))


def clone(checkout: Checkout, target: Path, **remote: str) -> Checkout:
    """A fresh clone with the remote as its only source of results."""
    git(checkout.root, "clone", "-q", str(checkout.root), str(target))
    found = Checkout(target, checkout.environment)
    for key, value in remote.items():
        dvc(found, "remote", "modify", "--local", "storage", key, value)
    return found


def check_restored(checkout: Checkout, lock: dict) -> None:
    """Everything exists, nothing was computed, and git reports no change."""
    assert checkout.repro() == ([], [])
    assert checkout.lock == lock
    assert git(checkout.root, "status", "--porcelain") == ""
    assert (checkout.root / "reports" / "report.html").exists()
    assert (checkout.root / "data" / "models" / "merged" / "model.safetensors").exists()


def test_fresh_clone_gets_everything_from_a_remote(committed: Checkout, tmp_path: Path) -> None:
    """`dvc push`, `git clone`, and then `dvc pull`, or `dvc repro --pull`, computes nothing."""
    dvc(committed, "remote", "add", "--default", "storage", str(tmp_path / "storage"))
    git(committed.root, "commit", "-q", "-a", "-m", "Add a remote")
    dvc(committed, "push", "--run-cache")
    pulled = clone(committed, tmp_path / "pulled")
    dvc(pulled, "pull")
    check_restored(pulled, committed.lock)
    reproduced = clone(committed, tmp_path / "reproduced")
    ran, _ = reproduced.repro("--pull")
    assert ran == []
    check_restored(reproduced, committed.lock)


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """A local S3 server with a bucket called `results`."""
    import boto3

    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "s3.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            client = boto3.client(
                "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="k", aws_secret_access_key="s"
            )
            deadline = time.monotonic() + 120
            while True:
                try:
                    client.create_bucket(Bucket="results")
                    break
                except Exception:
                    assert process.poll() is None, (folder / "s3.log").read_text()
                    assert time.monotonic() < deadline, "the S3 server does not answer"
                    time.sleep(0.2)
            yield url
        finally:
            process.terminate()


@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in ("dvc_s3", "moto")), reason=NO_S3)
def test_fresh_clone_gets_everything_from_s3(committed: Checkout, tmp_path: Path) -> None:
    with s3_server(tmp_path) as url:
        committed.environment.update(AWS_ACCESS_KEY_ID="k", AWS_SECRET_ACCESS_KEY="s", AWS_DEFAULT_REGION="us-east-1")
        dvc(committed, "remote", "add", "--default", "storage", "s3://results/bellwether")
        dvc(committed, "remote", "modify", "--local", "storage", "endpointurl", url)
        git(committed.root, "commit", "-q", "-a", "-m", "Add a remote")
        dvc(committed, "push")
        assert yaml.safe_load(dvc(committed, "status", "--cloud", "--json")) == {}
        pulled = clone(committed, tmp_path / "pulled", endpointurl=url)
        dvc(pulled, "pull")
        check_restored(pulled, committed.lock)
