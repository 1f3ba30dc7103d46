"""Gymnasium environments with text observations as domains, among them one of another package, found by its entry point."""

from __future__ import annotations

import threading

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="the extra `gymnasium` is not installed")

from stages.environments.gymnasium_text import GymnasiumTextDomain, GymnasiumTextSettings  # noqa: E402
from stages.environments.protocol import Domain, Environment  # noqa: E402
from stages.environments.registry import load_domain  # noqa: E402
from stages.records.task import Task  # noqa: E402

PACKAGE = '''
import gymnasium
from gymnasium.spaces import Text
from stages.environments.gymnasium_text import GymnasiumTextDomain, GymnasiumTextSettings


class Guess(gymnasium.Env):
    """Guess a number; the answer says higher or lower."""

    observation_space = Text(max_length=40)
    action_space = Text(max_length=2, charset="0123456789")

    def __init__(self, highest=20):
        self.highest = highest

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.secret = int(self.np_random.integers(0, self.highest))
        return f"a number below {self.highest}.", {}

    def step(self, action):
        guess = int(action)
        word = "right" if guess == self.secret else "higher" if guess < self.secret else "lower"
        return f"{word}, noise {int(self.np_random.integers(1000))}.", float(word == "right"), word == "right", False, {}

    def expert_action(self):
        return str(self.secret)


class Settings(GymnasiumTextSettings):
    max_turns: int = 4


class GuessDomain(GymnasiumTextDomain):
    name = "guess"
    factory = Guess
    prompt = "guess the number."
    Settings = Settings
'''


@pytest.fixture
def guess(tmp_path, monkeypatch):
    """A package in its own folder as pip installs it: a module and the metadata of its entry point."""
    (tmp_path / "guess_package.py").write_text(PACKAGE)
    info = tmp_path / "guess_package-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guess-package\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[bellwether.domains]\nguess = guess_package:GuessDomain\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return load_domain("guess", {"kwargs": {"highest": 10}})


def first_task(domain, folder) -> Task:
    return domain.build(list(domain.recipes(1, seed=0)), folder, workers=1)[0]


def test_domain_of_another_package_is_found_and_played(guess, tmp_path):
    """Contract: a user adds an environment without editing this repository."""
    assert isinstance(guess, Domain)
    task = first_task(guess, tmp_path / "built")
    environment = guess.make(tmp_path)
    assert isinstance(environment, Environment)
    assert task.prompt == "guess the number."
    assert environment.reset(task).text == "a number below 10."
    secret = guess.expert(environment)
    wrong = environment.step(str((int(secret) + 1) % 10))
    assert (wrong.accepted, wrong.reward, wrong.done) == (True, 0.0, False)
    won = environment.step(secret)
    assert (won.reward, won.terminated, won.truncated) == (1.0, True, False)
    assert won.observation.text.startswith("right")
    with pytest.raises(RuntimeError, match="over"):
        environment.step("1")


def test_settings_are_checked_by_the_packages_class(guess):
    assert guess.settings.max_turns == 4
    with pytest.raises(ValueError, match=r"(?s)per_domain.guess.environment.*hihgest"):
        load_domain("guess", {"hihgest": 10})


def test_action_outside_the_space_is_refused_without_effect(guess, tmp_path):
    environment = guess.make(tmp_path)
    environment.reset(first_task(guess, tmp_path))
    key = environment.state_key()
    for turn in range(4):
        step = environment.step("seven")
        assert not step.accepted
        assert environment.state_key() == key
        assert step.truncated == (turn == 3)


@pytest.mark.parametrize("copyable", [True, False])
def test_snapshot_restores_random_state_by_copy_or_replay(guess, tmp_path, copyable):
    task = first_task(guess, tmp_path)
    environment, fresh = guess.make(tmp_path), guess.make(tmp_path)
    if not copyable:
        for each in (environment, fresh):
            each._env.lock = threading.Lock()
    environment.reset(task)
    wrong = str((int(guess.expert(environment)) + 1) % 10)
    environment.step(wrong)
    snapshot = environment.snapshot()
    assert (snapshot.copied is not None) == copyable
    script = [wrong, "none", guess.expert(environment)]
    expected = [environment.step(action) for action in script]
    for player in (environment, fresh):
        for _ in range(2):
            player.restore(snapshot)
            assert [player.step(action) for action in script] == expected


