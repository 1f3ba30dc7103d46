"""The viewer shows who spoke: roles in the list, in a filter and in the conversation, and the others of a play."""

from __future__ import annotations

from pathlib import Path

import pytest
from role_episodes import spoken, team_rows
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select
from viewer_pages import SHOWN, address, count, visit, wait

from screenshots.chromium import Browser
from stages.params import parse_params
from stages.reporting.episodes import browser_data
from stages.reporting.inputs import load_inputs
from stages.reporting.page import render_page
from stages.reporting.viewer.folder import write_viewer
from stages.reporting.viewer.groups import Group

FILTER = "#view-episodes select[name=role]"


@pytest.fixture(scope="module")
def page(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two plays of a team in each of two steps, and an episode without a role."""
    target = tmp_path_factory.mktemp("roles") / "episodes"
    inputs = load_inputs(report.parent.parent, parse_params({"domains": ["search"], "per_domain": {"search": {}}}))
    rows = [*team_rows("t/0"), *team_rows("t/1")]
    groups = [Group("search", f"rl step {step}", "training", rows) for step in (1, 20)]
    alone = {**spoken("t/0", "", ["answer y"], 1.0), "task_id": "t"}
    with write_viewer(target, inputs, [*groups, Group("search", "sft rollout", "rollout", [alone])], []):
        pass
    return target / "index.html"


def headings(browser: Browser) -> list[str]:
    found = browser.driver.find_elements(By.CSS_SELECTOR, "#view-episodes .message.assistant b")
    return [heading.text.partition(" of the play")[0] for heading in found]


def test_roles_are_shown_filtered_and_lead_to_the_others_of_the_play(browser: Browser, page: Path) -> None:
    visit(browser, page, source="rl step 1", episode="t/0")
    assert headings(browser) == ["policy (solver), turn 1, move 2", "policy (solver), turn 2, move 4"]
    role = Select(browser.driver.find_element(By.CSS_SELECTOR, FILTER))
    assert [option.text for option in role.options] == ["all", "planner", "solver"]
    listed = browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .list li[aria-selected=true]").text
    assert "rl step 1, solver, 2 turns" in listed
    facts = browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .facts")
    assert "role solver" in facts.text
    browser.run("arguments[0].click()", facts.find_element(By.LINK_TEXT, "planner"))
    wait(browser, lambda: browser.run(SHOWN) == "t/0/planner")
    assert headings(browser) == ["policy (planner), turn 1, move 1", "policy (planner), turn 2, move 3"]
    role.select_by_value("planner")
    assert count(browser) == 4
    assert address(browser)["role"] == "planner"
    visit(browser, page, source="sft rollout", episode="t/0")
    assert headings(browser)[0].startswith("policy, turn 1")
    assert "role" not in browser.driver.find_element(By.CSS_SELECTOR, "#view-episodes .facts").text


def test_members_pair_with_themselves_and_acting_ones_with_a_single_agent(browser: Browser, page: Path) -> None:
    """Attempts are counted by member, so that the acting one's first attempt is compared with the single agent's."""
    visit(browser, page)
    script = (
        "const [a, b] = Array.from(arguments, (name) => viewer.index.groups.find((group) => group.source === name));"
        "return a.entries.filter((entry) => b.byPair[entry.pair]).map((entry) => [entry.id, b.byPair[entry.pair].id])"
    )
    pairs = {other: browser.run(script, "rl step 1", other) for other in ("rl step 20", "sft rollout")}
    own = ["t/0", "t/0/planner", "t/1", "t/1/planner"]
    assert sorted(pairs["rl step 20"]) == [[name, name] for name in own]
    assert pairs["sft rollout"] == [["t/0", "t/0"]]


def test_the_reports_own_episodes_name_the_role(browser: Browser, report: Path, tmp_path: Path) -> None:
    inputs = load_inputs(report.parent.parent, parse_params({"domains": ["search"], "per_domain": {"search": {}}}))
    data = browser_data({"search": {"rl step 1": team_rows()}}, 2, inputs.tokenizer, 0)
    (tmp_path / "page.html").write_text(render_page(inputs, [], [], data), encoding="utf-8")
    browser.open(f"{(tmp_path / 'page.html').as_uri()}#episode=t%2F0%2Fplanner")
    found = browser.driver.find_elements(By.CSS_SELECTOR, "#browser .message.assistant b")
    assert [heading.text for heading in found] == ["policy (planner), turn 1", "policy (planner), turn 2"]
    assert "role planner" in browser.driver.find_element(By.CSS_SELECTOR, "#browser .facts").text
    listed = browser.driver.find_elements(By.CSS_SELECTOR, "#browser .list li")
    assert {item.text.split(", ")[2] for item in listed} == {"planner", "solver"}


def test_without_roles_there_is_no_filter(browser: Browser, viewer: Path) -> None:
    visit(browser, viewer)
    assert not browser.driver.find_element(By.CSS_SELECTOR, FILTER).is_displayed()
    found = browser.driver.find_elements(By.CSS_SELECTOR, "#view-episodes .message.assistant b")
    assert all(heading.text.startswith("policy, turn") for heading in found)
