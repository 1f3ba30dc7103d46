"""How environments draw their episodes in the viewer, from episodes written by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

from screenshots.chromium import PHONE, Browser
from stages.params import parse_params
from stages.reporting.inputs import load_inputs
from stages.reporting.viewer import folder
from stages.reporting.viewer.groups import Group

ROOT = Path(__file__).resolve().parents[2]
PLAYED: dict[str, tuple[str, list[tuple[str, str, bool]]]] = {
    "textworld": (
        "take the thing74 from the box70.\nyou are in the room60. there is an exit to the east.",
        [
            ("go east", "you are in the room67. there is a closed box70 here. there are exits to the north and west.", True),
            ("open box70", "you open the box70, revealing a thing74.", True),
            ("take thing74 from box70", "you take the thing74 from the box70.", True),
            ("go north", "you are in the room12. there is a thing31 on the floor. there is an exit to the south.", True),
        ],
    ),
    "keydoor": (
        "Find book. silk key Mirbas, book Melvin.\nyou are in Pelden. exits Pelkin.",
        [
            ("go Pelkin", "you are in Pelkin. exits Mirbas. back Pelden. Melvin needs silk key.", True),
            ("go Mirbas", "you are in Mirbas. back Pelkin. here is silk key.", True),
            ("take silk key", "taken. you are in Mirbas. back Pelkin. you hold silk key.", True),
        ],
    ),
    "wordle": (
        "letters hill fish goat tree jar star.",
        [
            ("hill fish goat", "hill not fish not goat in. from tree jar star with goat. open open open.", True),
            ("foo bar", "not a word. from tree jar star with goat. open open open.", False),
            ("goat jar tree", "solved.", True),
        ],
    ),
    "shop": (
        "want silk wax cup, crest wolf, under 40.",
        [
            ("search silk cup", "Korden silk wax cup 94; Dalris silk wax cup 23. want silk wax cup, crest wolf, under 40.", True),
            (
                "click Dalris",
                "Dalris silk wax cup 23. color coal mint. crest bee wolf. want silk wax cup, crest wolf, under 40.",
                True,
            ),
            (
                "click wolf",
                "Dalris silk wax cup 23. color coal mint. picked wolf. want silk wax cup, crest wolf, under 40.",
                True,
            ),
        ],
    ),
    "code": (
        "f(a): a, .upper(); f('fe') is 'FE'",
        [
            ("```python\ndef f(a):\n    return a\n```", "f('fe') is 'fe', not 'FE'", True),
            ("```python\ndef f(a):\n    return a.upper()\n```", "passed.", True),
        ],
    ),
}


def row(domain: str) -> dict[str, Any]:
    prompt, turns = PLAYED[domain]
    messages = [{"role": "user", "content": prompt}]
    steps = []
    for action, observation, accepted in turns:
        messages += [{"role": "assistant", "content": action}, {"role": "user", "content": observation}]
        step = {"action": action, "observation": observation, "accepted": accepted, "reward": 0.0, "cost": 1.0}
        steps.append({**step, "state_key": action, "action_key": action, "start": 0, "end": 0})
    tokens: dict[str, Any] = {"token_ids": [], "owner": [], "turn": [], "logprob": []}
    ends = {"reward": 1.0, "reward_terms": json.dumps({}), "terminated": True, "truncated": False, "stop_reason": "terminated"}
    names = {"episode_id": f"{domain}/0", "task_id": domain, "domain": domain, "policy_hash": "0", "messages": messages}
    return {**names, "turns": steps, **tokens, **ends}


def write(target: Path, run: Path, domains: list[str]) -> Path:
    """A viewer with one episode of each domain."""
    (params,) = (parse_params({"domains": domains, "per_domain": {domain: {} for domain in domains}}),)
    inputs = replace(load_inputs(run, parse_params({"domains": ["search"], "per_domain": {"search": {}}})), params=params)
    with folder.write_viewer(target, inputs, [Group(domain, "sft", "panel", [row(domain)]) for domain in domains], []):
        pass
    return target / "index.html"


@pytest.fixture(scope="module")
def drawn(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("drawn") / "episodes", report.parent.parent, list(PLAYED))


def pictures(browser: Browser, page: Path, domain: str) -> list[Any]:
    browser.driver.get("about:blank")
    browser.open(f"{page.resolve().as_uri()}#source=sft&episode={domain}%2F0")
    ready = f"return document.querySelector('#view-episodes .content').dataset.ready === '{domain}/0'"
    for script in (ready, "document.querySelector('#view-episodes [data-view=drawn]').click(); return true"):
        browser.driver.execute_async_script(
            "const done = arguments[1]; const check = new Function(arguments[0]);"
            "(function again() { if (check()) done(); else setTimeout(again, 20); })()",
            script,
        )
    return browser.driver.find_elements(By.CSS_SELECTOR, "#view-episodes .drawn .picture")


def texts(picture: Any, selector: str) -> list[str]:
    return [item.text for item in picture.find_elements(By.CSS_SELECTOR, selector)]


def test_textworld_is_a_map_by_compass(browser: Browser, drawn: Path) -> None:
    found = pictures(browser, drawn, "textworld")
    assert texts(found[0], ".room .name") == ["room60", "● room67"]
    assert texts(found[0], ".room .inside") == ["", "box70"] or texts(found[0], ".room .inside") == ["box70"]
    assert "holds thing74" in found[2].text
    last = found[3]
    assert [name.removeprefix("● ") for name in texts(last, ".room .name")] == ["room60", "room67", "room12"]
    boxes = last.find_elements(By.CSS_SELECTOR, ".room rect")
    west, middle, north = ([float(box.get_attribute(axis) or 0) for axis in ("x", "y")] for box in boxes)
    assert west[0] < middle[0] == north[0]
    assert north[1] < middle[1] == west[1]


def test_keydoor_is_a_map_with_rooms_that_were_not_entered(browser: Browser, drawn: Path) -> None:
    found = pictures(browser, drawn, "keydoor")
    assert texts(found[0], ".unseen .name") == ["Melvin", "Mirbas"] or sorted(texts(found[0], ".unseen .name")) == [
        "Melvin",
        "Mirbas",
    ]
    assert "needs silk key" in texts(found[0], ".unseen .inside")
    assert texts(found[2], ".here .name") == ["● Mirbas"]
    assert "holds silk key" in found[2].text


def test_wordle_is_a_board_with_signs_besides_colours(browser: Browser, drawn: Path) -> None:
    board = pictures(browser, drawn, "wordle")[-1]
    rows = [
        [tile.text.split("\n") for tile in line.find_elements(By.CSS_SELECTOR, ".tile")]
        for line in board.find_elements(By.CSS_SELECTOR, ".line")
    ]
    assert rows[0] == [["hill", "·"], ["fish", "·"], ["goat", "~"]]
    assert rows[1] == [["foo", "✗"], ["bar", "✗"]]
    assert rows[2] == [["goat", "✓"], ["jar", "✓"], ["tree", "✓"]]


def test_shop_is_the_page_with_prices_options_and_goal(browser: Browser, drawn: Path) -> None:
    hits, item, picked = pictures(browser, drawn, "shop")
    assert texts(hits, "li") == ["Korden silk wax cup 94", "Dalris silk wax cup 23"]
    assert texts(hits, ".goal") == ["want silk wax cup, crest wolf, under 40."]
    assert texts(item, ".chip") == ["coal", "mint", "bee", "wolf"]
    assert texts(picked, ".chip.picked") == ["wolf"]


def test_code_is_the_program_with_its_verdict_and_changes(browser: Browser, drawn: Path) -> None:
    first, second = pictures(browser, drawn, "code")
    assert texts(first, ".ending") == ["✗ f('fe') is 'fe', not 'FE'"]
    assert texts(second, ".ending") == ["✓ passed."]
    assert texts(second, ".changed") == ["+     return a.upper()"]


def test_pictures_fit_a_phone(browser: Browser, drawn: Path) -> None:
    """Contract: what is too wide scrolls in its own frame."""
    browser.view(PHONE, dark=True)
    for domain in PLAYED:
        assert pictures(browser, drawn, domain)
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]


def test_outside_environment_brings_its_own(
    browser: Browser, report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract: `renderer` of the domain's class is used; that of the tutorial's environment has at most 20 lines."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "courier"))
    from courier import CourierDomain  # type: ignore[import-not-found]

    script = CourierDomain.renderer
    assert len(script.strip().splitlines()) <= 20
    written = script.replace('"courier"', '"search"').replace("(\\d+) blocks", "(\\d+) blocks")
    monkeypatch.setattr(folder, "renderer", lambda domain: written)
    turns = [("east", "0 blocks east, 1 blocks north. Closed: east.", True), ("north", "Delivered.", True)]
    monkeypatch.setitem(PLAYED, "search", ("Bring the parcel.\n1 blocks east, 1 blocks north. Closed: north.", turns))
    found = pictures(browser, write(tmp_path / "episodes", report.parent.parent, ["search"]), "search")
    assert texts(found[0], ".room .name") == ["corner 1", "● corner 2", "door"]
    assert texts(found[1], ".here .name") == ["● door"]


def test_renderer_of_a_class_is_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages.environments.search import SearchDomain
    from stages.runtime.validation import ParamsError

    (tmp_path / "own.js").write_text("viewer.renderer('search', {});")
    for given in (tmp_path / "own.js", "viewer.renderer('search', {});"):
        monkeypatch.setattr(SearchDomain, "renderer", given, raising=False)
        assert folder.renderer("search") == "viewer.renderer('search', {});"
    monkeypatch.setattr(SearchDomain, "renderer", tmp_path / "none.js", raising=False)
    with pytest.raises(ParamsError, match=r"domain 'search': its renderer .*none\.js can't be read"):
        folder.renderer("search")
    assert folder.inline("'</script><!--'") == "'<\\/script><\\!--'"
    assert folder.renderer("code_folder") == folder.renderer("code") is not None