class Corridor(gymnasium.Env):
    """Walk right to the end; actions 5 and 6 are back and on."""

    observation_space = gymnasium.spaces.Text(20)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def __init__(self, drift: bool = False) -> None:
        self.drift, self.lock = drift, threading.Lock()
        self.plays = 0

    def _show(self):
        return f"place {self.place}{'!' * self.plays * self.drift}", {"action_mask": [self.place > 0, True]}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.plays = (options or {}).get("place", 0), self.plays + 1
        return self._show()

    def step(self, action):
        self.place += 1 if action == 6 else -1
        text, info = self._show()
        return text, 10.0 * (self.place == 3), self.place == 3, False, info

    def state_key(self):
        return f"at {self.place}"


class CorridorDomain(GymnasiumTextDomain):
    name = "corridor"
    factory = Corridor
    action_names = ("back", "on")


def test_discrete_actions_have_names_and_masks(tmp_path):
    domain = CorridorDomain(GymnasiumTextSettings(reward_scale=0.1))
    record = {"task_id": "c", "split": "train", "seed": 1, "options": {"place": 0}}
    (task,) = domain.build([record], tmp_path, 1)
    environment = domain.make(tmp_path)
    assert environment.reset(task).text == "place 0"
    assert environment.admissible() == ("on",)
    refused = environment.step("back")
    assert not refused.accepted
    assert "on" in refused.observation.text
    assert environment.step("on").observation.text == "place 1"
    assert environment.admissible() == ("back", "on")
    assert environment.state_key() == "at 1"
    assert environment.step(" on ").accepted
    assert environment.step("on").reward == pytest.approx(1.0)
    assert domain.expert(environment) is None
    assert environment.admissible() == ()


def test_diverging_replay_raises(tmp_path):
    """Contract: a snapshot is restored exactly, or with an error."""
    domain = CorridorDomain(GymnasiumTextSettings(kwargs={"drift": True}))
    environment = domain.make(tmp_path)
    environment.reset(first_task(domain, tmp_path))
    environment.step("on")
    snapshot = environment.snapshot()
    with pytest.raises(RuntimeError, match="deterministic under reset"):
        environment.restore(snapshot)


def test_unsupported_environment_error_names_the_remedy(tmp_path):
    class Nameless(CorridorDomain):
        action_names = ("on",)

    class Numbers(GymnasiumTextDomain):
        env_id = "CartPole-v1"
        action_names = ("left", "right")

    settings = GymnasiumTextSettings()
    with pytest.raises(TypeError, match="set action_names on Nameless"):
        Nameless(settings).make(tmp_path)
    with pytest.raises(ValueError, match="must set env_id"):
        GymnasiumTextDomain(settings).make(tmp_path)
    numbers = Numbers(settings)
    with pytest.raises(TypeError, match=r"ndarray, not text; override describe\(\) in Numbers"):
        numbers.make(tmp_path).reset(first_task(numbers, tmp_path))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"task_id": "a", "split": "dev", "seed": 1}, "split: .*dev"),
        ({"task_id": "a", "split": "test", "seed": -1}, "seed: .*-1"),
        ({"task_id": "a", "split": "test"}, "seed: Field required"),
        ({"task_id": "", "split": "test", "seed": 1}, "task_id: "),
        ({"task_id": "a", "split": "test", "seed": 1, "options": 3}, "options: .*dictionary"),
    ],
)
def test_check_error_names_the_field(record, message):
    with pytest.raises(ValueError, match=message):
        CorridorDomain(GymnasiumTextSettings()).check(record)


def test_recipes_keep_split_proportions():
    records = list(CorridorDomain(GymnasiumTextSettings()).recipes(416, seed=0))
    counts = {split: sum(record["split"] == split for record in records) for split in ("train", "valid", "test")}
    assert counts == {"train": 192, "valid": 24, "test": 200}
    assert len({record["task_id"] for record in records}) == 416
