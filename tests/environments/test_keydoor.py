"""The keydoor domain: worlds, episodes, recipes, and exact values against brute force."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from stages.curation.__main__ import configured_domain
from stages.curation.demonstrations import EXPERT, NOISY, DemonstrationPlan, demonstrate
from stages.curation.panel import make_panel
from stages.curation.settings import Curate
from stages.environments.keydoor import KeydoorDomain, KeydoorEnvironment, KeydoorSettings, Level
from stages.environments.keydoor.environment import NOTHING, WON
from stages.environments.keydoor.exact import ExactValues, from_table, uniform
from stages.environments.keydoor.settings import WeightedLevel
from stages.environments.keydoor.world import State, World, make_world
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.environments.search.world import names_of
from stages.params import load_params
from stages.records.task import SPLITS, Task

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (
    WeightedLevel(corridor=1, doors=0, side_rooms=3),
    WeightedLevel(corridor=0, doors=1, side_rooms=2, decoys=1),
    WeightedLevel(corridor=2, doors=2, side_rooms=2, decoys=1),
    WeightedLevel(corridor=1, doors=1, side_rooms=1, deliver=True),
)


@pytest.fixture(scope="module")
def domain() -> KeydoorDomain:
    return KeydoorDomain(KeydoorSettings(levels=LEVELS))


@pytest.fixture(scope="module")
def tasks(domain: KeydoorDomain, tmp_path_factory: pytest.TempPathFactory) -> list[Task]:
    return domain.build(list(domain.recipes(104, 3)), tmp_path_factory.mktemp("worlds"), 1)


def hand_world() -> World:
    """A corridor of one room, a fork of two side rooms with a key and a decoy, and one door."""
    return World(
        start="Balbas",
        back={"Corbis": "Balbas", "Dorvin": "Corbis", "Kelmar": "Corbis", "Selmak": "Corbis"},
        locks={"Selmak": "iron key"},
        contents={"Dorvin": "iron key", "Kelmar": "wax key", "Selmak": "lamp"},
        thing="lamp",
        deliver=False,
    )


def hand_task(world: World) -> Task:
    return Task("hand", "keydoor", "train", 0, "Find lamp.", world.to_spec(), 6.0)


def play(environment: KeydoorEnvironment, task: Task, actions: list[str]) -> list:
    environment.reset(task)
    return [environment.step(action) for action in actions]


def solution(domain: KeydoorDomain, environment: KeydoorEnvironment, task: Task) -> list[str]:
    environment.reset(task)
    actions = []
    while (action := domain.expert(environment)) is not None:
        assert action in environment.admissible()
        actions.append(action)
        environment.step(action)
    return actions


def test_implements_domain_and_environment_protocols(domain: KeydoorDomain, tmp_path: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(tmp_path), Environment)
    assert load_domain("keydoor", {"clues": False}).settings == KeydoorSettings(clues=False)


def test_episode_by_hand(domain: KeydoorDomain, tmp_path: Path) -> None:
    """Every action, its observation and the count of sub-goals."""
    environment = domain.make(tmp_path)
    assert environment.reset(hand_task(hand_world())).text == "you are in Balbas. exits Corbis."
    expected = [
        ("go Corbis", "you are in Corbis. exits Dorvin, Kelmar. back Balbas. Selmak needs iron key.", 0),
        ("go Dorvin", "you are in Dorvin. back Corbis. here is iron key.", 0),
        ("take iron key", "taken. you are in Dorvin. back Corbis. you hold iron key.", 1),
        ("GO  corbis", "you are in Corbis. exits Dorvin, Kelmar. back Balbas. you hold iron key. iron key fits Selmak.", 1),
        ("unlock Selmak", "unlocked. you are in Corbis. exits Dorvin, Kelmar, Selmak. back Balbas.", 2),
        ("go Selmak", "you are in Selmak. back Corbis. here is lamp.", 2),
        ("take lamp", WON, 3),
    ]
    for action, text, reached in expected:
        step = environment.step(action)
        assert (step.observation.text, step.accepted, step.terms["subgoals"]) == (text, True, reached / 3)
        assert (step.reward, step.terminated, step.truncated) == (float(text == WON), text == WON, False)
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("look")


def test_admissible_and_refused_actions_by_hand(domain: KeydoorDomain, tmp_path: Path) -> None:
    """Doors need their key, decoys open none, and a used key stays in its lock."""
    environment = domain.make(tmp_path)
    play(environment, hand_task(hand_world()), ["go Corbis"])
    assert environment.admissible() == ["go Balbas", "go Dorvin", "go Kelmar", "look"]
    for refused in ("go Selmak", "unlock Selmak", "take iron key", "go Corbis", "drop lamp", "dance", ""):
        step = environment.step(refused)
        assert (step.accepted, step.reward) == (False, 0.0)
        assert step.observation.text == f"{NOTHING} you are in Corbis. exits Dorvin, Kelmar. back Balbas. Selmak needs iron key."
    play(environment, hand_task(hand_world()), ["go Corbis", "go Kelmar", "take wax key", "go Corbis"])
    assert "unlock Selmak" not in environment.admissible()
    play(environment, hand_task(hand_world()), ["go Corbis", "go Dorvin", "take iron key", "go Corbis", "unlock Selmak"])
    assert environment.snapshot().world == State("Corbis", frozenset(), frozenset({"Selmak"}))
    environment.step("go Dorvin")
    assert environment.admissible() == ["go Corbis", "look"]


def test_delivery_by_hand(domain: KeydoorDomain, tmp_path: Path) -> None:
    world = World("Balbas", {"Corbis": "Balbas"}, {}, {"Corbis": "lamp"}, "lamp", True)
    environment = domain.make(tmp_path)
    steps = play(environment, hand_task(world), ["go Corbis", "take lamp", "go Balbas", "drop lamp"])
    assert [step.terms["subgoals"] for step in steps] == [0.0, 0.5, 0.5, 1.0]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.0, 1.0]
    play(environment, hand_task(world), ["go Corbis", "take lamp"])
    assert "drop lamp" not in environment.admissible()


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


def test_expert_takes_the_shortest_path(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    environment = domain.make(tmp_path)
    for task in tasks:
        actions = solution(domain, environment, task)
        assert len(actions) == task.difficulty
        assert environment.snapshot().world.won


def test_expert_recovers_from_any_state(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    environment = KeydoorDomain(KeydoorSettings(levels=LEVELS, max_turns=64)).make(tmp_path)
    for index, task in enumerate(tasks[:24]):
        rng = Random(index)
        environment.reset(task)
        for _ in range(12):
            if environment.admissible():
                environment.step(rng.choice(list(environment.admissible())))
        left = environment._world.distances[environment.snapshot().world]
        taken = 0
        while (action := domain.expert(environment)) is not None:
            environment.step(action)
            taken += 1
        assert taken == left


def test_progress_reward_sums_to_one(tasks: list[Task], tmp_path: Path) -> None:
    domain = KeydoorDomain(KeydoorSettings(levels=LEVELS, progress_reward=0.5))
    environment = domain.make(tmp_path)
    for task in tasks:
        steps = play(environment, task, solution(domain, environment, task))
        assert sum(step.reward for step in steps) == pytest.approx(1.0, abs=1e-12)
        reached = [step.terms["subgoals"] for step in steps]
        assert reached == sorted(reached)
    steps = play(environment, hand_task(hand_world()), ["go Corbis", "go Dorvin", "take iron key", "look"])
    assert [step.reward for step in steps] == pytest.approx([0.0, 0.0, 0.5 / 3, 0.0])


def test_turn_limit_truncates_unless_last_turn_wins(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    task = next(task for task in tasks if task.difficulty == 3.0)
    environment = KeydoorDomain(KeydoorSettings(max_turns=3)).make(tmp_path)
    step = play(environment, task, solution(domain, environment, task))[-1]
    assert (step.terminated, step.truncated, step.reward) == (True, False, 1.0)
    step = play(environment, task, ["look", "look", "look"])[-1]
    assert (step.terminated, step.truncated, step.reward) == (False, True, 0.0)
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("look")


def test_restored_snapshot_continues_identically(domain: KeydoorDomain, tasks: list[Task], tmp_path: Path) -> None:
    task = next(task for task in tasks if task.difficulty == max(task.difficulty for task in tasks))
    actions = solution(domain, domain.make(tmp_path), task)
    environment, other = domain.make(tmp_path), domain.make(tmp_path)
    play(environment, task, actions[:4])
    state, key = environment.snapshot(), environment.state_key()
    first = [environment.step(action) for action in ("look", "nonsense", *actions[4:])]
    other.reset(task)
    other.restore(state)
    assert other.state_key() == key
    assert [other.step(action) for action in ("look", "nonsense", *actions[4:])] == first
    environment.reset(tasks[0])
    with pytest.raises(ValueError, match="can't be restored"):
        environment.restore(state)


def test_state_keys_are_canonical(domain: KeydoorDomain, tmp_path: Path) -> None:
    """Contract: a state's key depends neither on the path to it nor on the turn; different states have different keys."""
    environment, keys = domain.make(tmp_path), []
    for actions in (
        ["go Corbis", "go Dorvin", "take iron key", "go Corbis", "go Kelmar", "take wax key", "go Corbis"],
        ["go Corbis", "go Kelmar", "look", "take wax key", "go Corbis", "nonsense", "go Dorvin", "take iron key", "go Corbis"],
    ):
        play(environment, hand_task(hand_world()), actions)
        keys.append(environment.state_key())
    assert keys[0] == keys[1] == "hand#Corbis|iron key wax key||"
    world = hand_world()
    assert len({state.key for state in world.states}) == len(world.states)


