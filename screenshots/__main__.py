"""`python -m screenshots`: takes the screenshots in docs/ of the run in this checkout with headless Chromium.

Run `make lifecycle` first. Servers that are not running are started temporarily. `--only NAME ...` takes some of them, named like
the files in docs/screenshots. The documents' block `screenshots` is updated. Written for selenium, which the browser tests use
anyway: shot-scraper and Playwright download a browser of their own.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from screenshots.chromium import Browser, open_browser
from screenshots.servers import HOST, free_port, mlflow_server, prefect_server, serving
from stages.reporting.generated_blocks import filled, link

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("docs") / "screenshots"
SIZE = (1280, 860)
FAILED = ROOT / ".bellwether" / "screenshots" / "failed.png"
COLOURS = 160
LARGEST = 200_000
"""Maximum bytes of a screenshot."""
SETTLE_S, PATIENCE_S = 1.5, 240.0
WITH_RL = (
    "const right = document.querySelector('#view-paths [name=b]'); right.value = [...right.options].map(one => one.value)"
    ".filter(name => name.startsWith('rl step')).pop(); right.dispatchEvent(new Event('change', {bubbles: true}))"
)
"""Compares with the last stored step of RL."""
DRAWN = "document.querySelector('[data-view=drawn]').click()"
GRAPH_S = 8.0
"""Time for Prefect to draw a run's graph, on a canvas whose text cannot be read."""


def save(browser: Browser, path: Path) -> None:
    """Save the window as PNG with a palette. Raises RuntimeError if it is too large or nearly empty."""
    from PIL import Image

    picture = Image.open(io.BytesIO(browser.png())).convert("RGB")
    shades = len(picture.resize((160, 107)).getcolors(160 * 107) or [])
    if shades < 12:
        raise RuntimeError(f"{path.name} has only {shades} colours: the page was empty")
    small = picture.quantize(COLOURS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    data = io.BytesIO()
    small.save(data, "PNG", optimize=True)
    if data.tell() > LARGEST:
        raise RuntimeError(f"{path.name} has {data.tell():,} bytes (at most {LARGEST:,}); show less of the page")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.getvalue())
    print(f"screenshots: {path.relative_to(ROOT)}, {data.tell() / 1e3:.0f} kB")


def wait_for(browser: Browser, *texts: str) -> None:
    """Wait until the page shows all of `texts` and stops changing. Raises RuntimeError naming the missing texts."""
    deadline = time.monotonic() + PATIENCE_S
    shown = ""
    while True:
        before, shown = shown, browser.run("return document.body ? document.body.innerText : ''")
        lacking = [text for text in texts if text not in shown]
        if not lacking and shown == before:
            return
        if time.monotonic() > deadline:
            FAILED.parent.mkdir(parents=True, exist_ok=True)
            FAILED.write_bytes(browser.png())
            raise RuntimeError(f"{browser.driver.current_url} does not show {lacking or 'a stable page'}; see {FAILED}")
        time.sleep(SETTLE_S)


def take_report(browser: Browser, names: Sequence[str]) -> None:
    path = ROOT / "reports" / "report.html"
    if not path.exists():
        raise RuntimeError("reports/report.html does not exist; run 'make lifecycle' first")
    browser.view((SIZE[0], 1180))
    browser.open(path)
    save(browser, ROOT / FOLDER / "report.png")


VIEWS = {
    "viewer-episode": ("source=merged&domain=textworld&pattern=loop", "#view-episodes .content", DRAWN),
    "viewer-compare": ("tab=compare&domain=textworld&a=sft&b=rl%40textworld&change=won&tint=credit", "#view-compare .pair", ""),
    "viewer-patterns": ("tab=patterns&domain=search", "#view-patterns table", ""),
    "viewer-paths": ("tab=paths&domain=textworld&a=rl+step+1", "#view-paths .graph svg", WITH_RL),
}
"""Name -> the viewer's address, what it then shows, a script to run before the picture."""


def take_viewer(browser: Browser, names: Sequence[str]) -> None:
    path = ROOT / "reports" / "episodes" / "index.html"
    if not path.exists():
        raise RuntimeError("reports/episodes/index.html does not exist; run 'make lifecycle' first")
    browser.view(SIZE)
    for name in names:
        address, shown, script = VIEWS[name]
        browser.driver.get("about:blank")
        browser.open(f"{path.resolve().as_uri()}#{address}")
        deadline = time.monotonic() + PATIENCE_S
        while not browser.run("return document.querySelector(arguments[0])?.childElementCount", shown):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{browser.driver.current_url} does not show {shown}")
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        if script:
            browser.run(script)
            time.sleep(SETTLE_S)
        save(browser, ROOT / FOLDER / f"{name}.png")


