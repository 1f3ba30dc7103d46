"""Tasks of the keydoor domain: worlds, recipes, demonstrations, panel, prompts and errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from keydoor_worlds import LEVELS

from stages.curation.__main__ import configured_domain
from stages.curation.demonstrations import EXPERT, NOISY, DemonstrationPlan, demonstrate
from stages.curation.panel import make_panel
from stages.curation.settings import Curate
from stages.environments.keydoor import KeydoorDomain, KeydoorSettings, Level
from stages.environments.keydoor.settings import WeightedLevel
from stages.environments.keydoor.world import World, make_world
from stages.environments.registry import load_domain
from stages.environments.search.world import names_of
from stages.params import load_params
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def domain() -> KeydoorDomain:
    return KeydoorDomain(KeydoorSettings(levels=LEVELS))


@pytest.mark.parametrize("level", LEVELS)
def test_worlds_have_the_size_of_their_level(level: WeightedLevel) -> None:
    for seed in range(20):
        world = make_world("test", level, seed)
        assert {world.start, *world.back} <= set(names_of("test"))
        assert len({world.start, *world.back}) == level.rooms
        assert len(set(world.contents.values())) == len(world.contents) == level.keys + 1
        assert world.distances[world.initial()] == level.solution_length
        assert set(world.distances) == set(world.states), "every state can still be won"
        assert World.from_spec(json.loads(json.dumps(world.to_spec()))) == world == make_world("test", level, seed)


def test_recipes_mix_levels_and_keep_split_proportions(domain: KeydoorDomain) -> None:
    records = list(domain.recipes(520, 7))
    assert Counter(record["split"] for record in records) == {"train": 240, "valid": 30, "test": 250}
    shares = Counter(domain.record_difficulty(record) for record in records)
    assert set(shares) == set(domain.difficulty_weights()) == {3.0, 6.0, 13.0, 10.0}
    assert max(shares.values()) - min(shares.values()) <= 3
    assert len({record["seed"] for record in records}) == len({record["task_id"] for record in records}) == 520
    assert set().union(*map(domain.record_kinds, records)) == domain.recipe_kinds()


def test_train_and_test_share_no_entities(domain: KeydoorDomain, tasks: list[Task]) -> None:
    names = [set().union(*(domain.entities(task) for task in tasks if task.split == split)) for split in SPLITS]
    assert all(names)
    assert not names[0] & names[1]
    assert not names[2] & (names[0] | names[1])


def test_noisy_demonstrations_recover(tasks: list[Task], tmp_path: Path) -> None:
    """Contract: every task has an expert demonstration, and nearly every one also a noisy one that still wins."""
    domain = KeydoorDomain(KeydoorSettings(levels=LEVELS))
    environment, plan = domain.make(tmp_path), DemonstrationPlan(Curate(), seed=0, max_length=640)
    made = [demonstrate(domain, environment, task, plan).episodes for task in tasks[:40]]
    assert all(episode.success for episodes in made for episode in episodes)
    kinds = Counter(episode.policy_hash for episodes in made for episode in episodes)
    assert kinds[EXPERT] == 40
    assert kinds[NOISY] >= 35


def test_panel_hash_covers_worlds_and_settings(domain: KeydoorDomain, tmp_path: Path) -> None:
    records = list(domain.recipes(52, 0))
    panels = [make_panel(domain, domain.build(records, tmp_path, 1), tmp_path) for _ in range(2)]
    assert panels[0].hash == panels[1].hash
    assert len(panels[0].tasks) == 25
    changed = [{**record, "seed": record["seed"] + (record["split"] == "test")} for record in records]
    assert make_panel(domain, domain.build(changed, tmp_path, 1), tmp_path).hash != panels[0].hash
    longer = KeydoorDomain(KeydoorSettings(levels=LEVELS, max_turns=20))
    assert make_panel(longer, longer.build(records, tmp_path, 1), tmp_path).hash != panels[0].hash


def test_shipped_records_equal_recipes() -> None:
    domain = configured_domain("keydoor", load_params(ROOT / "params.yaml"))
    lines = (ROOT / "data/raw/keydoor.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert records == list(domain.recipes(len(records), 0))
    for record in records:
        domain.check(record)


def test_clues_and_instructions_settings_change_the_prompt(tmp_path: Path) -> None:
    record = next(KeydoorDomain().recipes(1, 0))
    for settings, text in (({}, "Find "), ({"clues": False}, "Find "), ({"instructions": True}, "unlock <room>")):
        domain = KeydoorDomain(KeydoorSettings(**settings))
        task = domain.build([record], tmp_path, 1)[0]
        assert text in task.prompt
        world = World.from_spec(task.spec)
        assert all(f"{item} {room}" in task.prompt for item, room in world.places.items()) == domain.settings.clues


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"corridor": -1}, "corridor: .*greater than or equal to 0"),
        ({"doors": "1"}, "doors: .*valid integer"),
        ({"decoys": 2}, "2 decoys do not fit"),
        ({"doors": 4, "side_rooms": 4, "decoys": 2}, "12 keys are needed, but there are only 10"),
        ({"extra": 1}, "extra: "),
        ({"split": "dev"}, "split: "),
        ({"task_id": ""}, "task_id: "),
    ],
)
def test_check_error_names_the_problem(domain: KeydoorDomain, change: dict, message: str) -> None:
    record = {"task_id": "t", "split": "train", "corridor": 1, "doors": 1, "side_rooms": 2, "seed": 0}
    domain.check(record)
    with pytest.raises(ValueError, match=rf"keydoor record t?.*: {message}"):
        domain.check({**record, **change})


def test_invalid_settings_and_misuse_errors_name_the_cause(domain: KeydoorDomain, tmp_path: Path) -> None:
    for settings, message in (
        ({"levels": []}, "levels"),
        ({"levels": [{"corridor": 1, "doors": 1, "decoys": 2}]}, "do not fit"),
        ({"progress_reward": 1.0}, "progress_reward"),
        ({"max_turns": 0}, "max_turns"),
    ):
        with pytest.raises(ValueError, match=message):
            load_domain("keydoor", settings)
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).step("look")
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).snapshot()
    assert Level(corridor=3, doors=2).solution_length == 14
