"""Observations that left the context are marked in the viewer and in the report's sample episodes, for every reader."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hidden_episodes import RESULT, judged_row
from selenium.webdriver.common.by import By
from tiny import make_tiny_tokenizer
from viewer_pages import PAIR, visit, wait

from screenshots.chromium import DESK, Browser
from stages.agent.chat import Chat
from stages.params import parse_params
from stages.reporting.episodes import browser_data
from stages.reporting.inputs import load_inputs
from stages.reporting.page import render_page
from stages.reporting.viewer.folder import write_viewer
from stages.reporting.viewer.groups import Group

LABEL = "left the context after turn 2"
SPOKEN = "#view-episodes .message.left"


@pytest.fixture(scope="module")
def pages(report: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The viewer and the report, with an episode that hid its first result and one like it that did not."""
    folder, chat = tmp_path_factory.mktemp("hidden"), Chat(make_tiny_tokenizer())
    inputs = load_inputs(report.parent.parent, parse_params({"domains": ["search"], "per_domain": {"search": {}}}))
    inputs = replace(inputs, tokenizer=chat.tokenizer.backend_tokenizer, chat=lambda: chat)
    hard, soft = [judged_row(chat)], [judged_row(chat, hard=False)]
    groups = [Group("search", "rl step 1", "training", hard), Group("search", "sft rollout", "rollout", soft)]
    with write_viewer(folder / "episodes", inputs, groups, []):
        pass
    data = browser_data({"search": {"rl step 1": hard}}, 1, inputs.tokenizer, 0, chat=inputs.chat)
    (folder / "report.html").write_text(render_page(inputs, [], [], data), encoding="utf-8")
    return folder / "episodes" / "index.html", folder / "report.html"


def view(browser: Browser, root: str, name: str) -> None:
    browser.run("document.querySelector(`${arguments[0]} [data-view=${arguments[1]}]`).click()", root, name)


def marked_text(browser: Browser, root: str) -> str:
    """The marked tokens as one text."""
    script = "return [...document.querySelectorAll(`${arguments[0]} .tokens span.left`)].map(one => one.textContent).join('')"
    return browser.run(script, root)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_viewer_marks_the_message_and_its_tokens(browser: Browser, pages: tuple[Path, Path], dark: bool) -> None:
    """Contract: the label is text, which a screen reader reads, and readable (WCAG AA) in both schemes; the key explains it."""
    contrast = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
    browser.view(DESK, dark=dark)
    visit(browser, pages[0], source="rl step 1", episode="t/0")
    (box,) = browser.driver.find_elements(By.CSS_SELECTOR, SPOKEN)
    assert box.text == f"environment, {LABEL}\n{RESULT}"
    (label,) = browser.driver.find_elements(By.CSS_SELECTOR, f"{SPOKEN} .left-context")
    assert "the turns after it did not see its text" in label.get_attribute("title")
    key = browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .key")
    assert "left the context" in key.text
    assert browser.run(contrast) == []
    for name in ("owner", "logprob"):
        view(browser, "#view-episodes", name)
        wait(browser, lambda: marked_text(browser, "#view-episodes") == RESULT)
        labels = browser.driver.find_elements(By.CSS_SELECTOR, "#view-episodes .tokens .left-context")
        assert [label.text for label in labels] == [LABEL]
        assert "left the context" in key.text
        assert browser.run(contrast) == []
    visit(browser, pages[0], tab="compare", domain="search", a="sft rollout", b="rl step 1", ready=PAIR)
    found = browser.driver.find_elements(By.CSS_SELECTOR, "#view-compare .left-context, #view-compare .answer.left")
    assert [one.text for one in found] == [LABEL, RESULT]
    assert browser.run(contrast) == []


def test_what_stayed_is_not_marked(browser: Browser, pages: tuple[Path, Path]) -> None:
    visit(browser, pages[0], source="sft rollout", episode="t/0")
    assert RESULT in browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .content").text
    assert not browser.driver.find_elements(By.CSS_SELECTOR, f"{SPOKEN}, #view-episodes .left-context")
    assert browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .key").text == ""


def test_the_reports_sample_episodes_are_marked(browser: Browser, pages: tuple[Path, Path]) -> None:
    browser.open(f"{pages[1].as_uri()}#episode=t%2F0")
    (box,) = browser.driver.find_elements(By.CSS_SELECTOR, "#browser .message.left")
    assert box.text == f"environment, {LABEL}\n{RESULT}"
    assert "left the context" in browser.driver.find_element(By.CSS_SELECTOR, "#browser .key").text
    view(browser, "#browser", "owner")
    assert marked_text(browser, "#browser") == RESULT
    labels = browser.driver.find_elements(By.CSS_SELECTOR, "#browser .tokens .left-context")
    assert [label.text for label in labels] == [LABEL]
