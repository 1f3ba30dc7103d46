"""The viewer of all episodes in a real browser, opened from a folder without a server."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from screenshots.chromium import DESK, PHONE, Browser
from stages.reporting.viewer.pack import state_name

READY = "return document.querySelector('#view-episodes .count').dataset.ready === 'yes'"
SHOWN = "return document.querySelector('#view-episodes .content').dataset.ready"
LISTED = "return [...document.querySelectorAll('#view-episodes .list li')].length"
MARKED = "return document.querySelector('#view-episodes .message.marked')?.dataset.turn"


@pytest.fixture(scope="session")
def viewer(report: Path) -> Path:
    return report.parent / "episodes" / "index.html"


@pytest.fixture(scope="session")
def index(viewer: Path) -> dict[str, Any]:
    found = re.search(r'id="index">(.*?)</script>', viewer.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def entries(index: dict[str, Any]) -> list[dict[str, Any]]:
    """The index by episode."""
    found = []
    for group in index["groups"]:
        for place, short in enumerate(group["id"]):
            task = index["tasks"][group["domain"]][group["task"][place]]
            one = {name: group[name][place] for name in ("turns", "refused", "reward")}
            one |= {
                "domain": group["domain"],
                "source": group["source"],
                "task": task,
                "hits": group["hits"],
                "place": str(place),
            }
            one |= {"id": short[1:] if short[0] == "=" else task + short, "stop": group["stops"][group["stop"][place]]}
            found.append({**one, "outcome": index["outcomes"][int(group["outcome"][place])]})
    return found


def valued(viewer: Path, task: str, states: set[str]) -> dict[str, float]:
    """The learnt values of a task's states in search."""
    text = (viewer.parent / "values_search.js").read_text(encoding="utf-8")
    given = json.loads(text.removeprefix('viewer.valued("search", ').removesuffix(");\n"))
    return {state: given[state_name(task, state)] for state in states}


def wait(browser: Browser, true: Callable[[], Any]) -> None:
    WebDriverWait(browser.driver, 10).until(lambda _: true())


def visit(browser: Browser, viewer: Path, ready: str = SHOWN, **hash_: object) -> None:
    """Open the page at an address, and wait until the script `ready` returns something."""
    browser.driver.get("about:blank")
    browser.open(f"{viewer.resolve().as_uri()}#{'&'.join(f'{key}={quote(str(value))}' for key, value in hash_.items())}")
    wait(browser, lambda: browser.run(ready))


def address(browser: Browser) -> dict[str, str]:
    return {key: values[0] for key, values in parse_qs(urlsplit(browser.driver.current_url).fragment).items()}


def count(browser: Browser) -> int:
    wait(browser, lambda: browser.run(READY))
    return int(browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .count").text.split(" of ")[0])


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
    from reporting_run import DOMAINS

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


PAIR = "return document.querySelector('#view-compare .episode').dataset.ready"


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


GRAPH = "return document.querySelector('#view-paths .graph').dataset.ready"
CHOSEN = "return document.querySelector('#view-paths .graph').dataset.chosen"


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
