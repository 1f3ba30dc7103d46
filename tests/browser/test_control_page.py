"""Lane control's page in a real browser: it opens without errors, fits every screen, and its links, plots and films are there."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from screenshots.chromium import DESK, PHONE, Browser
from stages.control.lane.settings import PARAMS, load_lane
from stages.params import ROOT
from stages.reporting.control_page import render_control_page


@pytest.fixture(scope="module")
def control_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of made-up results of every method in reports/control/params.yaml."""
    lane, rng = load_lane(ROOT / PARAMS), np.random.default_rng(0)
    runs: dict[str, dict[str, Any]] = {}
    for name, method in lane.methods.items():
        task = method.settings.get("task", "") or {"offline": "Pendulum-v1", "detour": "bellwether/Detour-v0"}.get(
            method.problem, ""
        )
        curve = task and method.problem != "tabular"
        steps = [500, 1000, 1500, 2000] if curve else []
        returns = rng.normal(0.0, 100.0, (lane.seeds, len(steps))).tolist()
        figures = {"figure_of_it": rng.normal(size=lane.seeds).tolist()}
        runs[name] = {"problem": method.problem, "task": task, "steps": steps, "returns": returns, "figures": figures}
    written = io.BytesIO()
    Image.new("RGB", (160, 120), "grey").save(written, "WEBP")
    films = {"sac": written.getvalue(), "bc_medium": written.getvalue()}
    summary = {"episodes": 50, "steps": 10_000, "mean_return": -1234.5, "sha256": "ab" * 32}
    data = {"pendulum": {"task": "Pendulum-v1", "sets": {"pendulum/random-v0": summary}}}
    path = tmp_path_factory.mktemp("control") / "page.html"
    path.write_text(render_control_page(lane, runs, films, data), encoding="utf-8")
    return path


@pytest.mark.slow
def test_the_page_is_whole_and_can_be_read(browser: Browser, control_page: Path) -> None:
    """Contract: nothing is wider than the screen, text has the contrast of WCAG AA, chapters, plots and films are there, and no
    error is on the console."""
    for size, dark in ((PHONE, True), (PHONE, False), (DESK, True), (DESK, False)):
        browser.view(size, dark=dark)
        browser.open(control_page)
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
        assert browser.run((Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")) == []
    targets = browser.run("return [...document.querySelectorAll('a[href^=\"#\"]')].map(a => a.getAttribute('href').slice(1))")
    assert {"learning", "data", "exact", "films"} <= set(targets)
    assert all(browser.run("return document.getElementById(arguments[0]) !== null", target) for target in targets)
    browser.lay_out_figures()
    plots = browser.run("return [...document.querySelectorAll('.plot svg')].map(svg => svg.getBoundingClientRect().width)")
    assert len(plots) >= 5
    assert min(plots) > 200
    films = browser.run("return [...document.querySelectorAll('.films img')].map(img => [img.naturalWidth, img.alt])")
    assert films == [[160, "SAC, Pendulum-v1"], [160, "behaviour cloning, Pendulum-v1, from pendulum/medium-v0"]]
