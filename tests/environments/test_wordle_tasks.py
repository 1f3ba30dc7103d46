"""Tasks of the wordle domain: players, lists of words, recipes, panel and errors."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
from wordle_games import reference

from stages.curation.demonstrations import EXPERT, NOISY, DemonstrationPlan, demonstrate
from stages.curation.panel import make_panel
from stages.curation.settings import Curate
from stages.environments.protocol import Domain, Environment
from stages.environments.registry import load_domain
from stages.environments.wordle import WordleDomain, WordleSettings
from stages.environments.wordle.players import best_guess, expected_left
from stages.environments.wordle.settings import Level, WeightedLevel
from stages.environments.wordle.words import WordList, english_words, make_list, spell, split_of
from stages.records.task import SPLITS, Task

ENGLISH = WeightedLevel(letters=5, alphabet=26, source="english")
LEVELS = (
    WeightedLevel(letters=3, alphabet=6),
    WeightedLevel(letters=3, alphabet=8, size=40),
    WeightedLevel(letters=2, alphabet=9),
)


@pytest.fixture(scope="module")
def domain() -> WordleDomain:
    return WordleDomain(WordleSettings(levels=LEVELS))


def test_implements_domain_and_environment_protocols(domain: WordleDomain, tmp_path: Path) -> None:
    assert isinstance(domain, Domain)
    assert isinstance(domain.make(tmp_path), Environment)
    assert load_domain("wordle", {"show": "marks"}).settings == WordleSettings(show="marks")


def test_remaining_words_equal_brute_force(domain: WordleDomain, tasks: list[Task], folder: Path) -> None:
    """Contract: the words left are exactly those that agree with every mark so far."""
    environment, rng = domain.make(folder), Random(0)
    for task in tasks[:12]:
        environment.reset(task)
        words = environment.words.words
        while not environment.state.over:
            environment.step(rng.choice(words))
            fits = [w for w in words if all(tuple(reference(guess, w)) == marks for guess, marks in environment.state.rows)]
            assert [words[number] for number in environment.state.left] == fits
            assert task.spec["word"] in fits


# ---- players -----------------------------------------------------------------------------------------------------------------


def test_expected_left_by_hand() -> None:
    """Of bb, bd, db, dd: each guess leaves one word, or none if it is the word: 3/4. A word of other letters leaves all four."""
    words = WordList("bdf", ("bb", "bd", "db", "dd", "ff"))
    left = np.array([0, 1, 2, 3])
    assert expected_left(words.array, np.arange(5), left).tolist() == [0.75, 0.75, 0.75, 0.75, 4.0]
    assert best_guess(words, left) == 0
    assert best_guess(words, np.array([3])) == 3


def test_players_differ_in_strength_and_the_expert_always_solves(domain: WordleDomain, tasks: list[Task], folder: Path) -> None:
    environment, solved = domain.make(folder), {}
    for player in domain.players():
        won = []
        for index, task in enumerate(tasks):
            rng = Random(f"{player} {index}")
            environment.reset(task)
            while not environment.state.over:
                environment.step(domain.player_action(player, environment, rng))
            won.append(environment.state.terminated)
        solved[player] = sum(won) / len(won)
    assert solved["novice"] < solved["casual"] < solved["steady"]
    assert solved["novice"] < 0.6
    assert solved["steady"] > 0.9
    assert solved["expert"] == 1.0


def test_expert_recovers_with_legal_guesses(domain: WordleDomain, tasks: list[Task], folder: Path) -> None:
    environment = domain.make(folder)
    for index, task in enumerate(tasks[:20]):
        environment.reset(task)
        for guess in Random(index).sample(list(environment.admissible()), 2):
            if not environment.state.over:
                assert environment.step(guess).accepted
        while (guess := domain.expert(environment)) is not None:
            assert environment.step(guess).accepted
        assert environment.state.terminated


def test_noisy_demonstrations_recover(domain: WordleDomain, tasks: list[Task], folder: Path) -> None:
    environment, plan = domain.make(folder), DemonstrationPlan(Curate(), seed=0, max_length=640)
    made = [demonstrate(domain, environment, task, plan).episodes for task in tasks[:30]]
    assert all(episode.success for episodes in made for episode in episodes)
    kinds = Counter(episode.policy_hash for episodes in made for episode in episodes)
    assert kinds[EXPERT] == 30
    assert kinds[NOISY] >= 24


# ---- lists and recipes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [*LEVELS, ENGLISH, WeightedLevel(letters=4, alphabet=26, size=50, source="english")])
def test_lists_have_the_size_of_their_level(level: WeightedLevel) -> None:
    plain = Level(**level.model_dump(exclude={"weight"}))
    words = make_list(plain, 7)
    wanted = level.size or (sum(len(word) == 5 for word in english_words()) if level.source == "english" else 6**3)
    assert len(words.words) == (81 if level.letters == 2 else wanted) == len(set(words.words))
    assert all(len(word) == level.letters and set(word) <= set(words.letters) for word in words.words)
    assert WordList.from_json(words.to_json()) == words == make_list(plain, 7)
    if level.source == "made":
        assert len(words.letters) == level.alphabet
        assert make_list(plain, 8) != words


def test_english_words_are_distinct_lower_case_and_in_all_splits() -> None:
    words = english_words()
    assert len(words) == len(set(words)) > 1000
    assert all(word.isalpha() and word.islower() and len(word) in (4, 5) for word in words)
    assert {split: sum(split_of(word) == split for word in words if len(word) == 5) >= 24 for split in SPLITS} == dict.fromkeys(
        SPLITS, True
    )


def test_recipes_mix_levels_and_keep_split_proportions(domain: WordleDomain) -> None:
    records = list(domain.recipes(520, 7))
    assert Counter(record["split"] for record in records) == {"train": 240, "valid": 30, "test": 250}
    shares = Counter(domain.record_difficulty(record) for record in records)
    assert set(shares) == set(domain.difficulty_weights()) == {7.755, 5.322, 6.34}
    assert max(shares.values()) - min(shares.values()) <= 3
    assert len({record["seed"] for record in records}) == len({record["task_id"] for record in records}) == 520
    assert set().union(*map(domain.record_kinds, records)) == domain.recipe_kinds()
    for record in records:
        domain.check(json.loads(json.dumps(record)))


def test_shared_lists_hide_each_word_once_unless_consistent(tmp_path: Path) -> None:
    made = WeightedLevel(letters=3, alphabet=8, size=64)
    records = list(WordleDomain(WordleSettings(levels=(made,), lists="shared", hidden="consistent")).recipes(200, 0))
    assert len({record["word"] for record in records}) <= 64
    assert len({record["seed"] for record in records}) == 200
    with pytest.raises(ValueError, match=r"the shared list has only \d+ words for \w+; request fewer"):
        list(WordleDomain(WordleSettings(levels=(made,), lists="shared")).recipes(200, 0))
    english = WordleDomain(WordleSettings(levels=(ENGLISH,)))
    records = list(english.recipes(416, 0))
    assert len({record["word"] for record in records}) == 416
    assert english.recipe_kinds() == set().union(*map(english.record_kinds, records))
    tasks = english.build(records[:3], tmp_path, 1)
    (file,) = {file for task in tasks for file in english.world_files(task)}
    assert (
        WordList.from_json((tmp_path / file).read_text()).words
        == make_list(Level(**ENGLISH.model_dump(exclude={"weight"})), 0).words
    )
    environment = english.make(tmp_path)
    environment.reset(tasks[0])
    assert environment.step(tasks[0].spec["word"]).terminated


def test_train_and_test_share_no_entities(domain: WordleDomain, tasks: list[Task]) -> None:
    for settings in (WordleSettings(levels=LEVELS), WordleSettings(levels=LEVELS, hidden="consistent")):
        of = WordleDomain(settings)
        names = [set().union(*(of.entities(task) for task in tasks if task.split == split)) for split in SPLITS]
        assert all(names)
        assert not names[0] & names[1]
        assert not names[2] & (names[0] | names[1])


def test_panel_hash_covers_words_lists_and_settings(domain: WordleDomain, tmp_path: Path) -> None:
    records = list(domain.recipes(52, 0))
    panels = [make_panel(domain, domain.build(records, tmp_path, 1), tmp_path) for _ in range(2)]
    assert panels[0].hash == panels[1].hash
    assert len(panels[0].tasks) == 25
    assert panels[0].worlds
    changed = [{**record, "seed": record["seed"] + (record["split"] == "test")} for record in records]
    assert make_panel(domain, domain.build(changed, tmp_path, 1), tmp_path).hash != panels[0].hash
    lmrl = WordleDomain(WordleSettings(levels=LEVELS, reward="lmrl"))
    assert make_panel(lmrl, lmrl.build(records, tmp_path, 1), tmp_path).hash != panels[0].hash


def test_prompt_follows_settings(tmp_path: Path) -> None:
    level = WeightedLevel(letters=3, alphabet=6, size=4)
    record = next(WordleDomain(WordleSettings(levels=(level,))).recipes(1, 0))
    for settings, shows, hides in (
        ({}, "letters ", "words"),
        ({"show_words": True}, "words ", "guesses"),
        ({"instructions": True}, "in 6 guesses", " words "),
    ):
        of = WordleDomain(WordleSettings(levels=(level,), **settings))
        prompt = of.build([record], tmp_path, 1)[0].prompt
        assert shows in prompt
        assert hides not in prompt
    assert (
        spell(record["word"], "letters")
        in WordleDomain(WordleSettings(levels=(level,), show_words=True)).build([record], tmp_path, 1)[0].prompt
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"letters": 1}, "letters: .*greater than or equal to 2"),
        ({"alphabet": "8"}, "alphabet: .*valid integer"),
        ({"alphabet": 18}, "at most 17 different letters"),
        ({"size": 600}, "600 words do not fit: 8 letters make 512 words of 3"),
        ({"letters": 6}, "8 letters make 262144 words of 6, and lists hold at most 4096"),
        ({"source": "english"}, "English words need alphabet: 26"),
        ({"extra": 1}, "extra: "),
        ({"split": "dev"}, "split: "),
        ({"task_id": ""}, "task_id: "),
        ({"word": "xyz"}, "word: 'xyz' is not in its list"),
    ],
)
def test_check_error_names_the_problem(change: dict, message: str) -> None:
    domain = WordleDomain(WordleSettings(levels=(WeightedLevel(letters=3, alphabet=8),)))
    record = next(domain.recipes(1, 0))
    domain.check(record)
    with pytest.raises(ValueError, match=rf"wordle record [\w-]*.*: .*{message}"):
        domain.check({**record, **change})
    with pytest.raises(ValueError, match=r"wordle record .*: word: '\w+' is reserved for train tasks"):
        domain.check({**record, "split": "test"})


def test_invalid_settings_and_misuse_errors_name_the_cause(domain: WordleDomain, tmp_path: Path) -> None:
    for settings, message in (
        ({"levels": []}, "levels"),
        ({"levels": [{"letters": 3, "alphabet": 40}]}, "alphabet"),
        ({"players": {"novice": 0.0}}, "players needs at least one weight above 0"),
        ({"players": {"wizard": 1.0}}, "novice"),
        ({"reward": "points"}, "solved"),
        ({"max_turns": 0}, "max_turns"),
    ):
        with pytest.raises(ValueError, match=message):
            load_domain("wordle", settings)
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).step("b d f")
    with pytest.raises(RuntimeError, match="never reset"):
        domain.make(tmp_path).snapshot()
    task = Task("lost", "wordle", "test", 0, "", {"letters": "bd", "list": "gone", "word": "bd"}, 1.0)
    with pytest.raises(FileNotFoundError, match="run the curate stage of domain wordle again"):
        domain.make(tmp_path).reset(task)
