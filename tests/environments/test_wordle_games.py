"""Wordle's marks against a reference, and games by hand with both kinds of hidden word."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from wordle_games import game, hand_task, play, reference

from stages.environments.wordle.environment import ILLEGAL, SOLVED, knowledge_key
from stages.environments.wordle.rules import HERE, IN, MARKS, NOT, code_of, codes, marks_of
from stages.environments.wordle.words import every_word, read, spell
from stages.params import check_domains, parse_params
from stages.runtime.validation import ParamsError


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("speed", "abide", (NOT, NOT, IN, NOT, IN)),
        ("speed", "erase", (IN, NOT, IN, IN, NOT)),
        ("speed", "steal", (HERE, NOT, HERE, NOT, NOT)),
        ("speed", "crepe", (NOT, IN, HERE, IN, NOT)),
        ("allol", "llama", (IN, HERE, IN, NOT, NOT)),
        ("bbb", "dbd", (NOT, HERE, NOT)),
    ],
)
def test_marks_of_repeated_letters_by_hand(guess: str, word: str, marks: tuple[str, ...]) -> None:
    assert marks_of(guess, word) == marks == tuple(reference(guess, word))


def test_marks_equal_reference_for_every_pair() -> None:
    """Contract: scalar and vectorised marks equal the reference, repeated letters included."""
    for letters, length in (("bdf", 4), ("bd", 5)):
        words = every_word(letters, length)
        table = codes(words.array, words.array)
        for first, guess in enumerate(words.words):
            for second, word in enumerate(words.words):
                marks = reference(guess, word)
                assert list(marks_of(guess, word)) == marks
                assert table[first, second] == code_of(marks)
    assert code_of([HERE, IN, NOT]) == 2 * 9 + 1 * 3
    assert [MARKS[int(digit)] for digit in "012"] == [NOT, IN, HERE]
    with pytest.raises(ValueError, match="differ in length"):
        marks_of("bd", "bdf")


def test_game_by_hand() -> None:
    """Marks, board, keys and the end; an illegal guess costs a turn and gives no marks."""
    environment = game()
    assert environment.reset(hand_task()).text == ""
    expected = [
        ("b d b", True, "b in d in b not. from f g with b d. open open open."),
        ("B D Q", False, f"{ILLEGAL} from f g with b d. open open open."),
        ("bd", False, f"{ILLEGAL} from f g with b d. open open open."),
        ("dgb", True, "d here g not b in. from f with b. d open open."),
        ("d b f", True, SOLVED),
    ]
    for guess, legal, text in expected:
        step = environment.step(guess)
        assert (step.accepted, step.observation.text) == (legal, text)
        assert (step.reward, step.terminated, step.truncated) == (float(text == SOLVED), text == SOLVED, False)
    assert step.terms == {"success": 1.0, "places": 1.0}
    assert environment.state_key() == f"hand#dbf#{SOLVED}"
    assert environment.admissible() == []
    with pytest.raises(RuntimeError, match="is over"):
        environment.step("b d f")


def test_board_counts_letters() -> None:
    """Contract: the board lists the known letters that have no place yet, each as often as is known."""
    environment = game()
    environment.reset(hand_task("bbd"))
    assert environment.step("d b b").observation.text == "d in b here b in. from f g with d b. open b open."
    assert environment.step("b b g").observation.text == "b here b here g not. from f with d. b b open."
    assert game(show="marks", spelling="names").reset(hand_task()).text == ""
    (step,) = play(game(show="marks", spelling="names"), hand_task(), ["Bell drum drum"])
    assert step.observation.text == "bell in drum in drum not."


def test_spelling_round_trips() -> None:
    for word in ("bdf", "zyx", "speed"):
        for spelling in ("letters", "names"):
            assert read(spell(word, spelling), spelling) == read(word.upper(), spelling) == word
    assert read("bell", "letters") == "bell"


def test_lmrl_rewards_and_success() -> None:
    """Contract: -1 for each wrong guess, illegal ones too, 0 for the word; six guesses; a term reports success."""
    environment = game(reward="lmrl")
    for guesses, total, won in (
        (["dbf"], 0.0, True),
        (["bbb", "xxx", "dbf"], -2.0, True),
        (["bbb"] * 5 + ["dbf"], -5.0, True),
        (["bbb"] * 6, -6.0, False),
    ):
        steps = play(environment, hand_task(), guesses)
        assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
        assert sum(step.reward for step in steps) == total
        assert sum(step.terms["success"] for step in steps) == float(won)
        assert (steps[-1].terminated, steps[-1].truncated) == (won, not won)


def test_critic_head_that_would_clip_returns_is_rejected() -> None:
    """Contract: LMRL-Gym's returns range from -6 to 0; a head with a smaller range is rejected, others are accepted."""

    def make_params(environment: dict, rl: dict):
        annotate = {"returns": [-6.0, 0.0]} if environment else {}
        own = {"environment": environment, "rl": rl, "annotate": annotate}
        return parse_params({"domains": ["wordle"], "per_domain": {"wordle": own}})

    lmrl, head = {"reward": "lmrl"}, {"loss": "hl_gauss", "v_min": -6.5, "v_max": 0.5}
    check_domains(make_params(lmrl, {}))
    check_domains(make_params({}, {"algorithm": "ppo"}))
    check_domains(make_params(lmrl, {"algorithm": "ppo", "critic": {"head": head}}))
    check_domains(make_params(lmrl, {"algorithm": "ppo", "critic": {"head": {"loss": "mse"}}}))
    check_domains(make_params(lmrl, {"algorithm": "ppo", "reward": {"density": "single"}}))
    with pytest.raises(ParamsError, match=r"per_domain.wordle: rl.critic.head: returns are in \[-6, 0\].*\[-0.2, 1.2\]"):
        check_domains(make_params(lmrl, {"algorithm": "ppo"}))
    params = parse_params({"domains": ["wordle"], "per_domain": {"wordle": {"environment": lmrl}}})
    with pytest.raises(ParamsError, match=r"set per_domain.wordle.annotate.returns to \[-6.0, 0.0\]"):
        check_domains(params)


