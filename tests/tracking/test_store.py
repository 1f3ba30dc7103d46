"""A copied or moved checkout keeps its runs and writes only into itself; `make ui` prints the actual address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow_server import free_port
from spooling import EPISODE, ROOT, attach, runs, spooled

from stages.tracking.episodes import trace_of
from stages.tracking.sender import Sender
from stages.tracking.server import Server
from stages.tracking.store import relocate
from stages.tracking.ui import served


def send_run(root: Path, stage: str, domain: str | None) -> None:
    spool = spooled(root, stage, domain)
    attach(spool, {"kind": "artifact"}, "history.csv", f"of {stage}")
    spool.append({"kind": "trace", **trace_of(EPISODE, "rl step 1")})
    spool.append({"kind": "end", "status": "FINISHED"})
    assert Sender(Server(root), spool).send()


def files(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in (folder / "mlartifacts").rglob("*") if path.is_file()}


def text(server: Server, name: str) -> str:
    uri = f"{runs(server)[name].info.artifact_uri}/history.csv"
    return Path(server.mlflow.artifacts.download_artifacts(artifact_uri=uri)).read_text()


@pytest.mark.slow
def test_copied_checkout_writes_only_into_itself(root: Path) -> None:
    """Contract: a copy's `mlflow.db` does not point to the original checkout, and old runs keep their files."""
    first, copy = root / "first % one", root / "second" / "copy"
    first.mkdir()
    shutil.move(root / "mlflow.db", first / "mlflow.db")
    send_run(first, "rl", "search")
    shutil.copytree(first, copy)
    before = files(first)
    send_run(copy, "sft", None)
    assert files(first) == before
    assert files(copy) > before
    shutil.rmtree(first)
    server = Server(copy)
    assert text(server, "rl@search") == "of rl"
    assert text(server, "sft") == "of sft"
    assert len(server.client.search_traces(locations=[server.experiment])) == 2
    assert relocate(copy) is None, "nothing is left to change"


def test_symlink_to_the_same_checkout_changes_nothing(root: Path) -> None:
    send_run(root, "rl", "search")
    link = root.with_name(f"{root.name}-link")
    link.symlink_to(root)
    before = (root / "mlflow.db").read_bytes()
    assert relocate(link) is None
    assert (root / "mlflow.db").read_bytes() == before


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ([], "http://127.0.0.1:5000"),
        (["--port", "5005"], "http://127.0.0.1:5005"),
        (["--port=5005", "--host", "localhost"], "http://localhost:5005"),
        (["-p", "5005", "--static-prefix", "/x"], "http://127.0.0.1:5005"),
    ],
)
def test_ui_address_follows_the_options(given: list[str], address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_PORT", raising=False)
    monkeypatch.delenv("MLFLOW_HOST", raising=False)
    printed, _, options = served(given)
    assert printed == address
    assert f"http://{options[1]}:{options[3]}" == address
    assert options[options.index("--allowed-hosts") + 1] == "127.0.0.1,127.0.0.1:*,localhost,localhost:*"
    port = address.rpartition(":")[2]
    assert options[options.index("--cors-allowed-origins") + 1] == f"http://127.0.0.1:{port},http://localhost:{port}"
    assert options[10:] == [item for item in given if item in ("--static-prefix", "/x")]


def test_make_ui_prints_the_requested_port(root: Path) -> None:
    """`make ui UI_ARGS='--port N'` prints N, and listens there."""
    port = free_port()
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\nui: install\n")[1].split("\n\n")[0]
    assert "stages.tracking.ui $(UI_ARGS)" in recipe
    assert "5000" not in recipe
    stub = root / "bin" / "python"  # replaces MLflow's own server, which takes seconds to start
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/sh\ncase "$*" in *"mlflow ui"*) echo "$@";; *) exec {sys.executable} "$@";; esac\n')
    stub.chmod(0o755)
    code = f"import sys; sys.executable = {str(stub)!r}; import stages.tracking.ui as ui; raise SystemExit(ui.main())"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    done = subprocess.run(
        [sys.executable, "-c", code, "--port", str(port), "--report-port", "0"],
        cwd=root,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    first, second = done.stdout.splitlines()
    assert f"http://127.0.0.1:{port} " in first
    assert f"--backend-store-uri sqlite:///{root}/mlflow.db --host 127.0.0.1 --port {port}" in second