def test_exact_values_by_hand() -> None:
    """A fork of two rooms with the lamp in one; the uniform policy, with refused actions 1/4 of the time."""
    world = World("Balbas", {"Corbis": "Balbas", "Dorvin": "Balbas"}, {}, {"Corbis": "lamp"}, "lamp", False)
    settings = KeydoorSettings(max_turns=2)

    def policy(key: str, turn: int, admissible: tuple[str, ...]) -> dict[str, float]:
        return dict.fromkeys(admissible, 0.75 / len(admissible))

    exact = ExactValues(hand_task(world), settings, policy)
    # Two turns suffice only for go, take: each of three admissible actions has probability 1/4.
    assert exact.value(world.initial(), 0) == pytest.approx(1 / 16)
    steps = exact.episode(["go Corbis", "take lamp"])
    assert [(step.value, step.q) for step in steps] == [pytest.approx((1 / 16, 1 / 4)), pytest.approx((1 / 4, 1.0))]
    assert [step.advantage for step in steps] == pytest.approx([3 / 16, 3 / 4])
    assert [step.advantage for step in exact.episode(["go Dorvin", "nonsense"])] == pytest.approx([-1 / 16, 0.0])
    assert [step.state_key for step in steps] == ["hand#Balbas|||", "hand#Corbis|||"]


