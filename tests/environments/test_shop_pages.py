"""A hand-made shop: its pages, actions and states, the expert, and WebShop's reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.environments.search.index import SearchIndex
from stages.environments.shop import ShopDomain, ShopEnvironment, ShopSettings
from stages.environments.shop.catalogue import Catalogue, Goal, Item
from stages.environments.shop.environment import BOUGHT, NO_HIT, SEARCH_PAGE, USAGE, Shop
from stages.environments.shop.scoring import can_match, score, type_reward
from stages.records.task import Task

COLORS, MOTIFS = ("lime", "rose"), ("moon", "star")


def hand_item(name: str, kind: str, attributes: tuple[str, ...], price: int) -> Item:
    return Item(name, kind, attributes, {"color": COLORS, "motif": MOTIFS}, price)


CATALOGUE = Catalogue(
    (
        hand_item("Kelbas", "lamp", ("oak", "wax"), 71),
        hand_item("Dorvin", "lamp", ("oak", "wax"), 25),
        hand_item("Selmak", "lamp", ("oak", "tin"), 30),
        hand_item("Zorbon", "cup", ("oak", "wax"), 20),
    )
)
GOAL = Goal("lamp", ("oak", "wax"), {"color": "lime", "motif": "star"}, 60)
WANT = "want oak wax lamp, color lime, motif star, under 60."
PAGE = "Dorvin oak wax lamp 25. color lime rose. motif moon star."


def hand_task() -> Task:
    spec = {
        "shop": "hand",
        "goal": {"kind": "lamp", "attributes": ["oak", "wax"], "options": dict(GOAL.options), "price_upper": 60},
    }
    return Task("hand", "shop", "train", 0, GOAL.text, spec, 2.0)


def hand_shop(max_turns: int = 10, results: int = 2, show_goal: bool = True) -> ShopEnvironment:
    shop = Shop(CATALOGUE, SearchIndex(CATALOGUE.items))
    environment = ShopEnvironment(lambda name: shop, results, max_turns, show_goal=show_goal)
    environment.reset(hand_task())
    return environment


def test_episode_by_hand() -> None:
    """Search page, two result pages, an item, its options, buying: each observation, and the reward."""
    environment = hand_shop()
    expected = [
        ("search wax lamp, oak!", f"Kelbas oak wax lamp 71; Dorvin oak wax lamp 25. {WANT}"),
        ("click next", f"Selmak oak tin lamp 30; Zorbon oak wax cup 20. {WANT}"),
        ("click Zorbon", f"Zorbon oak wax cup 20. color lime rose. motif moon star. {WANT}"),
        ("click back", f"Selmak oak tin lamp 30; Zorbon oak wax cup 20. {WANT}"),
        ("click back", f"{SEARCH_PAGE} {WANT}"),
        ("search oak wax lamp", f"Kelbas oak wax lamp 71; Dorvin oak wax lamp 25. {WANT}"),
        ("CLICK  dorvin", f"{PAGE} {WANT}"),
        ("click star", f"Dorvin oak wax lamp 25. color lime rose. picked star. {WANT}"),
        ("click rose", f"Dorvin oak wax lamp 25. picked rose star. {WANT}"),
    ]
    for action, text in expected:
        step = environment.step(action)
        assert (step.observation.text, step.accepted, step.reward, step.done) == (text, True, 0.0, False)
    step = environment.step("click buy")
    assert (step.observation.text, step.terminated, step.truncated) == (BOUGHT, True, False)
    assert step.reward == pytest.approx((2 + 1 + 1) / 5)
    assert step.terms == pytest.approx({"reward": 0.8, "type": 1.0, "attributes": 1.0, "options": 0.5, "price": 1.0})
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("click buy")


def test_admissible_actions_depend_on_the_page() -> None:
    environment = hand_shop()
    for refused in ("click Dorvin", "click buy", "click back", "search", "search ?!", "buy", ""):
        step = environment.step(refused)
        assert (step.accepted, step.observation.text) == (False, f"{USAGE} {SEARCH_PAGE} {WANT}")
    assert environment.snapshot().turns == 7
    environment = hand_shop(results=4)
    environment.step("search oak")
    for refused in ("search oak", "click lime", "click buy", "click next", "click Kelmar"):
        assert not environment.step(refused).accepted
    assert environment.admissible() == ["click Dorvin", "click Kelbas", "click Selmak", "click Zorbon", "click back"]
    for action in ("click Dorvin", "click rose"):
        environment.step(action)
    assert environment.admissible() == ["click back", "click buy", "click moon", "click star"]
    assert hand_shop().step("search vase").observation.text == f"{NO_HIT} {WANT}"


@pytest.mark.parametrize(
    ("name", "picked", "expected"),
    [
        ("Dorvin", {"color": "lime", "motif": "star"}, 1.0),
        ("Kelbas", {"color": "lime", "motif": "star"}, 4 / 5),  # too expensive
        ("Selmak", {"color": "lime", "motif": "star"}, 4 / 5),  # one of two attributes
        ("Selmak", {"color": "rose"}, 2 / 5),
        ("Dorvin", {}, 3 / 5),
        ("Zorbon", {"color": "lime", "motif": "star"}, 0.0),  # wrong type: a cup
    ],
)
def test_webshop_reward_by_hand(name: str, picked: dict[str, str], expected: float) -> None:
    item = CATALOGUE.by_name[name.lower()]
    assert score(item, picked, GOAL)["reward"] == pytest.approx(expected)
    assert can_match(item, GOAL) == (name == "Dorvin")


def test_webshop_type_reward_by_hand() -> None:
    """r_type by the share of common words: none, below 0.1, at most 0.2 with and without the same query or category, above
    0.2."""
    wanted = list("abcdefghijkl")
    assert type_reward(["z"], wanted, True, True) == 0.0
    assert type_reward(["a"], wanted, True, True) == 0.1
    assert type_reward(["a"], wanted[:5], False, False) == 0.5
    assert type_reward(["a"], wanted[:5], True, False) == type_reward(["a"], wanted[:5], False, True) == 1.0
    assert type_reward(["a"], wanted[:4], False, False) == 1.0
    assert type_reward(["a"], [], False, False) == 0.5


def test_expert_recovers_from_wrong_turns() -> None:
    environment, domain = hand_shop(), ShopDomain()
    for action in ("search oak", "click next", "click Zorbon"):
        environment.step(action)
    actions = []
    while (action := domain.expert(environment)) is not None:
        actions.append(action)
        step = environment.step(action)
    assert actions[:2] == ["click back", "click back"]
    assert actions[2:] == ["search oak wax lamp", "click Dorvin", "click lime", "click star", "click buy"]
    assert step.reward == 1.0


def test_expert_opens_the_next_result_page() -> None:
    environment = hand_shop(results=1)
    environment.step("search oak wax lamp")
    assert ShopDomain().expert(environment) == "click next"


def test_turn_limit_truncates_unless_last_turn_buys() -> None:
    environment = hand_shop(max_turns=3)
    environment.step("search oak wax lamp")
    environment.step("click Dorvin")
    before = environment.snapshot()
    step = environment.step("click lime")
    assert (step.terminated, step.truncated, step.reward, step.terms["reward"]) == (False, True, 0.0, 0.0)
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("click buy")
    environment.restore(before)
    step = environment.step("click buy")
    assert (step.terminated, step.truncated, step.reward) == (True, False, pytest.approx(3 / 5))


def test_state_keys_are_canonical() -> None:
    """Contract: the order of options and of query words, refused actions and detours do not change the key; pages do."""
    keys = []
    for actions in (
        ["search oak wax lamp", "click Dorvin", "click lime", "click star"],
        [
            "search lamp WAX oak wax",
            "nonsense",
            "click Dorvin",
            "click moon",
            "click back",
            "click Dorvin",
            "click star",
            "click lime",
        ],
        ["search tin", "click back", "search wax oak lamp", "click next", "click back", "search oak lamp wax", "click Dorvin"],
    ):
        environment = hand_shop()
        for action in actions:
            environment.step(action)
        keys.append(environment.state_key())
    assert keys[0] == keys[1] == "hand#lamp oak wax|0|Dorvin|lime star|"
    assert keys[2] == "hand#lamp oak wax|0|Dorvin||"


def test_show_goal_and_instructions_settings_change_the_text(tmp_path: Path) -> None:
    domain = ShopDomain(ShopSettings(instructions=True))
    task = domain.build(list(domain.recipes(1, 0)), tmp_path, 1)[0]
    assert "search <words>" in task.prompt
    assert hand_shop(show_goal=False).step("search tin").observation.text == "Selmak oak tin lamp 30."
