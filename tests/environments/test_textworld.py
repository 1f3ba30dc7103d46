"""TextWorld: compiled games, exact snapshots, free-text commands, the expert and the recipes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.environments.textworld import TextWorldDomain, TextWorldSettings, games
from stages.environments.textworld.settings import NAME_NUMBERS, parse_recipe
from stages.environments.textworld.stories import Story, Transitions
from stages.params import ROOT
from stages.records.task import SPLITS
from stages.runtime import spans

# Jericho warns of games that it does not know. TextWorld filters the warning; pytest resets the filter.
pytestmark = pytest.mark.filterwarnings("ignore::jericho.UnsupportedGameWarning")
SMALL = {"levels": [{"rooms": 3, "objects": 3, "quest_length": 3}], "starts": 2, "goals": ["take", "unlock"]}


@pytest.fixture(scope="module")
def domain() -> TextWorldDomain:
    return load_domain("textworld", SMALL)


@pytest.fixture(scope="module")
def records(domain):
    return list(domain.recipes(8, seed=3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("textworld")


@pytest.fixture(scope="module")
def tasks(domain, records, folder):
    return domain.build(records, folder, workers=1)


@pytest.fixture
def environment(domain, folder, tasks):
    environment = domain.make(folder)
    yield environment
    environment.close()


def solve(domain, environment):
    steps = []
    while (action := domain.expert(environment)) is not None:
        steps.append(environment.step(action))
    return steps


def test_implements_domain_and_environment_protocols(domain, environment):
    assert isinstance(domain, Domain)
    assert isinstance(environment, Environment)


def test_expert_wins_every_task_in_as_many_steps_as_its_difficulty(domain, environment, tasks):
    for task in tasks:
        environment.reset(task)
        steps = solve(domain, environment)
        assert steps[-1].terminated
        assert not steps[-1].truncated
        assert len(steps) == task.difficulty
        assert sum(step.reward for step in steps) == 1.0
        assert all(step.accepted and step.cost == 1.0 for step in steps)
        assert environment.admissible() == ()
        with pytest.raises(RuntimeError, match="over"):
            environment.step("look")


def test_observations_omit_banner_title_trace_and_status_line(domain, environment, tasks):
    for task in tasks:
        texts = [environment.reset(task).text, *(step.observation.text for step in solve(domain, environment))]
        assert texts[0].startswith("you are in the room")
        assert texts[-1].endswith("*** the end ***")
        for text in (task.prompt, *texts):
            assert text == " ".join(text.split()).lower()
            assert not set("[]>\n=") & set(text)
            assert "objective" not in text
            assert "score" not in text


def test_starts_of_one_game_are_in_different_rooms(environment, tasks):
    first, second = (task for task in tasks if task.cluster == tasks[0].cluster)
    assert first.spec["game"] == second.spec["game"]
    assert first.prompt == second.prompt
    assert environment.reset(first).text != environment.reset(second).text
    assert first.spec["moves"] != second.spec["moves"]


def test_reset_is_repeatable_and_required(domain, folder, tasks):
    fresh = domain.make(folder)
    with pytest.raises(RuntimeError, match="reset"):
        fresh.step("look")
    texts = {fresh.reset(tasks[0]).text for _ in range(3)}
    fresh.step("look")
    assert texts == {fresh.reset(tasks[0]).text} == {TextWorldDomain(domain.settings).make(folder).reset(tasks[0]).text}


@pytest.mark.parametrize("fresh", [False, True])
def test_restored_snapshot_continues_identically(domain, folder, tasks, environment, fresh):
    """After other play, and in a new environment: same keys, commands, texts, rewards and expert actions."""
    rng = random.Random(0)
    other_game = next(task for task in tasks if task.cluster != tasks[0].cluster)
    for task in tasks[:4]:
        environment.reset(task)
        environment.step(rng.choice(environment.admissible()))
        snapshot, key, advice = environment.snapshot(), environment.state_key(), domain.expert(environment)
        script, expected = [], []
        while not (expected and expected[-1][0].done):
            script.append(rng.choice([*environment.admissible(), "take nothing", domain.expert(environment)]))
            expected.append((environment.step(script[-1]), environment.state_key(), environment.admissible()))
        player = TextWorldDomain(domain.settings).make(folder) if fresh else environment
        if not fresh:
            player.reset(other_game)
        for _ in range(2):
            player.restore(snapshot)
            assert (player.state_key(), domain.expert(player)) == (key, advice)
            assert [(player.step(action), player.state_key(), player.admissible()) for action in script] == expected


def test_cached_transitions_equal_the_interpreters(folder, tasks):
    """Random play with a cache so small that it evicts, with a large one, and without: same texts and memories."""
    stores = [Transitions(size) for size in (0, 5, 1000)]
    stories = [Story(folder / str(tasks[0].spec["game"]), store) for store in stores]
    commands = ["go east", "go west", "go north", "inventory", "look", "open door", "take key", "xyzzy"]
    drawn = random.Random(5)
    kept = [stories[0].first]
    counted = spans.totals().counts["environment_hits"]
    for _ in range(120):
        memory, command = drawn.choice(kept[-6:]), drawn.choice(commands)
        results = [story.run(memory, command) for story in stories]
        assert results[0] == results[1] == results[2]
        kept.append(results[0][1])
    assert [store.hits + store.misses for store in stores] == [120] * 3
    assert stores[0].hits == 0 < stores[1].hits < stores[2].hits
    assert spans.totals().counts["environment_hits"] - counted == sum(store.hits for store in stores)


def test_ineffective_commands_are_refused_and_leave_the_game_unchanged(domain, environment, tasks):
    """Meta commands, chains of commands and commands that the game does not understand are refused; the turn still counts."""
    environment.reset(tasks[0])
    key, memory = environment.state_key(), environment.snapshot().memory
    refused = ["", "dance", "go", "take nothing", "go nowhere", "undo", "restart", "save", "quit", "tw-print player"]
    refused.append("look then look")
    for action in refused:
        step = environment.step(action)
        assert not step.accepted
        assert step.reward == 0.0
        assert 0 < len(step.observation.text) < 80
        assert environment.state_key() == key
        environment.restore(environment.snapshot())
        assert all(np.array_equal(now, then) for now, then in zip(environment.snapshot().memory, memory, strict=True))
    last = environment.step("look. look")
    assert domain.settings.max_turns == len(refused) + 1
    assert not last.accepted
    assert last.truncated


def test_idle_commands_are_accepted_and_do_not_change_the_key(environment, tasks):
    environment.reset(tasks[0])
    key = environment.state_key()
    for action in ("look", "  INVENTORY ", "i", "l"):
        assert environment.step(action).accepted
        assert environment.state_key() == key


def test_state_key_is_independent_of_path_and_turn(environment, tasks):
    back = {"north": "south", "south": "north", "east": "west", "west": "east"}
    environment.reset(tasks[0])
    key = environment.state_key()
    there = next(action for action in environment.admissible() if action.startswith("go "))
    environment.step(there)
    assert environment.state_key() != key
    environment.step(f"go {back[there.split()[1]]}")
    assert environment.state_key() == key


def test_every_admissible_command_is_accepted(environment, tasks):
    rng = random.Random(2)
    for task in tasks:
        environment.reset(task)
        while actions := environment.admissible():
            assert list(actions) == sorted(actions)
            assert not any(action.startswith(("look", "inventory", "examine")) for action in actions)
            for action in actions:
                before = environment.snapshot()
                assert environment.step(action).accepted, action
                environment.restore(before)
            environment.step(rng.choice(actions))


def test_turn_limit_truncates(domain, folder, tasks):
    environment = TextWorldDomain(TextWorldSettings(max_turns=2)).make(folder)
    environment.reset(tasks[0])
    assert not environment.step("look").done
    last = environment.step("look")
    assert last.truncated
    assert not last.terminated


def test_settings_show_commands_and_reward_progress(domain, folder, tasks):
    """With progress reward, a won episode still returns 1, and a command without progress earns 0."""
    switched = TextWorldDomain(TextWorldSettings(show_admissible=True, progress_reward=0.5, idle_commands=True))
    environment = switched.make(folder)
    text = environment.reset(tasks[0]).text
    assert text.endswith(f" commands: {'; '.join(environment.admissible())}.")
    assert {"look", "inventory"} <= set(environment.admissible())
    steps = solve(switched, environment)
    assert sum(step.reward for step in steps) == pytest.approx(1.0)
    assert all(step.reward > 0 for step in steps)
    environment.reset(tasks[0])
    before, rewards = environment.snapshot(), []
    rewards.append(environment.step(switched.expert(environment)).reward)
    assert rewards == [pytest.approx(0.5 / tasks[0].difficulty)]
    environment.restore(before)
    assert environment.step("look").reward == 0.0


@pytest.mark.slow
def test_rebuild_writes_same_bytes_and_only_games(domain, records, tasks, folder, tmp_path):
    """Contract: no date, path or process influences a compiled game."""
    counts: list[int] = []
    again = domain.build(records[:3], tmp_path, workers=2, built=counts.append)
    assert again == tasks[:3]
    assert sum(counts) == 3
    assert len(counts) == len({task.cluster for task in again})
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    assert {path.suffix for path in files} == {".z8", ".json"}
    assert len(files) == 2 * len({task.cluster for task in again})
    assert {file.as_posix() for file in files} == {file for task in again for file in domain.world_files(task)}
    for path in files:
        data = (tmp_path / path).read_bytes()
        assert data == (folder / path).read_bytes()
        assert str(Path.home()).encode() not in data
        assert b"site-packages" not in data
        if path.suffix == ".z8":
            assert data[0x12:0x18] == b"000000"


def test_a_game_is_the_one_that_textworld_compiles(records, tasks, folder, tmp_path):
    from textworld import GameOptions
    from textworld.generator import compile_game

    options = GameOptions()
    options.path = str(tmp_path / "game.z8")
    theirs = bytearray(Path(compile_game(games.make_game(parse_recipe(records[0])), options)).read_bytes())
    theirs[0x12:0x18] = b"000000"
    assert (folder / tasks[0].spec["game"]).read_bytes() == theirs


def test_a_failed_compilation_names_the_game_and_gives_the_compilers_message(records, tmp_path, monkeypatch):
    game = games.make_game(parse_recipe(records[0]))
    monkeypatch.setattr(games, "generate_inform7_source", lambda game: "There is no such room.")
    with pytest.raises(RuntimeError, match=rf"(?s)ni could not compile game {game.metadata['uuid']} \(exit code 1\):.*Inform 7"):
        games.compile_to(game, tmp_path)
    assert not list(tmp_path.iterdir())


def test_recipes_are_deterministic_and_valid(domain, records):
    assert records == list(domain.recipes(8, seed=3))
    assert records[:5] == list(domain.recipes(5, seed=3))
    assert records != list(domain.recipes(8, seed=4))
    assert len({record["task_id"] for record in records}) == len(records)
    assert {split for split, _ in Counter(record["split"] for record in records).most_common(2)} == {"train", "test"}
    for record in records:
        domain.check(record)
        assert 2 <= record["solution_length"] <= domain.settings.max_turns


def test_splits_share_no_names(domain, tasks):
    names = {split: {name for task in tasks if task.split == split for name in domain.entities(task)} for split in SPLITS}
    assert not names["train"] & names["test"]
    assert not names["valid"] & (names["train"] | names["test"])
    assert sum(len(set(numbers)) for numbers in NAME_NUMBERS.values()) == len(set().union(*NAME_NUMBERS.values())) == 90
    for task in tasks:
        assert all(int(name[-2:]) in NAME_NUMBERS[task.split] for name in domain.entities(task))


def test_full_instructions_list_the_steps(domain, tmp_path):
    full = load_domain("textworld", {**SMALL, "instructions": "full"})
    (task,) = full.build(list(full.recipes(1, seed=0)), tmp_path, workers=1)
    environment = full.make(tmp_path)
    environment.reset(task)
    for action in environment.policy():
        assert action in task.prompt or action.split(" from ")[0].replace("take ", "take the ") in task.prompt
    assert task.spec["moves"] == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rooms": "3"}, "rooms: .*given: '3'"),
        ({"goal": "dance"}, "goal: .*'take'"),
        ({"start": 5}, "start 5 is out of range; the game has 3 rooms"),
        ({"instructions": "full", "start": 1}, "full instructions are only valid for start 0"),
        ({"colour": 1}, "colour: Extra inputs"),
        ({"split": "dev"}, "split: .*given: 'dev'"),
        ({"solution_length": 40}, "takes 40 commands, and max_turns .* is 12"),
    ],
)
def test_check_error_names_record_and_problem(domain, records, change, message):
    with pytest.raises(ValueError, match=message) as error:
        domain.check({**records[0], **change})
    assert records[0]["task_id"] in str(error.value)


def test_build_error_names_the_record(domain, records, tmp_path):
    with pytest.raises(ValueError, match=f"{records[0]['task_id']}: its solution takes"):
        domain.build([{**records[0], "solution_length": 9}], tmp_path, workers=1)
    with pytest.raises(ValueError, match="share task ids"):
        domain.build([records[0], records[0]], tmp_path, workers=1)


def test_missing_game_error_says_what_to_run(domain, tasks, tmp_path):
    with pytest.raises(FileNotFoundError, match="run the curate stage"):
        TextWorldDomain(domain.settings).make(tmp_path).reset(tasks[0])


def test_shipped_recipes_are_valid_and_sufficient():
    shipped = load_domain("textworld")
    records = [json.loads(line) for line in (ROOT / "data/raw/textworld.jsonl").read_text(encoding="utf-8").splitlines()]
    for record in records:
        shipped.check(record)
    counts = Counter(record["split"] for record in records)
    assert counts["train"] >= 192
    assert counts["valid"] >= 24
    assert counts["test"] >= 200
    assert records[:4] == list(shipped.recipes(4, seed=0))
