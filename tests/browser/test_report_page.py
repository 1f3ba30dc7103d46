"""The report in a real browser: it opens without errors, and its episodes can be filtered by mouse, by keyboard and on a
phone."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from screenshots.chromium import DESK, PHONE, Browser
from stages.params import ROOT

CHOSEN = "return document.querySelector('.outline [aria-selected=true]').dataset.node"
TASK = "return document.querySelector('.list [aria-selected=true] .task').textContent"
SELECTED = "return document.querySelector('.list [aria-selected=true]').id"


@pytest.fixture(scope="session")
def episodes(report: Path) -> list[dict]:
    """The episodes that the page embeds."""
    found = re.search(r'id="episode-data">(.*?)</script>', report.read_text(encoding="utf-8"), re.S)
    assert found is not None
    return json.loads(found[1])["episodes"]


def press(browser: Browser, selector: str, *keys: str) -> None:
    """Focus an element and send keys to it."""
    element = browser.driver.find_element(By.CSS_SELECTOR, selector)
    browser.run("arguments[0].focus()", element)
    element.send_keys(*keys)


def wait(browser: Browser, true: Callable[[], bool]) -> None:
    """Wait until the page has handled an event that it gets later than the script that causes it."""
    WebDriverWait(browser.driver, 10).until(lambda _: true())


def test_filters_show_only_matching_episodes(browser: Browser, report: Path, episodes: list[dict]) -> None:
    browser.open(report)
    for name, value in (("domain", "search"), ("outcome", "success")):
        Select(browser.driver.find_element(By.CSS_SELECTOR, f"select[name={name}]")).select_by_value(value)
    wanted = [episode for episode in episodes if episode["domain"] == "search" and episode["outcome"] == "success"]
    assert 0 < len(wanted) < len(episodes)
    listed = [item.text for item in browser.driver.find_elements(By.CSS_SELECTOR, ".list .task")]
    assert listed == [episode["task"] for episode in wanted]
    assert browser.driver.find_element(By.CSS_SELECTOR, ".count").text.startswith(f"{len(wanted)} episode")
    messages = [item.text for item in browser.driver.find_elements(By.CSS_SELECTOR, ".message")]
    assert len(messages) == len(wanted[0]["messages"])
    assert wanted[0]["messages"][0][1] in messages[0]


def test_keyboard_selects_episodes_views_and_tokens(browser: Browser, report: Path, episodes: list[dict]) -> None:
    """Contract: everything that the mouse can do in the episode browser, the keyboard can."""
    browser.open(report)
    press(browser, ".list", Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert browser.run(SELECTED) == "episode-2"
    press(browser, ".list", Keys.END)
    assert browser.run(SELECTED) == f"episode-{len(episodes) - 1}"
    press(browser, ".list", Keys.HOME, Keys.ARROW_UP)
    assert browser.run(SELECTED) == "episode-0"
    assert browser.run("return document.activeElement.className") == "list"
    # Tab from the list to the second view and open it.
    browser.driver.switch_to.active_element.send_keys(Keys.TAB, Keys.TAB)
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.run("return document.querySelector('[aria-pressed=true]').dataset.view") != "chat"
    press(browser, ".content", Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_RIGHT)
    assert browser.run("return document.querySelector('.marked').dataset.token") == "1"
    tip = browser.driver.find_element(By.CSS_SELECTOR, ".tip")
    assert f"(id {episodes[0]['ids'][1]})" in tip.text
    press(browser, ".content", Keys.ESCAPE)
    assert not tip.is_displayed()


def test_text_stop_reason_turns_and_invalid_actions_filter_episodes(browser: Browser, report: Path, episodes: list[dict]) -> None:
    browser.open(report)

    def listed() -> list[str]:
        return [item.text for item in browser.driver.find_elements(By.CSS_SELECTOR, ".list .task")]

    def tasks(keep: Callable[[dict], bool]) -> list[str]:
        return [episode["task"] for episode in episodes if keep(episode)]

    one = episodes[0]
    refused = not all(accepted for accepted, _ in one["turns"])
    chosen = {"stop": one["stop"], "count": str(len(one["turns"])), "refusals": "with" if refused else "without"}
    same = {
        "stop": lambda episode: episode["stop"] == one["stop"],
        "count": lambda episode: len(episode["turns"]) == len(one["turns"]),
        "refusals": lambda episode: refused != all(accepted for accepted, _ in episode["turns"]),
    }
    for name, value in chosen.items():
        box = Select(browser.driver.find_element(By.CSS_SELECTOR, f"select[name={name}]"))
        box.select_by_value(value)
        assert listed() == tasks(same[name])
        box.select_by_value("")
    words = max((text for _, text in one["messages"]), key=len)[:30].upper()
    press(browser, "input[name=text]", words)
    found = tasks(lambda episode: any(words.lower() in text.lower() for _, text in episode["messages"]))
    assert listed() == found
    assert one["task"] in found
    press(browser, "input[name=text]", "no episode says this")
    assert listed() == []


def test_link_opens_an_episode_at_a_turn_in_every_view(browser: Browser, report: Path, episodes: list[dict]) -> None:
    """Contract: the address names the selected episode and turn and leads back to them; the arrow keys go from turn to turn."""
    linked = next(episode for episode in reversed(episodes) if len(episode["turns"]) > 1)
    address = f"{report.resolve().as_uri()}#episode={quote(linked['id'], safe='')}"
    marked = "return document.querySelector('.message.marked').dataset.turn"
    browser.open(f"{address}&turn=2")
    assert browser.run(TASK) == linked["task"]
    assert browser.run(marked) == "2"
    press(browser, ".content", Keys.ARROW_LEFT)
    assert browser.run(marked) == "1"
    assert browser.driver.current_url == f"{address}&turn=1"
    browser.run("document.querySelector('[data-turn=\"2\"] a').click()")
    wait(browser, lambda: browser.run(marked) == "2")
    browser.run("document.querySelector('[data-view=owner]').click()")
    first = "return Number(document.querySelector('.tokens .marked').dataset.token)"
    starts = [place for place, pair in enumerate(pairwise("0" + linked["owner"])) if pair[0] != "1" and pair[1] == "1"]
    assert browser.run(first) == starts[1]
    press(browser, ".content", Keys.SHIFT, Keys.ARROW_LEFT)
    assert browser.run(first) == starts[0]
    press(browser, ".list", Keys.HOME)
    assert browser.driver.current_url.endswith(f"#episode={quote(episodes[0]['id'], safe='')}")


def test_link_to_an_episode_shows_it_whatever_the_filters_or_says_that_it_is_absent(
    browser: Browser, report: Path, episodes: list[dict]
) -> None:
    browser.open(report)
    note = browser.driver.find_element(By.CSS_SELECTOR, ".missing")
    press(browser, "input[name=text]", "no episode says this")
    browser.run("location.hash = '#episode=none/0001'")
    wait(browser, note.is_displayed)
    assert "none/0001" in note.text
    browser.run("location.hash = '#episode=' + encodeURIComponent(arguments[0])", episodes[-1]["id"])
    wait(browser, lambda: not note.is_displayed())
    assert browser.run(SELECTED) == f"episode-{len(episodes) - 1}"


def test_first_tab_focuses_a_link_to_the_results(browser: Browser, report: Path) -> None:
    browser.open(report)
    browser.driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    skip = browser.driver.switch_to.active_element
    assert skip.get_attribute("class") == "skip"
    assert skip.location["x"] >= 0
    skip.send_keys(Keys.ENTER)
    assert browser.driver.current_url.endswith("#results")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_phone_layout_needs_no_horizontal_scrolling(browser: Browser, report: Path, dark: bool) -> None:
    """Contract: at 390 pixels nothing is wider than the screen, in any view of an episode and with all details open; the colours
    follow the reader's scheme."""
    browser.view(PHONE, dark=dark)
    browser.open(report)
    browser.run("document.querySelectorAll('details').forEach(item => item.open = true)")
    for view in ("chat", "owner", "logprob"):
        browser.run("document.querySelector(`[data-view=${arguments[0]}]`).click()", view)
        assert browser.run("return document.documentElement.scrollWidth") == PHONE[0]
    red = int(re.findall(r"\d+", browser.run("return getComputedStyle(document.body).backgroundColor"))[0])
    assert red < 40 if dark else red > 215


