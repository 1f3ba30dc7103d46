"""A training run in the viewer while it runs: curves, newest episodes, pause, resume and stop, by mouse-free use too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from reporting_run import make_run
from slow import slow_except

from screenshots.chromium import DESK, PHONE
from screenshots.servers import HOST, free_port, serving
from stages.params import ROOT
from stages.records.episode import read_rows
from stages.runtime.live import FOLDER, read_state

TITLE = "rl@search"
TRAINING = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
import pyarrow as pa
from stages.records.episode import read_rows
from stages.runtime import live
from stages.runtime.live import StoppedError
from stages.training.common.steering import Steering

live.EPISODES_EVERY_S = 0.0
root, rows = Path(sys.argv[1]), read_rows(sys.argv[2])[:6]
quiet = lambda *values: None
context = SimpleNamespace(root=root, title="rl@search", main=True, shard=None, metric=quiet, tracker=SimpleNamespace(tags=quiet))
steering = Steering(context, None, "training", 400, [])
print("started", flush=True)
try:
    for step in range(1, 401):
        time.sleep(0.4)
        newest = [{**row, "episode_id": f"{row['task_id']}/s{step:03d}-{place}", "step": step} for place, row in enumerate(rows)]
        row = {"step": float(step), "success": 1 - 1 / step, "loss": 1 / step, "kl": 0.1 if step > 1 else float("nan"), "lr": 0.1}
        steering.tell(row, lambda: newest)
        steering.obey(step, lambda: None)
except StoppedError as error:
    print(error, flush=True)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("live")
    make_run(root)
    return root


@pytest.fixture
def training(checkout: Path) -> Iterator[subprocess.Popen]:
    """A process that steps as the training loop does."""
    given = checkout / "data/rl/search/samples.parquet"
    assert read_rows(given)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(checkout), str(given)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def address(checkout: Path) -> Iterator[str]:
    """The server of `make ui` and `make serve`."""
    port = free_port()
    command = [sys.executable, "-m", "stages.live", "serve", "--port", str(port)]
    environment = {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": ""}
    with serving(command, f"http://{HOST}:{port}/live/state.json", checkout / "server.log", environment, checkout):
        yield f"http://{HOST}:{port}"


def until(browser: Any, script: str, within_s: float = 90.0) -> Any:
    """Poll a script until its value is true; the value."""
    deadline = time.monotonic() + within_s
    while not (found := browser.run(f"return {script}")):
        assert time.monotonic() < deadline, f"{script}:\n{browser.run('return document.body.innerText')[:1500]}"
        time.sleep(0.1)
    return found


SHOWN = "document.querySelector('.stage[data-title=\"rl@search\"]')"


def press(browser: Any, wanted: str) -> None:
    """Reach a button with the keyboard alone and press it."""
    browser.run(f"{SHOWN}.querySelector('[data-wanted={wanted}]').focus()")
    from selenium.webdriver.common.keys import Keys

    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)


def test_the_page_follows_pauses_resumes_and_stops_a_run(browser: Any, address: str, training: Any, checkout: Path) -> None:
    browser.open(f"{address}/live/")
    until(browser, f"{SHOWN} && Number({SHOWN}.dataset.step) >= 3")
    assert browser.run("return document.querySelector('[role=tab][aria-selected=true]').textContent") == "Live"
    curves = until(browser, f"[...{SHOWN}.querySelectorAll('.curve b')].map(one => one.textContent).join() || ''")
    assert curves.startswith("success,loss,kl")
    label = browser.run(f"return {SHOWN}.querySelector('.curve svg').getAttribute('aria-label')")
    assert label.startswith("success: ")
    first = int(browser.run(f"return {SHOWN}.dataset.step"))
    until(browser, f"Number({SHOWN}.dataset.step) > {first} + 4", within_s=30)

    press(browser, "pause")
    until(browser, f"{SHOWN}.dataset.phase === 'paused'")
    assert read_state(checkout / FOLDER / TITLE).phase == "paused"
    at = browser.run(f"return {SHOWN}.dataset.step")
    time.sleep(1.5)
    assert read_state(checkout / FOLDER / TITLE).step == int(at)
    assert browser.run(f"return {SHOWN}.querySelector('[data-wanted=pause]').disabled")

    # The newest episodes open in the same page, with tokens, advantages and the environment's drawing.
    link = until(browser, f"{SHOWN}.querySelector('.newest li a')?.hash")
    browser.run(f"{SHOWN}.querySelector('.newest li a').click()")
    until(browser, "document.querySelector('#view-episodes .content')?.dataset.ready")
    assert "live" in link
    assert f"step {int(at)}, live" in browser.run("return document.querySelector('#view-episodes .facts').textContent")
    browser.run("document.querySelector('[data-view=advantage]').click()")
    until(browser, "document.querySelectorAll('#view-episodes .tokens [data-token]').length")
    words = browser.run("return document.querySelector('#view-episodes .tokens').textContent")
    assert words
    assert "undefined" not in words

    browser.run("document.getElementById('tab-live').click()")
    press(browser, "resume")
    until(browser, f"{SHOWN}.dataset.phase === 'running' && Number({SHOWN}.dataset.step) > {at}")
    press(browser, "stop")
    until(browser, f"{SHOWN}.dataset.phase === 'stopped'")
    notes = browser.run(f"return [...{SHOWN}.querySelectorAll('.notes li')].map(one => one.textContent)")
    assert notes[0] == f"paused after step {at} (from the page)"
    assert notes[1].startswith("went on after ")
    assert notes[2].startswith("stopped after step ")
    assert "run the stage again to go on from there" in training.stdout.read()


@pytest.mark.slow
def test_the_report_s_own_viewer_shows_what_runs(browser: Any, address: str, checkout: Path, training: Any, report: Path) -> None:
    """Contract: it is the same page; opened as a file, it has no tab for what runs."""
    target = checkout / "reports"
    for item in ("report.html", "episodes"):
        if not (target / item).exists():
            (target / item).symlink_to(report.parent / item)
    browser.open(f"{address}/episodes/index.html#tab=live")
    until(browser, f"{SHOWN} && {SHOWN}.querySelector('.newest li')")
    assert until(browser, "!document.getElementById('tab-compare').hidden")
    browser.run("document.getElementById('tab-episodes').click()")
    sources = until(browser, "[...document.querySelector('#view-episodes [name=source]').options].map(one => one.value)")
    assert "merged" in sources
    assert any(name.endswith(", live") for name in sources)
    browser.open("about:blank")
    browser.open(report.parent / "episodes" / "index.html")
    until(browser, "document.querySelector('#view-episodes .count').dataset.ready")
    assert browser.run("return document.getElementById('tab-live').hidden")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", slow_except([DESK, PHONE], PHONE))
def test_live_page_fits_and_has_contrast(browser: Any, address: str, training: Any, size: Any, dark: bool) -> None:
    browser.view(size, dark)
    browser.open(f"{address}/live/")
    until(browser, f"{SHOWN} && {SHOWN}.querySelector('.newest li')")
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth + 1")
    low = browser.run((Path(__file__).parent / "contrast.js").read_text(encoding="utf-8"))
    assert low == []


def test_the_command_line_steers_too(checkout: Path, training: Any) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "stages.live", *arguments]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    assert run("pause") == (0, "live: rl@search pauses after this step\n")
    deadline = time.monotonic() + 60
    while (state := read_state(checkout / FOLDER / TITLE)).phase != "paused":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    code, text = run("status")
    assert code == 0
    paused = f"  paused after step {state.step} (from the command line)\n"
    assert text == f"rl@search: paused, training step {state.step} of 400\n{paused}"
    assert run("stop", TITLE) == (0, "live: rl@search stops after this step and leaves a checkpoint\n")
    assert f"stopped after step {state.step}" in training.stdout.read()
    assert run("resume", TITLE) == (2, "live: rl@search does not run\n")
    assert run("pause") == (2, "live: no stage is training\n")


FOREIGN: dict[str, tuple[dict[str, str], str, int]] = {
    "another host": ({"Host": "attacker.example"}, '{"title": "rl@search", "wanted": "stop"}', 421),
    "another site": ({"Origin": "http://attacker.example"}, '{"title": "rl@search", "wanted": "stop"}', 403),
    "another port": ({"Origin": "http://127.0.0.1:1"}, '{"title": "rl@search", "wanted": "stop"}', 403),
    "a form": ({"Content-Type": "text/plain"}, '{"title": "rl@search", "wanted": "stop"}', 415),
    "another request": ({}, '{"title": "rl@search", "wanted": "halt"}', 400),
    "no stage": ({}, '{"title": "../rl@search", "wanted": "stop"}', 400),
    "no JSON": ({}, "stop", 400),
    "too long": ({}, json.dumps({"title": "x" * 20_000, "wanted": "stop"}), 413),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_requests_change_nothing(case: str, address: str, checkout: Path, training: Any) -> None:
    headers, body, status = FOREIGN[case]
    given = {"Content-Type": "application/json", **headers}
    answer = httpx.post(f"{address}/live/request", headers=given, content=body, trust_env=False)
    assert answer.status_code == status, answer.text
    time.sleep(0.6)
    state = read_state(checkout / FOLDER / TITLE)
    assert (state.phase, state.notes) == ("running", ())
