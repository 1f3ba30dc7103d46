"""The viewer's looks in a real browser: width, contrast, and the note on a missing file."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from viewer_pages import GRAPH, PAIR, SHOWN, visit, wait

from screenshots.chromium import DESK, PHONE, Browser


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_nothing_is_wider_than_the_screen(browser: Browser, viewer: Path, size: tuple[int, int], dark: bool) -> None:
    browser.view(size, dark=dark)
    visit(browser, viewer)
    browser.run("document.querySelectorAll('details').forEach(item => item.open = true)")
    for view in ("chat", "owner", "logprob"):
        browser.run("document.querySelector(`#view-episodes [data-view=${arguments[0]}]`).click()", view)
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    for tab in ("compare", "patterns", "paths"):
        browser.run("document.getElementById(`tab-${arguments[0]}`).click()", tab)
        wait(browser, lambda tab=tab: browser.driver.find_element(By.ID, f"view-{tab}").is_displayed())
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    red = int(re.findall(r"\d+", browser.run("return getComputedStyle(document.body).backgroundColor"))[0])
    assert red < 40 if dark else red > 215


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(browser: Browser, viewer: Path, dark: bool) -> None:
    """Contract: at least 4.5, or 3 for large text, in every view."""
    script = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
    browser.view(DESK, dark=dark)
    visit(browser, viewer, source="rl step 20", domain="search")
    for view in ("chat", "owner", "logprob", "advantage", "credit"):
        browser.run("document.querySelector(`#view-episodes [data-view=${arguments[0]}]`).click()", view)
        wait(browser, lambda: browser.run(SHOWN))
        assert browser.run(script) == []
    visit(browser, viewer, tab="compare", domain="search", a="sft", b="merged", tint="credit", ready=PAIR)
    assert browser.run(script) == []
    visit(
        browser, viewer, tab="patterns", domain="search", ready="return Boolean(document.querySelector('#view-patterns table'))"
    )
    assert browser.run(script) == []
    visit(browser, viewer, tab="paths", domain="search", a="sft", b="merged", ready=GRAPH)
    assert browser.run(script) == []


def test_missing_file_is_named(browser: Browser, viewer: Path, tmp_path: Path) -> None:
    """Contract: a page without its folder says what is missing and what to do."""
    shutil.copy(viewer, tmp_path / "index.html")
    browser.ignored = "ERR_FILE_NOT_FOUND"
    browser.open(tmp_path / "index.html")
    note = browser.driver.find_element(By.ID, "trouble")
    wait(browser, note.is_displayed)
    assert re.search(r"The file textworld\.sft-20rollout\.js beside this page can't be read\. .*dvc checkout", note.text)
