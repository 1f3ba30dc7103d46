"""The password of Prefect's API: who can read it, which servers are told it, and that every server started here wants one."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from flows import auth
from flows.auth import API, SERVER, auth_string, settings
from stages.tracking.ui import served

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_made_once_for_the_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "home" / "auth"
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(auth_string, [path] * 32))
    (text,) = found
    user, _, password = text.partition(":")
    assert user
    assert len(password) >= 43  # 256 bits
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert auth_string(tmp_path / "other" / "auth") != text


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_one_that_others_can_read_or_change_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "auth"
    path.write_text("bellwether:known\n")
    path.chmod(mode)
    with pytest.raises(PermissionError, match="delete it to get a new one"):
        auth_string(path)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "auth").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="symbolic link"):
        auth_string(tmp_path / "auth")
    assert not (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("address", "sent"),
    [
        ("", True),
        ("http://127.0.0.1:4200/api", True),
        ("http://localhost:4210/api", True),
        ("https://prefect.example.org/api", False),
        ("http://127.0.0.1.example.org/api", False),
    ],
)
def test_it_is_sent_to_servers_of_this_machine_alone(address: str, sent: bool, tmp_path: Path) -> None:
    found = settings({"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": address})
    own = auth_string(tmp_path / "auth")
    assert found == {SERVER: own, **({API: own} if sent else {})}


def test_what_the_caller_has_set_stays(tmp_path: Path) -> None:
    assert settings({"PREFECT_HOME": str(tmp_path), SERVER: "a:b", API: "c:d"}) == {SERVER: "a:b"}
    assert not (tmp_path / "auth").exists()


ASK = """
import os, sys
import flows
from prefect import get_client
import httpx

with get_client(sync_client=True) as client:
    address = str(client.api_url).rstrip("/")
    for auth in (None, ("bellwether", "guess"), tuple(os.environ["PREFECT_API_AUTH_STRING"].split(":"))):
        print(httpx.post(f"{address}/flow_runs/filter", json={}, auth=auth, trust_env=False).status_code)
    print(len(client.read_flow_runs()))
    print(httpx.get(f"{address}/health", headers={"Origin": "https://attacker.example"}, trust_env=False).headers)
"""


@pytest.mark.timeout(600)
def test_a_server_that_prefect_starts_for_one_run_wants_it_too(tmp_path: Path) -> None:
    """Contract: `python -m flows.lifecycle` without a server starts one over the same database, from which a worker later takes
    its runs; nobody else writes there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = {**kept, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", ASK], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *codes, runs, headers = done.stdout.splitlines()
    assert codes == ["401", "401", "200"]
    assert runs == "0"
    assert "access-control-allow-origin" not in headers


def test_make_ui_names_the_hosts_that_mlflow_answers_to() -> None:
    """Contract: not MLflow's own choice, in which `10.*` is a private address and 10.attacker.example one, too."""
    done = subprocess.run(["make", "-n", "ui"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "stages.tracking.ui" in done.stdout
    _, options = served([])
    assert set(options[options.index("--allowed-hosts") + 1].split(",")) == {
        *auth.HOSTS,
        *(f"{host}:*" for host in auth.HOSTS),
    }


def test_the_report_follows_links_and_shows_nothing_above_its_folder(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from flows.local_server import report

    folder = tmp_path / "reports"
    folder.mkdir()
    (tmp_path / "cached").write_text("<p>page</p>")
    (tmp_path / "secret").write_text("secret")
    (folder / "report.html").symlink_to(tmp_path / "cached")
    with TestClient(report(folder)) as client:
        answer: httpx.Response = client.get("/")
        assert (answer.status_code, answer.text) == (200, "<p>page</p>")
        assert client.get("/%2e%2e/secret").status_code == 404
        assert client.get("/none.html").status_code == 404
