"""The password of Prefect's API: who can read it, which servers receive it, and that every server started here requires it."""

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


def test_password_is_made_once_and_readable_only_by_the_owner(tmp_path: Path) -> None:
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
def test_password_file_accessible_to_others_is_rejected(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "auth"
    path.write_text("bellwether:known\n")
    path.chmod(mode)
    with pytest.raises(PermissionError, match="delete it to get a new one"):
        auth_string(path)


def test_symbolic_link_is_not_followed(tmp_path: Path) -> None:
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
def test_password_is_sent_only_to_servers_of_this_machine(address: str, sent: bool, tmp_path: Path) -> None:
    found = settings({"PREFECT_HOME": str(tmp_path), "PREFECT_API_URL": address})
    own = auth_string(tmp_path / "auth")
    assert found == {SERVER: own, **({API: own} if sent else {})}


def test_settings_of_the_caller_are_kept(tmp_path: Path) -> None:
    assert settings({"PREFECT_HOME": str(tmp_path), SERVER: "a:b", API: "c:d"}) == {SERVER: "a:b"}
    assert not (tmp_path / "auth").exists()


CLIENT = """
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_temporary_server_requires_the_password(tmp_path: Path) -> None:
    """Contract: `python -m flows.lifecycle` without a server makes Prefect start one over the database from which a worker later
    takes runs; only the password's owner may write there."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment = {**kept, "PREFECT_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", CLIENT], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    *codes, runs, headers = done.stdout.splitlines()
    assert codes == ["401", "401", "200"]
    assert runs == "0"
    assert "access-control-allow-origin" not in headers


def test_make_ui_restricts_mlflow_to_local_host_names() -> None:
    """Contract: MLflow's default would allow `10.*`, and with it the host 10.attacker.example."""
    done = subprocess.run(["make", "-n", "ui"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "stages.tracking.ui" in done.stdout
    _, _, options = served([])
    assert set(options[options.index("--allowed-hosts") + 1].split(",")) == {
        *auth.HOSTS,
        *(f"{host}:*" for host in auth.HOSTS),
    }


def test_report_server_follows_links_but_serves_nothing_above_its_folder(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from stages.live.app import make_app

    folder = tmp_path / "reports"
    folder.mkdir()
    (tmp_path / "cached").write_text("<p>page</p>")
    (tmp_path / "secret").write_text("secret")
    (folder / "report.html").symlink_to(tmp_path / "cached")
    client = TestClient(make_app(tmp_path), base_url="http://127.0.0.1:5001")
    answer: httpx.Response = client.get("/")
    assert (answer.status_code, answer.text) == (200, "<p>page</p>")
    assert client.get("/%2e%2e/secret").status_code == 404
    assert client.get("/none.html").status_code == 404
