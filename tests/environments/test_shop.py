"""The shop domain: catalogues, pages, WebShop's reward, recipes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from stages.curation.__main__ import configured_domain
from stages.curation.demonstrations import EXPERT, NOISY, DemonstrationPlan, demonstrate
from stages.curation.panel import make_panel
from stages.curation.settings import Curate
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.environments.search.index import SearchIndex
from stages.environments.search.world import names_of
from stages.environments.shop import ShopDomain, ShopEnvironment, ShopSettings
from stages.environments.shop.catalogue import OPTIONS, Catalogue, Goal, Item, make_catalogue
from stages.environments.shop.environment import BOUGHT, NO_HIT, SEARCH_PAGE, USAGE, Shop
from stages.environments.shop.scoring import can_match, score, type_reward
from stages.params import load_params
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture(scope="module")
def domain() -> ShopDomain:
    return ShopDomain()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def tasks(domain: ShopDomain, folder: Path) -> list[Task]:
    return domain.build(list(domain.recipes(104, 3)), folder, 1)


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


def play_expert(domain: ShopDomain, environment: ShopEnvironment, task: Task) -> tuple[float, int]:
    environment.reset(task)
    turns = 0
    while (action := domain.expert(environment)) is not None:
        assert action in environment.admissible()
        step = environment.step(action)
        turns += 1
    return step.reward, turns


def test_implements_domain_and_environment_protocols(domain: ShopDomain, folder: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(folder), Environment)
    assert load_domain("shop", {"results": 5}).settings == ShopSettings(results=5)


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


def test_expert_gets_full_reward_by_the_shortest_path(domain: ShopDomain, folder: Path, tasks: list[Task]) -> None:
    environment = domain.make(folder)
    for task in tasks:
        assert play_expert(domain, environment, task) == (1.0, int(task.difficulty) + 3)


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


def test_restored_snapshot_continues_identically(domain: ShopDomain, folder: Path, tasks: list[Task]) -> None:
    task = next(task for task in tasks if task.difficulty == 2)
    environment, other = domain.make(folder), domain.make(folder)
    environment.reset(task)
    for _ in range(3):
        environment.step(domain.expert(environment))
    state, key = environment.snapshot(), environment.state_key()
    actions = ("nonsense", domain.expert(environment), "click buy")
    first = [environment.step(action) for action in actions]
    other.reset(task)
    other.restore(state)
    assert other.state_key() == key
    assert [other.step(action) for action in actions] == first
    environment.reset(tasks[0])
    with pytest.raises(ValueError, match="can't be restored"):
        environment.restore(state)


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


def test_catalogues_are_deterministic_and_well_formed() -> None:
    for number in range(20):
        catalogue = make_catalogue("test", number)
        assert {item.name for item in catalogue.items} <= set(names_of("test"))
        assert len({item.name for item in catalogue.items}) == len(catalogue.items)
        assert 12 <= len(catalogue.items) <= 24
        assert len({(item.kind, item.attributes, item.price) for item in catalogue.items}) == len(catalogue.items)
        assert all(set(item.options[group]) <= set(values) for item in catalogue.items for group, values in OPTIONS.items())
        assert Catalogue.from_json(catalogue.to_json()) == catalogue == make_catalogue("test", number)
    assert make_catalogue("test", 1) != make_catalogue("test", 2)


def test_option_values_belong_to_one_group() -> None:
    values = [value for group in OPTIONS.values() for value in group]
    assert len(set(values)) == len(values)


def test_first_search_result_is_often_wrong(domain: ShopDomain, tmp_path: Path) -> None:
    """Contract: on the shipped panel attributes alone do not identify the item, so that the price matters."""
    lines = (ROOT / "data/raw/shop.jsonl").read_text(encoding="utf-8").splitlines()
    test = [task for task in domain.build([json.loads(line) for line in lines], tmp_path, 1) if task.split == "test"]
    environment, right = domain.make(tmp_path), 0
    for task in test:
        environment.reset(task)
        environment.step(domain.expert(environment))
        right += domain.expert(environment) == f"click {environment._listed()[0].name}"
    assert 0.4 < right / len(test) < 0.8


def test_recipes_keep_shops_in_one_split_and_mix_options(domain: ShopDomain) -> None:
    records = list(domain.recipes(416, 7))
    assert Counter(record["split"] for record in records) == {"train": 192, "valid": 24, "test": 200}
    assert len({(record["split"], record["shop"]) for record in records}) == 52
    assert Counter(domain.record_difficulty(record) for record in records) == {1: 104, 2: 208, 3: 104}
    assert len({record["task_id"] for record in records}) == 416
    assert set().union(*map(domain.record_kinds, records)) == domain.recipe_kinds()
    only_two = ShopDomain(ShopSettings(options={2: 1.0})).recipes(8, 0)
    assert {len(record["options"]) for record in only_two} == {2}


def test_train_and_test_share_no_entities(domain: ShopDomain, tasks: list[Task]) -> None:
    names = [set().union(*(domain.entities(task) for task in tasks if task.split == split)) for split in SPLITS]
    assert all(names)
    assert not names[0] & names[1]
    assert not names[2] & (names[0] | names[1])


def test_noisy_demonstrations_recover(domain: ShopDomain, folder: Path, tasks: list[Task]) -> None:
    """Contract: every task has an expert demonstration, and most also a noisy one that still gets the full reward."""
    environment, plan = domain.make(folder), DemonstrationPlan(Curate(), seed=0, max_length=640)
    made = [demonstrate(domain, environment, task, plan).episodes for task in tasks[:40]]
    assert all(episode.success for episodes in made for episode in episodes)
    kinds = Counter(episode.policy_hash for episodes in made for episode in episodes)
    assert kinds[EXPERT] == 40
    assert kinds[NOISY] >= 30


def test_longest_demonstration_fits_max_length(domain: ShopDomain, folder: Path, tasks: list[Task]) -> None:
    """Contract: the longest episode under the default settings, page after page of an item, fits model.max_length."""
    from transformers import AutoTokenizer

    params = load_params(ROOT / "params.yaml")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / params.model.path)
    environment = domain.make(folder)
    for task in [task for task in tasks if task.difficulty == 3][:8]:
        environment.reset(task)
        texts, turn, done = [task.prompt], 0, False
        while not done:
            action = "click back" if turn > 1 and turn % 2 == 0 else domain.expert(environment)
            step = environment.step(action)
            texts += [action, step.observation.text]
            turn, done = turn + 1, step.done
        assert step.truncated
        assert 100 < sum(len(tokenizer(text)["input_ids"]) + 2 for text in texts) <= params.model.max_length


def test_panel_hash_covers_catalogues_and_settings(domain: ShopDomain, tmp_path: Path) -> None:
    """Contract: of the catalogues, it covers those in which test tasks are played."""
    records = list(domain.recipes(104, 0))
    tasks = domain.build(records, tmp_path, 1)
    panel = make_panel(domain, tasks, tmp_path)
    assert panel.hash == make_panel(domain, domain.build(records, tmp_path, 1), tmp_path).hash
    assert len(panel.worlds) < len(list(tmp_path.iterdir()))
    file = tmp_path / next(iter(panel.worlds))
    file.write_text(file.read_text().replace('"price": 1', '"price": 2', 1))
    changed = make_panel(domain, tasks, tmp_path).hash
    longer = ShopDomain(ShopSettings(max_turns=12))
    assert len({panel.hash, changed, make_panel(longer, longer.build(records, tmp_path, 1), tmp_path).hash}) == 3


def test_shipped_records_equal_recipes() -> None:
    domain = configured_domain("shop", load_params(ROOT / "params.yaml"))
    lines = (ROOT / "data/raw/shop.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert records == list(domain.recipes(len(records), 0))
    for record in records:
        domain.check(record)


def test_build_writes_same_bytes(domain: ShopDomain, tmp_path: Path) -> None:
    records = list(domain.recipes(24, 5))
    built = [domain.build(records, tmp_path / name, 1) for name in "ab"]
    assert built[0] == built[1]
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1]
    assert len(files[0]) == 3


def test_show_goal_and_instructions_settings_change_the_text(tmp_path: Path) -> None:
    domain = ShopDomain(ShopSettings(instructions=True))
    task = domain.build(list(domain.recipes(1, 0)), tmp_path, 1)[0]
    assert "search <words>" in task.prompt
    assert hand_shop(show_goal=False).step("search tin").observation.text == "Selmak oak tin lamp 30."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "boat"}, "'kind' must be one of"),
        ({"attributes": []}, "'attributes' must be some of"),
        ({"attributes": ["cheap"]}, "'attributes' must be some of"),
        ({"options": {"color": "moon"}}, "'options' must hold"),
        ({"options": {"size": "12"}}, "'options' must hold"),
        ({"shop": "x"}, "'shop' must be int"),
        ({"extra": 1}, "unknown keys"),
        ({"split": "dev"}, "'split' must be one of"),
        ({"task_id": ""}, "'task_id' is empty"),
    ],
)
def test_check_error_names_the_problem(domain: ShopDomain, change: dict, message: str) -> None:
    record = next(domain.recipes(1, 0))
    with pytest.raises(ValueError, match=message):
        domain.check({**record, **change})


def test_unsatisfiable_goal_error_names_the_record(domain: ShopDomain, tmp_path: Path) -> None:
    record = next(domain.recipes(1, 0))
    with pytest.raises(ValueError, match=f"record {record['task_id']}: no item of its shop"):
        domain.build([{**record, "price_upper": 5}], tmp_path, 1)


def test_invalid_settings_and_file_errors_say_what_to_do(domain: ShopDomain, tmp_path: Path, tasks: list[Task]) -> None:
    for settings, message in (
        ({"results": 0}, "results"),
        ({"options": {1: 0}}, "at least one weight"),
        ({"options": {9: 1}}, "opt"),
    ):
        with pytest.raises(ValueError, match=message):
            load_domain("shop", settings)
    with pytest.raises(FileNotFoundError, match="run the curate stage"):
        domain.make(tmp_path).reset(tasks[0])
    (tmp_path / f"{tasks[0].spec['shop']}.json").write_text("[{", encoding="utf-8")
    with pytest.raises(ValueError, match="run the curate stage"):
        ShopDomain().make(tmp_path).reset(tasks[0])
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).step("search x")
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).snapshot()
