"""Two models in the viewer in a real browser: side by side, by pattern, and as paths through a task."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select
from viewer_pages import GRAPH, PAIR, SHOWN, address, count, entries, visit, wait

from screenshots.chromium import Browser
from stages.reporting.viewer.pack import state_name

CHOSEN = "return document.querySelector('#view-paths .graph').dataset.chosen"


def valued(viewer: Path, task: str, states: set[str]) -> dict[str, float]:
    """The learnt values of a task's states in search."""
    text = (viewer.parent / "values_search.js").read_text(encoding="utf-8")
    given = json.loads(text.removeprefix('viewer.valued("search", ').removesuffix(");\n"))
    return {state: given[state_name(task, state)] for state in states}


def pairs(index: dict[str, Any], domain: str, a: str, b: str) -> dict[str, list[tuple[str, int]]]:
    """Change from `a` to `b` -> (task, attempt) in the order of the list."""
    found: dict[str, list[tuple[str, int]]] = {"lost": [], "won": [], "both": [], "neither": []}
    outcomes = {}
    for one in entries(index):
        if one["domain"] == domain and one["source"] in (a, b):
            attempt = int(one["id"][-4:]) + 1
            outcomes[one["source"], one["task"], attempt] = one["outcome"] == "success"
    for source, task, attempt in outcomes:
        if source == a:
            change = {(1, 0): "lost", (0, 1): "won", (1, 1): "both", (0, 0): "neither"}
            found[change[outcomes[a, task, attempt], outcomes[b, task, attempt]]].append((task, attempt))
    return found


def test_two_models_side_by_side_are_sorted_by_what_changed(browser: Browser, viewer: Path, index: dict[str, Any]) -> None:
    """Contract: lost attempts come first, then won ones; the counts are those of the evaluation's rows."""
    wanted = pairs(index, "search", "sft", "merged")
    visit(browser, viewer, tab="compare", domain="search", a="sft", b="merged", ready=PAIR)
    counts = re.findall(r"\d+", browser.driver.find_element(By.CSS_SELECTOR, "#view-compare .count").text)
    assert list(map(int, counts)) == [*map(len, wanted.values()), 80, 40]
    listed = [item.text for item in browser.driver.find_elements(By.CSS_SELECTOR, "#view-compare .list .task")]
    assert listed == [f"{task}, attempt {attempt}" for change in wanted.values() for task, attempt in change]
    assert (
        "merged minus sft, paired by task: +24.0 points"
        in browser.driver.find_element(By.CSS_SELECTOR, "#view-compare .verdict").text
    )
    # Each turn has its log-probability, the state's learnt value and the step credit, by which actions can be coloured.
    Select(browser.driver.find_element(By.CSS_SELECTOR, "#view-compare select[name=tint]")).select_by_value("credit")
    wait(browser, lambda: browser.run(PAIR) and browser.driver.find_elements(By.CSS_SELECTOR, "#view-compare .tokens span"))
    said = browser.driver.find_element(By.CSS_SELECTOR, "#view-compare .cell .fine").text
    assert re.search(r"log-probability −[\d.]+ .*, learnt value -?[\d.]+, step credit [+−][\d.]+", said)
    assert browser.driver.find_elements(By.CSS_SELECTOR, "#view-compare .tokens span[style*='--tint']")
    Select(browser.driver.find_element(By.CSS_SELECTOR, "#view-compare select[name=change]")).select_by_value("won")
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, "#view-compare .list li")) == len(wanted["won"])
    browser.run("document.querySelector('#view-compare [name=swap]').click()")
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, "#view-compare .list li")) == len(wanted["lost"])
    assert address(browser)["a"] == "merged"


def test_first_divergence_is_marked(browser: Browser, viewer: Path, report: Path, index: dict[str, Any]) -> None:
    """Contract: the mark is at the first turn in which action or result differ; the keyboard goes to it and to each turn."""
    from stages.evaluation.stored_episodes import played_groups

    rows = dict(played_groups(report.parent.parent / "data/evaluation/episodes.parquet", "search", ["sft", "merged"]))
    played = {(model, row["task_id"], row["attempt"] + 1): row["turns"] for model, found in rows.items() for row in found}

    def apart(task: str, attempt: int) -> int | None:
        a, b = ([(turn["action"], turn["observation"]) for turn in played[model, task, attempt]] for model in ("sft", "merged"))
        differ = [number for number in range(max(len(a), len(b))) if a[number : number + 1] != b[number : number + 1]]
        return differ[0] + 1 if differ else None

    marked = "return document.querySelector('#view-compare .row.apart')?.dataset.turn"
    seen = set()
    for task, attempt in [pair for change in pairs(index, "search", "sft", "merged").values() for pair in change[:4]]:
        visit(browser, viewer, tab="compare", domain="search", a="sft", b="merged", task=task, attempt=attempt, ready=PAIR)
        assert browser.run(PAIR) == f"{task}#{attempt}"
        wanted = apart(task, attempt)
        assert browser.run(marked) == (None if wanted is None else str(wanted))
        seen.add(wanted)
        if wanted is not None:
            browser.driver.find_element(By.TAG_NAME, "body").send_keys("d")
            assert address(browser)["turn"] == str(wanted)
    assert len(seen) > 2
    assert None in seen