def brute_force(exact: ExactValues, state: State, turn: int, environment: KeydoorEnvironment) -> float:
    """The expected return from `state`, by playing every action of the environment, refused ones included, to the end."""
    if environment.snapshot().over:
        return 0.0
    now, total = environment.snapshot(), 0.0
    chances = dict(exact.probabilities(now.world, turn))
    chances["refused"] = 1.0 - sum(chances.values())
    for action, chance in chances.items():
        if chance > 0.0:
            environment.restore(now)
            step = environment.step(action)
            later = brute_force(exact, environment.snapshot().world, turn + 1, environment)
            total += chance * (step.reward + exact.gamma * later)
    environment.restore(now)
    return total


@pytest.mark.parametrize(("share", "gamma"), [(0.0, 1.0), (0.5, 0.9)])
def test_exact_values_equal_brute_force(tasks: list[Task], tmp_path: Path, share: float, gamma: float) -> None:
    """Contract: dynamic programming equals enumeration of every episode of the real environment, in every state met."""
    settings = KeydoorSettings(max_turns=5, progress_reward=share)
    environment = KeydoorDomain(settings).make(tmp_path)

    def policy(key: str, turn: int, admissible: tuple[str, ...]) -> dict[str, float]:
        """Depends on state and turn; the rest of the probability is refused actions."""
        rng = Random(f"{key} {turn}")
        weights = [rng.random() for _ in range(len(admissible) + 1)]
        return {action: weight / sum(weights) for action, weight in zip(admissible, weights, strict=False)}

    short = next(task for task in tasks if task.difficulty == 3.0)
    for task in (hand_task(hand_world()), short):
        exact = ExactValues(task, settings, policy, gamma)
        environment.reset(task)
        rng = Random(1)
        for turn in range(settings.max_turns):
            state = environment.snapshot()
            if state.over:
                break
            value = brute_force(exact, state.world, turn, environment)
            assert exact.value(state.world, turn) == pytest.approx(value, abs=1e-12)
            environment.step(rng.choice(list(environment.admissible())))


