"""Tasks of the shop domain: catalogues, recipes, the expert, demonstrations, panel and errors."""

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
from stages.environments.search.world import names_of
from stages.environments.shop import ShopDomain, ShopEnvironment, ShopSettings
from stages.environments.shop.catalogue import OPTIONS, Catalogue, make_catalogue
from stages.params import load_params
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def domain() -> ShopDomain:
    return ShopDomain()


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


def test_expert_gets_full_reward_by_the_shortest_path(domain: ShopDomain, folder: Path, tasks: list[Task]) -> None:
    environment = domain.make(folder)
    for task in tasks:
        assert play_expert(domain, environment, task) == (1.0, int(task.difficulty) + 3)


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