def test_pattern_leads_from_its_share_to_its_episodes(browser: Browser, viewer: Path, index: dict[str, Any]) -> None:
    visit(
        browser, viewer, tab="patterns", domain="search", ready="return Boolean(document.querySelector('#view-patterns table'))"
    )
    wanted = [one for one in entries(index) if one["domain"] == "search" and one["place"] in one["hits"]["ran_out"]]
    links = browser.driver.find_elements(By.CSS_SELECTOR, "#view-patterns a[href*='pattern=ran_out']")
    shown = {parse_qs(urlsplit(link.get_attribute("href") or "").fragment)["source"][0]: link.text for link in links}
    merged = [one for one in wanted if one["source"] == "merged"]
    assert shown["merged"] == f"{len(merged)} of 80"
    browser.run("arguments[0].click()", next(link for link in links if "source=merged&" in f"{link.get_attribute('href')}&"))
    wait(browser, lambda: browser.run(SHOWN) == merged[0]["id"])
    assert count(browser) == len(merged)
    assert "Cut by a limit" in browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .found").text


def test_graph_of_a_task_has_every_state_action_and_end(browser: Browser, viewer: Path, report: Path) -> None:
    """Contract: visits are those of the episodes, by side; the table has what the picture shows; the keyboard goes through it."""
    from stages.evaluation.stored_episodes import played_groups

    task = "search-test-0001"
    rows = dict(played_groups(report.parent.parent / "data/evaluation/episodes.parquet", "search", ["sft", "merged"]))
    steps: dict[tuple[str, str], list[int]] = {}
    rewards: dict[tuple[str, str], list[float]] = {}
    for side, model in enumerate(("sft", "merged")):
        for row in (row for row in rows[model] if row["task_id"] == task):
            end = "success" if row["reward"] else "truncated" if row["truncated"] else "failure"
            states = [turn["state_key"] for turn in row["turns"]] + [end]
            for turn, to in zip(row["turns"], states[1:], strict=True):
                key = (f"{turn['state_key']} {turn['action']}", to)
                steps.setdefault(key, [0, 0])[side] += 1
                rewards.setdefault(key, []).append(turn["reward"])
    visit(browser, viewer, tab="paths", domain="search", a="sft", b="merged", task=task, ready=GRAPH)
    assert browser.run(GRAPH) == task
    browser.run("document.querySelector('#view-paths details').open = true")
    table = [
        [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
        for row in browser.driver.find_elements(By.CSS_SELECTOR, "#view-paths .outline-text tbody tr")
    ]
    assert sorted([int(row[3]), int(row[4])] for row in table) == sorted(steps.values())
    assert {row[1] for row in table} == {key.partition(" ")[2] for key, _ in steps}
    # The learnt value of the state that a step leads to, and its credit: the reward plus the change of the value.
    known = valued(viewer, task, {key.partition(" ")[0] for key, _ in steps})
    wanted = [
        (known.get(to), sum(paid) / len(paid) + known.get(to, 0.0) - known[key.partition(" ")[0]])
        for (key, to), paid in rewards.items()
    ]
    shown = [(None if row[7] == "–" else float(row[7]), float(row[8].replace("−", "-"))) for row in table]
    for place in (0, 1):
        numbers = [sorted(pair[place] for pair in pairs if pair[place] is not None) for pairs in (shown, wanted)]
        assert numbers[0] == pytest.approx(numbers[1], abs=0.0051)
    states = {key.partition(" ")[0] for key, _ in steps} | {to for _, to in steps}
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, "#view-paths .state")) == len(states)
    pairs = {(key.partition(" ")[0], to) for key, to in steps}
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, "#view-paths .graph .edge")) == len(pairs)
    frame = browser.driver.find_element(By.CSS_SELECTOR, "#view-paths .graph")
    browser.run("arguments[0].focus()", frame)
    start = browser.run(CHOSEN)
    frame.send_keys(Keys.ARROW_RIGHT)
    assert browser.run(CHOSEN) != start
    frame.send_keys(Keys.ARROW_LEFT)
    assert browser.run(CHOSEN) == start
    link = browser.driver.find_element(By.CSS_SELECTOR, "#view-paths .node a")
    browser.run("arguments[0].click()", link)
    wait(browser, lambda: browser.run(SHOWN) == f"{task}/0000")


def test_paths_list_first_the_tasks_whose_success_differs_most(browser: Browser, viewer: Path, index: dict[str, Any]) -> None:
    visit(browser, viewer, tab="paths", domain="search", a="sft", b="merged", ready=GRAPH)
    solved: dict[str, list[int]] = {}
    for one in entries(index):
        if one["domain"] == "search" and one["source"] in ("sft", "merged"):
            solved.setdefault(one["task"], [0, 0])[one["source"] == "merged"] += one["outcome"] == "success"
    listed = [
        option.get_attribute("value")
        for option in browser.driver.find_elements(By.CSS_SELECTOR, "#view-paths [name=task] option")
    ]
    gains = [abs(solved[str(task)][1] - solved[str(task)][0]) for task in listed]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) == 40
    body = browser.driver.find_element(By.TAG_NAME, "body")
    body.send_keys("j")
    wait(browser, lambda: browser.run(GRAPH) == listed[1])
    assert address(browser)["task"] == listed[1]


def test_paths_of_a_training_task_choose_sources_that_play_it(browser: Browser, viewer: Path) -> None:
    visit(browser, viewer, tab="paths", domain="search", task="search-train-0002", ready=GRAPH)
    values = browser.run("const form = document.querySelector('#view-paths form').elements; return [form.a.value, form.b.value]")
    assert values == ["sft rollout", "rl step 1"]