def test_figures_and_text_are_neither_shrunk_nor_cut(browser: Browser, report: Path) -> None:
    """Contract: what is too wide for the screen scrolls in its own frame."""
    browser.open(report)
    for size in (PHONE, DESK):
        browser.view(size)
        narrow = browser.run(
            "return [...document.querySelectorAll('figure svg')].filter(svg => svg.getBoundingClientRect().width < 250).length"
        )
        assert narrow == 0
        cut = browser.run(
            "return [...document.querySelectorAll('main p, main td, main h2, main h3, figcaption, .tile *')]"
            ".filter(item => !item.closest('.scroll, .panes') && item.getBoundingClientRect().right > innerWidth).length"
        )
        assert cut == 0


def test_search_tree_can_be_navigated_by_mouse_and_keyboard(browser: Browser, report: Path) -> None:
    """Contract: a reader can unfold nodes, see their numbers and go from a pair's winner to its loser."""
    browser.open(report)
    found = re.search(r'id="tree-data">(.*?)</script>', report.read_text(encoding="utf-8"), re.S)
    assert found is not None
    trees = json.loads(found[1])
    place = next(number for number, one in enumerate(trees) if one["pairs"])
    Select(browser.driver.find_element(By.CSS_SELECTOR, "select[name=tree]")).select_by_value(str(place))
    tree = trees[place]
    assert browser.driver.find_element(By.CSS_SELECTOR, ".summary").text == tree["summary"]
    rows = "return document.querySelectorAll('.outline .row').length"
    browser.run("document.querySelector('[data-unfold=all]').click()")
    assert browser.run(rows) == len(tree["nodes"])
    browser.run("document.querySelector('[data-unfold=path]').click()")
    assert browser.run("return document.querySelectorAll('.outline .row.way').length") == len(tree["path"])
    # Up to the start, fold it away, unfold it, and down to its first child.
    press(browser, ".outline", Keys.HOME, Keys.ARROW_LEFT)
    assert browser.run(rows) == 1
    press(browser, ".outline", Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    selected = browser.run("return document.querySelector('.outline [aria-selected=true]').dataset.node")
    assert selected == str(tree["path"][1])
    win = tree["pairs"][0][0]
    browser.run("document.querySelector('[data-unfold=all]').click()")
    browser.run("document.getElementById('tree-node-' + arguments[0]).click()", win)
    panel = browser.driver.find_element(By.CSS_SELECTOR, ".node")
    assert panel.find_element(By.CSS_SELECTOR, "h4").text == tree["nodes"][win]["action"]
    assert "preferred to" in panel.text
    panel.find_element(By.CSS_SELECTOR, ".pair .jump").click()
    chosen = int(browser.run(CHOSEN))
    assert [win, chosen] in [pair[:2] for pair in tree["pairs"]]
    assert "rejected for" in browser.driver.find_element(By.CSS_SELECTOR, ".node").text


def opening_s(browser: Browser, page: Path) -> float:
    """Processor seconds of a page's main thread until it is loaded, the least of three."""

    def used() -> float:
        found = browser.driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        return next(one["value"] for one in found if one["name"] == "TaskDuration")

    browser.driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    seconds = []
    for _ in range(3):
        browser.driver.get("about:blank")
        before = used()
        browser.open(page)
        after = used()
        seconds.append(after - before if after > before else after)  # a new process counts from zero
    return min(seconds)


def test_pages_of_the_default_run_open_within_a_second_and_stay_small(browser: Browser, report: Path) -> None:
    """Contract: below 3 MB and a second each: these pages' size and time, taken to the sizes of the default run's in the
    committed dvc.lock; the checkout's own may be of another run, or hold kept runs. Figures are laid out only when they come
    near, and nothing moves then."""
    viewer = report.parent / "episodes" / "index.html"
    committed = subprocess.run(["git", "show", "HEAD:dvc.lock"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    outputs = yaml.safe_load(committed)["stages"]["report"]["outs"]
    size = {one["path"]: one["size"] for one in outputs}
    times = {report: size["reports/report.html"] / report.stat().st_size}
    times[viewer] = size["reports/episodes"] / sum(path.stat().st_size for path in viewer.parent.iterdir())
    for page, factor in times.items():
        assert page.stat().st_size * max(1.0, factor) < 3_000_000
        assert 0.001 < opening_s(browser, page) * max(1.0, factor) < 1.0
    frames = "return [...document.querySelectorAll('.plot')].map(one => Math.round(one.getBoundingClientRect().height))"
    browser.open(report)
    before = browser.run(frames)
    assert len(before) > 20
    browser.lay_out_figures()
    assert browser.run(frames) == before
