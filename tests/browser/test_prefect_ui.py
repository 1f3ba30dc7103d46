"""Prefect's UI behind the password, and what a page of another origin can do with the API, in a real browser."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from served import free_port, until

from flows.auth import API, SERVER
from screenshots.chromium import Browser
from screenshots.servers import HOST, serving

pytestmark = pytest.mark.slow  # tests/flows/test_served.py asks the same of the server without a browser
ROOT = Path(__file__).resolve().parents[2]
TEXT = "return document.body ? document.body.innerText : ''"
FETCH = """
const [url, options, done] = arguments;
fetch(url, options).then(answer => done(answer.type + ' ' + answer.status), error => done(error.name));
"""


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """A server as `make serve` starts it, with one flow in its database."""
    home = tmp_path_factory.mktemp("prefect")
    address = f"http://{HOST}:{(port := free_port())}"
    environment = {API: "", SERVER: ""}  # not those of this process: the server makes its own password
    environment |= {"PREFECT_HOME": str(home), "PREFECT_API_URL": f"{address}/api", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}
    environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] = address
    command = [sys.executable, "-m", "flows.local_server", "prefect", "--port", str(port)]
    with serving(command, f"{address}/api/health", home / "log", environment, ROOT):
        password = (home / "auth").read_text().strip()
        user, _, secret = password.partition(":")
        with httpx.Client(base_url=f"{address}/api", auth=(user, secret), trust_env=False, timeout=120.0) as api:
            api.post("/flows/", json={"name": "lifecycle"}).raise_for_status()
        yield SimpleNamespace(address=address, password=password)


def shows(browser: Browser, text: str) -> str:
    return until(lambda: (page := str(browser.run(TEXT))) and text.lower() in page.lower() and page, f"'{text}' on the page", 240)


def log_in(browser: Browser, password: str) -> None:
    field = until(lambda: browser.driver.find_elements("css selector", "input[type=password]"), "a field for the password", 240)[
        0
    ]
    field.clear()
    field.send_keys(password)
    field.submit()


@pytest.mark.parametrize(("page", "refusal"), [("flows", "authentication failed"), ("v2/flows", "invalid credentials")])
def test_both_uis_require_the_password(page: str, refusal: str, own_browser: Browser, prefect: SimpleNamespace) -> None:
    """Contract: without the password the UI shows a login and no runs; with it, it works as usual."""
    own_browser.ignored = "."  # 401s are expected, and Prefect's own pages log more
    own_browser.open(f"{prefect.address}/{page}")
    log_in(own_browser, "bellwether:guess")
    shows(own_browser, refusal)
    assert "lifecycle" not in own_browser.run(TEXT)
    log_in(own_browser, prefect.password)
    until(lambda: "/login" not in own_browser.run("return location.href"), "logged in", 240)
    own_browser.open(f"{prefect.address}/{page}")
    shows(own_browser, "lifecycle")


@pytest.fixture
def foreign(tmp_path: Path) -> Iterator[str]:
    """A page of another origin."""
    (tmp_path / "page.html").write_text("<link rel=icon href='data:,'>foreign")
    server = ThreadingHTTPServer((HOST, 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://{HOST}:{server.server_port}/page.html"
    server.shutdown()
    server.server_close()


def test_page_of_another_origin_can_neither_read_nor_write(own_browser: Browser, prefect: SimpleNamespace, foreign: str) -> None:
    """Contract: a page open beside the logged-in UI reads nothing and starts nothing."""
    own_browser.ignored = "."
    own_browser.open(prefect.address)
    own_browser.run("localStorage.setItem('prefect-password', btoa(arguments[0]))", prefect.password)
    own_browser.open(foreign)
    flows = f"{prefect.address}/api/flows"
    json = {"Content-Type": "application/json"}
    for options in (
        {"method": "POST", "headers": json, "body": '{"name": "theirs"}', "credentials": "include"},
        {"method": "POST", "headers": {**json, "Authorization": "Basic Z3Vlc3M="}, "body": '{"name": "theirs"}'},
        {"method": "POST", "body": '{"name": "theirs"}'},
        {"method": "GET", "headers": {"Authorization": "Basic Z3Vlc3M="}},
    ):
        assert own_browser.driver.execute_async_script(FETCH, f"{flows}/", options) == "TypeError"
    silent = {"method": "POST", "mode": "no-cors", "body": '{"name": "theirs"}'}
    assert own_browser.driver.execute_async_script(FETCH, f"{flows}/", silent) == "opaque 0"
    user, _, secret = prefect.password.partition(":")
    found = httpx.post(f"{flows}/filter", json={}, auth=(user, secret), trust_env=False).json()
    assert [flow["name"] for flow in found] == ["lifecycle"]