def test_restored_snapshot_continues_identically(folder: Path) -> None:
    """Contract: for both kinds of hidden word; copies of a state answer alike, draws included."""
    for hidden in ("fixed", "consistent"):
        environment, other = game(hidden=hidden), game(hidden=hidden)
        task = hand_task(seed=5)
        play(environment, task, ["b d b", "nonsense"])
        state, key = environment.snapshot(), environment.state_key()
        guesses = ["g g d", "f b d", "b b b", "d d d"]
        first = [environment.step(guess) for guess in guesses if not environment.state.over]
        other.reset(task)
        other.restore(state)
        assert other.state_key() == key
        assert [other.step(guess) for guess in guesses if not other.state.over] == first
        environment.reset(replace(task, task_id="another"))
        with pytest.raises(ValueError, match="can't be restored"):
            environment.restore(state)


def test_state_key_depends_only_on_knowledge() -> None:
    """Contract: the order of guesses, illegal guesses and turns do not change the key."""
    environment, keys = game(), []
    for guesses in (["b b d", "g g g"], ["g g g", "x", "b b d"]):
        play(environment, hand_task(), guesses)
        keys.append(environment.state_key())
    assert keys[0] == keys[1]
    words = every_word("bdfg", 3)
    assert knowledge_key(words, words.everything).startswith("64 words ")
    assert knowledge_key(words, words.everything[:2]) == "bbb bbd"
    assert len({knowledge_key(words, words.everything[start:]) for start in range(64)}) == 64


def test_turn_limit_truncates_unless_last_guess_solves() -> None:
    step = play(game(max_turns=2), hand_task(), ["bbb", "dbf"])[-1]
    assert (step.terminated, step.truncated, step.terms["places"]) == (True, False, 1.0)
    step = play(game(max_turns=2), hand_task(), ["bbb", "ddd"])[-1]
    assert (step.terminated, step.truncated, step.terms) == (False, True, {"success": 0.0, "places": 2 / 3})


def test_consistent_words_fit_all_marks_and_are_uniform() -> None:
    """Contract: with `consistent`, marks never contradict each other, and over tasks the hidden word is uniform."""
    environment, drawn = game(hidden="consistent"), Counter()
    for seed in range(600):
        environment.reset(hand_task(seed=seed))
        environment.step("b d f")
        if environment.state.rows and environment.state.rows[0][1] == (NOT, NOT, NOT):
            drawn[environment.hidden()] += 1
        while not environment.state.over:
            left = [environment.words.words[number] for number in environment.state.left]
            assert environment.hidden() in left
            environment.step(left[-1])
    assert drawn == {"ggg": sum(drawn.values())}
    first = Counter()
    for seed in range(1280):
        environment.reset(hand_task(seed=seed, letters="bdf"))
        first[environment.hidden()] += 1
    # 27 words: chi-square with 26 degrees of freedom is below 54.1 in 99.9 % of draws.
    assert len(first) == 27
    assert sum((count - 1280 / 27) ** 2 / (1280 / 27) for count in first.values()) < 54.1
