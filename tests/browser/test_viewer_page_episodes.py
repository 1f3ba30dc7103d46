"""The viewer's list of all episodes in a real browser: filters, text search, links, keyboard and tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from viewer_pages import SHOWN, address, count, entries, visit, wait

from screenshots.chromium import Browser

LISTED = "return [...document.querySelectorAll('#view-episodes .list li')].length"
MARKED = "return document.querySelector('#view-episodes .message.marked')?.dataset.turn"


def choose(browser: Browser, **values: str) -> None:
    for name, value in values.items():
        Select(browser.driver.find_element(By.CSS_SELECTOR, f"#view-episodes select[name={name}]")).select_by_value(value)


def type_into(browser: Browser, name: str, text: str) -> None:
    box = browser.driver.find_element(By.CSS_SELECTOR, f"#view-episodes input[name={name}]")
    box.clear()
    box.send_keys(text, Keys.TAB)


def test_report_leads_to_all_episodes(browser: Browser, report: Path, index: dict[str, Any]) -> None:
    browser.open(report)
    link = browser.driver.find_element(By.CSS_SELECTOR, "#episodes .more a")
    everyone = entries(index)
    assert link.text == f"All {len(everyone):,} episodes"
    browser.run("arguments[0].click()", link)
    wait(browser, lambda: browser.run(SHOWN))
    assert count(browser) == len(everyone)
    assert browser.run(LISTED) < len(everyone), "rows are drawn when they are needed"


def test_filters_of_the_index_show_exactly_the_matching_episodes(browser: Browser, viewer: Path, index: dict[str, Any]) -> None:
    visit(browser, viewer)
    everyone = entries(index)
    cases: list[tuple[dict[str, str], Callable[[dict[str, Any]], bool]]] = [
        ({"domain": "search"}, lambda one: one["domain"] == "search"),
        ({"source": "rl@search"}, lambda one: one["source"] == "rl@search"),
        ({"outcome": "truncated"}, lambda one: one["outcome"] == "truncated"),
        ({"stop": "turn_limit"}, lambda one: one["stop"] == "turn_limit"),
        ({"refused": "2"}, lambda one: one["refused"] >= 2),
        ({"refused": "0", "domain": "textworld"}, lambda one: one["refused"] == 0 and one["domain"] == "textworld"),
        ({"pattern": "loop"}, lambda one: one["place"] in one["hits"]["loop"]),
        ({"pattern": "ran_out", "source": "sft"}, lambda one: one["place"] in one["hits"]["ran_out"] and one["source"] == "sft"),
    ]
    for chosen, keep in cases:
        choose(browser, **chosen)
        wanted = sum(map(keep, everyone))
        assert count(browser) == wanted
        assert bool(wanted) or chosen == {"pattern": "loop"}
        browser.run("document.querySelector('#view-episodes [name=clear]').click()")
        assert count(browser) == len(everyone)
    type_into(browser, "turns_from", "3")
    type_into(browser, "turns_to", "4")
    assert count(browser) == sum(3 <= one["turns"] <= 4 for one in everyone)
    choose(browser, term="exact_match")
    type_into(browser, "term_from", "0.5")
    assert count(browser) == sum(3 <= one["turns"] <= 4 and one["reward"] >= 0.5 for one in everyone)


def test_text_search_reads_all_files_and_knows_regular_expressions(browser: Browser, viewer: Path, report: Path) -> None:
    """Contract: the text is searched in every message of every episode, whatever its source."""
    from reporting_documents import DOMAINS

    from stages.records.episode import read_rows

    data = report.parent.parent / "data"
    paths = [data / "evaluation" / "episodes.parquet"]
    paths += [
        data / folder / domain / name
        for domain in DOMAINS
        for folder, name in (("rollouts", "episodes.parquet"), ("rl", "samples.parquet"))
    ]
    rows = [row for path in paths for row in read_rows(path)]

    def saying(pattern: str) -> int:
        return sum(any(re.search(pattern, message["content"]) for message in row["messages"]) for row in rows)

    visit(browser, viewer)
    type_into(browser, "text", "PORT CALDER")
    wait(browser, lambda: count(browser) == saying("(?i)port calder"))
    type_into(browser, "text", "/^search (river|mayor)/")
    wait(browser, lambda: count(browser) == saying("^search (river|mayor)"))
    browser.run("document.querySelector('.shares').open = true")
    shares = {tuple(row.text.split(" ")[:2]) for row in browser.driver.find_elements(By.CSS_SELECTOR, ".shares tbody tr")}
    assert ("search", "merged") in shares
    type_into(browser, "text", "/(/")
    wait(browser, lambda: "not valid" in browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .count").text)
    type_into(browser, "text", "no episode says this")
    wait(browser, lambda: count(browser) == 0)
    assert "No episode matches" in browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .episode").text


def test_link_opens_an_episode_of_a_model_at_a_turn(browser: Browser, viewer: Path, index: dict[str, Any]) -> None:
    """Contract: all models play the same attempts, and a link names both; it opens whatever the filters."""
    chosen = next(one for one in entries(index) if one["source"] == "merged" and one["turns"] > 2)
    visit(browser, viewer, source="merged", episode=chosen["id"], turn=2)
    assert browser.run(SHOWN) == chosen["id"]
    assert browser.run(MARKED) == "2"
    assert "merged" in browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .facts").text
    assert address(browser)["turn"] == "2"
    visit(browser, viewer, source="merged", episode="none/0001")
    assert "There is no episode none/0001 of merged" in browser.driver.find_element(By.ID, "trouble").text
    visit(browser, viewer, domain="search", outcome="success")
    assert count(browser) == sum(one["domain"] == "search" and one["outcome"] == "success" for one in entries(index))


def test_keyboard_goes_by_episode_and_by_turn(browser: Browser, viewer: Path, index: dict[str, Any]) -> None:
    """Contract: everything can be reached without a mouse."""
    visit(browser, viewer)
    everyone, body = entries(index), browser.driver.find_element(By.TAG_NAME, "body")
    body.send_keys("jj")
    wait(browser, lambda: browser.run(SHOWN) == everyone[2]["id"])
    body.send_keys("k")
    wait(browser, lambda: browser.run(SHOWN) == everyone[1]["id"])
    body.send_keys("n", Keys.ARROW_RIGHT)
    assert browser.run(MARKED) == "2"
    body.send_keys("p")
    assert browser.run(MARKED) == "1"
    assert address(browser) == {**address(browser), "episode": everyone[1]["id"], "turn": "1"}
    body.send_keys("/")
    assert browser.run("return document.activeElement.name") == "text"
    box = browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .list")
    browser.run("arguments[0].focus()", box)
    box.send_keys(Keys.END)
    wait(browser, lambda: browser.run(SHOWN) == everyone[-1]["id"])
    assert browser.run(LISTED) == len(everyone)
    box.send_keys(Keys.HOME, Keys.ARROW_DOWN)
    wait(browser, lambda: browser.run(SHOWN) == everyone[1]["id"])
    first = browser.driver.find_element(By.ID, "tab-episodes")
    first.send_keys(Keys.ARROW_RIGHT)
    assert browser.run("return document.activeElement.id") == "tab-compare"
    wait(browser, browser.driver.find_element(By.ID, "view-compare").is_displayed)


def test_tokens_show_their_numbers(browser: Browser, viewer: Path, index: dict[str, Any]) -> None:
    chosen = next(
        one for one in entries(index) if (one["source"], one["domain"]) == ("rl step 20", "search") and one["turns"] > 1
    )
    visit(browser, viewer, source="rl step 20", episode=chosen["id"])
    browser.run("document.querySelector('#view-episodes [data-view=advantage]').click()")
    wait(browser, lambda: browser.driver.find_elements(By.CSS_SELECTOR, "#view-episodes .tokens span"))
    browser.driver.find_element(By.TAG_NAME, "body").send_keys("n")
    tip = browser.driver.find_element(By.CSS_SELECTOR, ".tip")
    wait(browser, tip.is_displayed)
    for text in ("policy, turn 1", "log-probability −" if "−" in tip.text else "log-probability -", "advantage"):
        assert text in tip.text
    # This domain's method credits steps: turn 2 was given a quarter.
    browser.driver.find_element(By.TAG_NAME, "body").send_keys("n")
    browser.run("document.querySelector('#view-episodes [data-view=credit]').click()")
    wait(browser, lambda: "Credit as RL gave it" in browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .key").text)
    wait(browser, lambda: re.search(r"turn 2\n(.*\n)*step credit -?0\.250", tip.text))