def replayed(root: Path, domain: str) -> None:
    """Tell in `root` what this checkout's rl stage told: the curves up to the middle, the episodes of its first stored step. The
    stage counts as running while this process does. Raises RuntimeError without a finished rl stage."""
    from stages.records.episode import read_rows, sample_schema, write_table
    from stages.reporting.inputs import read_history
    from stages.runtime.live import Live
    from stages.training.common.steering import NEWEST

    history, samples = ROOT / f"reports/rl/{domain}_history.csv", ROOT / f"data/rl/{domain}/samples.parquet"
    columns = read_history(history)
    if columns is None or not samples.exists():
        raise RuntimeError(f"{history} or {samples} does not exist; run 'make lifecycle' first")
    for name in ("params.yaml", "data/models/sft"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(ROOT / name)
    steps = len(columns["step"])
    rows = [{name: values[place] for name, values in columns.items()} for place in range((steps + 1) // 2)]
    live = Live(root, f"rl@{domain}")
    live.begin("training", steps, rows)
    given = read_rows(samples)
    first = [row for row in given if row["step"] == min(other["step"] for other in given)]
    file = live.episodes_file()
    assert file is not None
    write_table(file, sample_schema(first), first[:NEWEST])


def take_live(browser: Browser, names: Sequence[str]) -> None:
    """What is training, from the finished run's own history: the stage itself would be over too soon."""
    with tempfile.TemporaryDirectory() as folder:
        root, port = Path(folder), free_port()
        replayed(root, "search")
        command = [sys.executable, "-m", "stages.live", "serve", "--port", str(port)]
        address = f"http://{HOST}:{port}/live/"
        with serving(command, address, root / "log", {"PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": ""}, root):
            browser.view(SIZE)
            browser.open(address)
            wait_for(browser, "rl@search", "Stop after this step", "Newest episodes")
            save(browser, ROOT / FOLDER / "viewer-live.png")


def mlflow_runs(address: str) -> tuple[str, str, str, Any]:
    """(experiment id, id of the newest lifecycle with a finished rl run, id of that run, a trace of the lifecycle).

    Raises RuntimeError if there is none.
    """
    import mlflow

    client = mlflow.MlflowClient(address)
    experiment = client.get_experiment_by_name("bellwether")
    if experiment is None:
        raise RuntimeError("MLflow has no experiment 'bellwether'; run 'make lifecycle' first, with tracking on")
    runs = client.search_runs([experiment.experiment_id], max_results=1000, order_by=["attributes.start_time DESC"])
    finished = [run for run in runs if run.info.status == "FINISHED" and run.data.tags.get("dvc.state", "ran") == "ran"]
    rl = [run for run in finished if run.info.run_name.startswith("rl@")]
    if not rl:
        raise RuntimeError("MLflow has no finished rl run; run 'make lifecycle' first, with tracking on")
    parent = rl[0].data.tags["mlflow.parentRunId"]
    siblings = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == parent]
    place = experiment.experiment_id
    traces = [
        trace for run in siblings for trace in client.search_traces(locations=[place], run_id=run.info.run_id, max_results=20)
    ]
    if not traces:
        raise RuntimeError(f"the lifecycle {parent} has no trace of an episode")
    longest = max(traces, key=lambda trace: (len(trace.data.spans), trace.info.trace_id))
    return place, parent, rl[0].info.run_id, longest


CLOSE_ASSISTANT = "document.querySelector('[data-component-id=\"mlflow.assistant.chat_panel.close\"]')?.click()"
EXPAND = "document.querySelector(`.ag-row a[href*='${arguments[0]}']`).closest('.ag-cell').querySelector('button').click()"
CURVES = "success|reward_mean|entropy|kl|grad_norm|turns"
NO_TOOLBARS = """
const style = document.createElement('style');
style.textContent = '.modebar-container, .modebar { display: none !important }';
document.head.append(style);
"""
LOG_IN = "localStorage.setItem('prefect-password', btoa(arguments[0]))"
"""Logs in to Prefect's UI; no effect if the server has no password."""
CLICK_TEXT = """
const leaves = [...document.querySelectorAll('*')].filter(item => !item.children.length);
leaves.find(item => item.textContent.trim() === arguments[0]).click();
"""


def show(browser: Browser, page: str, *texts: str) -> None:
    """Load a page of MLflow, without its chat panel."""
    browser.open("about:blank")
    browser.open(page)
    wait_for(browser, *texts)
    browser.run(CLOSE_ASSISTANT)


def take_mlflow(browser: Browser, names: Sequence[str]) -> None:
    browser.view(SIZE)
    with mlflow_server(ROOT) as address:
        experiment, parent, run, trace = mlflow_runs(address)
        start = f"{address}/#/experiments/{experiment}"
        if "mlflow-runs" in names:
            show(browser, f"{start}/runs", "matching runs", "lifecycle")
            browser.run(EXPAND, parent)
            wait_for(browser, "rl@", "evaluate", "sft")
            save(browser, ROOT / FOLDER / "mlflow-runs.png")
        if "mlflow-charts" in names:
            show(browser, f"{start}/runs/{run}/model-metrics", "Step")
            browser.driver.find_element("css selector", "input[role=searchbox]").send_keys(CURVES)
            browser.run(NO_TOOLBARS)
            wait_for(browser, "success", "entropy")
            save(browser, ROOT / FOLDER / "mlflow-charts.png")
        if "mlflow-trace" in names:
            turns = [span.name for span in trace.data.spans]
            show(browser, f"{start}/traces?selectedEvaluationId={trace.info.trace_id}", turns[0], turns[-1])
            browser.run(CLICK_TEXT, turns[len(turns) // 2])
            wait_for(browser, turns[0])
            save(browser, ROOT / FOLDER / "mlflow-trace.png")


def newest_flow_run(address: str) -> str | None:
    """The id of the newest completed run of the flow `lifecycle`."""
    import flows  # noqa: F401  (Prefect's settings for this checkout)

    os.environ["PREFECT_API_URL"] = f"{address}/api"
    from prefect import get_client
    from prefect.client.schemas.filters import (
        FlowFilter,
        FlowFilterName,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import StateType
    from prefect.client.schemas.sorting import FlowRunSort

    done = FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.COMPLETED])))
    flow = FlowFilter(name=FlowFilterName(any_=["lifecycle"]))
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(flow_filter=flow, flow_run_filter=done, sort=FlowRunSort.START_TIME_DESC, limit=1)
    return str(found[0].id) if found else None


def take_prefect(browser: Browser, names: Sequence[str]) -> None:
    """An existing flow run, else a new one, which takes seconds for a finished pipeline."""
    with prefect_server(ROOT) as address:
        run = newest_flow_run(address)
        if run is None:
            environment = {**os.environ, "PREFECT_API_URL": f"{address}/api"}
            subprocess.run([sys.executable, "-m", "flows.lifecycle"], cwd=ROOT, env=environment, check=True)
            run = newest_flow_run(address)
        browser.view(SIZE)
        browser.open(address)
        browser.run(LOG_IN, os.environ.get("PREFECT_API_AUTH_STRING", ""))
        browser.open(f"{address}/runs/flow-run/{run}")
        wait_for(browser, "Completed", "Task Runs")
        browser.run(CLICK_TEXT, "Task Runs")
        time.sleep(GRAPH_S)
        save(browser, ROOT / FOLDER / "prefect-run.png")


CAPTIONS = {
    "report": "The report: figures, results with paired tests, changes, cost, episodes",
    "viewer-episode": "Every episode: filters, search, patterns, and the environment's own picture of each turn",
    "viewer-compare": "Two models at the same task, turn by turn, the first divergence marked",
    "viewer-patterns": "How often patterns of behaviour occur, with links to the episodes",
    "viewer-paths": "Where the episodes of a task go, at the start and the end of reinforcement learning",
    "viewer-live": "What is training: curves, newest episodes, pause, resume and stop",
    "mlflow-runs": "MLflow: a parent run per lifecycle, a child per stage and domain",
    "mlflow-charts": "MLflow: curves of an RL run",
    "mlflow-trace": "MLflow: an episode as a trace, turn by turn",
    "prefect-run": "Prefect: a lifecycle as a flow run",
}
"""In the order of the page."""
TAKERS: dict[Callable[[Browser, Sequence[str]], None], tuple[str, ...]] = {
    take_report: ("report",),
    take_viewer: tuple(VIEWS),
    take_live: ("viewer-live",),
    take_mlflow: ("mlflow-runs", "mlflow-charts", "mlflow-trace"),
    take_prefect: ("prefect-run",),
}


def pictures(root: Path, document: Path) -> str:
    """The existing screenshots, two per row, each linked to its full size."""
    lines = []
    for name, caption in CAPTIONS.items():
        path = FOLDER / f"{name}.png"
        if (root / path).exists():
            address = link(path, document)
            lines.append(f'<a href="{address}"><img src="{address}" width="49%" alt="{caption}" title="{caption}"></a>')
    return "\n".join(lines)


def documents_with_pictures(root: Path) -> dict[Path, str]:
    """The documents with the block `screenshots` updated, by path relative to `root`."""
    return filled(root, {"screenshots": lambda document: pictures(root, document)})


def main() -> int:
    every = list(CAPTIONS)
    from selenium.common.exceptions import WebDriverException

    parser = argparse.ArgumentParser(prog="python -m screenshots", description="Take screenshots of the run in this checkout.")
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="NAME", help=f"names: {', '.join(every)}")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # to end the browser, too
    failed = False
    for take, names in TAKERS.items():
        if wanted := [name for name in names if name in options.only]:
            try:
                with open_browser() as browser:
                    take(browser, wanted)
            except (RuntimeError, WebDriverException, subprocess.CalledProcessError) as error:
                print(f"screenshots: {', '.join(wanted)}: {error}", file=sys.stderr)
                failed = True
    for path, text in documents_with_pictures(ROOT).items():
        (ROOT / path).write_text(text, encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