@pytest.mark.parametrize("policy", [uniform, None])
def test_advantages_have_mean_zero_and_optimal_ones_are_not_positive(tasks: list[Task], policy) -> None:
    for task in tasks[:4]:
        settings = KeydoorSettings(max_turns=12)
        exact = ExactValues(task, settings, policy)
        for turn in (0, 5, 11):
            for state, moves in exact.world.states.items():
                if not moves:
                    continue
                advantages = {action: exact.q(state, turn, action) - exact.value(state, turn) for action in moves}
                chances = exact.probabilities(state, turn)
                assert sum(chances[action] * advantages[action] for action in chances) == pytest.approx(0.0, abs=1e-12)
                if policy is None:
                    assert max(advantages.values()) <= 1e-12


def test_optimal_values_are_discounted_distances(domain: KeydoorDomain, tasks: list[Task]) -> None:
    """Contract: V* = gamma^(distance - 1) if enough turns remain, else 0; the expert's steps have advantage 0."""
    settings = KeydoorSettings(max_turns=12)
    for task in tasks[:8]:
        exact = ExactValues(task, settings, gamma=0.9)
        for turn in (0, 4, 9):
            for state, distance in exact.world.distances.items():
                expected = 0.9 ** (distance - 1) if 0 < distance <= 12 - turn else 0.0
                assert exact.value(state, turn) == pytest.approx(expected)
        if task.difficulty <= 12:
            steps = exact.episode(solution(domain, domain.make(Path()), task))
            assert [step.advantage for step in steps] == pytest.approx([0.0] * len(steps), abs=1e-12)


def test_tabular_policies_and_invalid_policies() -> None:
    table = {"s": {"A": 3.0, "b": 1.0, "refused": 4.0}}
    assert from_table(table)("s", 0, ("a", "b", "c")) == {"a": 3 / 8, "b": 1 / 8, "c": 0.0}
    assert from_table(table, prior=1.0)("s", 0, ("a", "b")) == {"a": 4 / 10, "b": 2 / 10}
    assert from_table(table)("t", 0, ("a", "b")) == {"a": 0.5, "b": 0.5}
    task, settings = hand_task(hand_world()), KeydoorSettings(max_turns=2)
    for bad in ({"look": 1.5}, {"look": -0.1}, {"fly": 0.5}):
        with pytest.raises(ValueError, match="add up to at most 1"):
            ExactValues(task, settings, lambda key, turn, admissible, bad=bad: bad)
    with pytest.raises(ValueError, match="is over after 2 of 3 actions"):
        ExactValues(task, settings, uniform).episode(["look"] * 3)


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
