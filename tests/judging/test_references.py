"""Rewards from references: the paper's worked numbers, what the reference code gets wrong, and stuffing."""

from __future__ import annotations

import pytest

from stages.judging.references import (
    StyleChecks,
    content_reward,
    extracted,
    keyword_share,
    length_penalty,
    length_ratio,
    occurrences,
    ordered_share,
    recall_share,
    style_reward,
)
from stages.records.reward_chain import RewardChain, Style
from stages.sandbox import Sandbox, SandboxSettings
from stages.sandbox.backends import SAFE
from stages.sandbox.probe import fault

WORDS = ("alpha", "beta", "gamma")
REFERENCE = "alpha then beta then gamma"
ONE = RewardChain((REFERENCE,), ((WORDS,),))


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("alpha beta gamma", 1.0),
        ("Alpha, BETA; gamma", 1.0),
        ("", 0.0),
        ("gamma beta alpha", 1 / 3),
        ("alpha gamma", 2 / 3),
        ("alpha alpha alpha beta gamma", 3 / 5),
        (f"{REFERENCE}. {REFERENCE}. {REFERENCE}.", 3 / 9),
        (REFERENCE, 1.0),
    ],
)
def test_worked_examples_of_one_key_point(answer: str, expected: float) -> None:
    assert content_reward(ONE, answer) == pytest.approx(expected)


def test_case_counts_only_where_asked() -> None:
    assert content_reward(ONE, "Alpha beta gamma", case_sensitive=True) == pytest.approx(2 / 3)


def test_key_word_absent_from_the_reference_scores_nothing() -> None:
    chain = RewardChain((REFERENCE,), ((("delta",),),))
    assert content_reward(chain, "delta") == 0.0
    assert ordered_share([], []) == 0.0
    assert ordered_share([], ["delta"]) == 0.0


def test_empty_lists_match_nothing() -> None:
    assert occurrences([], "a, b") == occurrences([""], "a, b") == []
    assert content_reward(RewardChain((REFERENCE,), (((),),)), "a, b.") == 0.0
    assert content_reward(RewardChain((REFERENCE,), ()), "a") == 0.0


def test_best_reference_of_each_key_point() -> None:
    """The paper's numbers: scores (0.2, 0.9) and (0.5, 0.1) give (0.9 + 0.5) / 2 = 0.7, the mean over points of the best of the
    references; the best mean of a reference would be 0.5, the mean of all 0.425. Then (1/3, 1) and (1, 0)."""
    lists = {
        letter: tuple(f"{letter}{number}" for number in range(count))
        for letter, count in zip("abcd", (5, 10, 2, 10), strict=True)
    }
    references = " ".join(lists["a"] + lists["c"]), " ".join(lists["b"] + lists["d"])
    answer = " ".join((*lists["a"][:1], *lists["b"][:9], *lists["c"][:1], *lists["d"][:1]))
    points = ((lists["a"], lists["b"]), (lists["c"], lists["d"]))
    scores = [
        [content_reward(RewardChain((text,), ((words,),)), answer) for text, words in zip(references, point, strict=True)]
        for point in points
    ]
    assert scores == [[0.2, 0.9], [0.5, 0.1]]
    assert content_reward(RewardChain(references, points), answer) == pytest.approx(0.7)
    chain = RewardChain(("alpha beta gamma", "gamma"), ((("alpha", "beta", "gamma"), ("gamma",)), (("gamma",), ("delta",))))
    assert content_reward(chain, "gamma") == pytest.approx(1.0)
    assert content_reward(RewardChain(chain.references, chain.key_points[:1]), "alpha gamma") == pytest.approx(1.0)


def test_key_words_of_a_later_reference_score_only_here() -> None:
    """The reference code counts occurrences in the first reference, so "feline" could never score."""
    chain = RewardChain(("the cat", "the feline"), ((("cat",), ("feline",)),))
    assert content_reward(chain, "a feline") == 1.0
    assert content_reward(chain, "a feline", compatible=True) == 0.0


def test_longer_key_words_go_first_and_signs_belong_to_words() -> None:
    words = ("risk", "risk management")
    assert occurrences(words, "good risk management") == ["risk management"]
    assert occurrences(words, "good risk management", compatible=True) == ["risk"]
    assert occurrences(["c"], "c++ or C") == ["c"]
    assert occurrences(["c"], "c++ or C", compatible=True) == ["c", "c"]


def test_limits() -> None:
    """The exact answer as the only key word is 0 or 1; recall ignores order; bleu reads whole references."""
    dot = RewardChain(("42",), ((("42",),),))
    assert [content_reward(dot, answer) for answer in ("42", "it is 42", "41")] == [1.0, 1.0, 0.0]
    assert content_reward(ONE, "gamma beta alpha", "recall") == 1.0
    assert recall_share([], ["a"]) == 0.0
    assert content_reward(ONE, REFERENCE, "bleu") == pytest.approx(1.0)
    assert content_reward(ONE, "gamma beta alpha", "bleu") == 0.0
    assert content_reward(ONE, REFERENCE, "none") == 0.0


STYLES = tuple(Style(name, weight, lambda text, name=name: name in text) for name, weight in (("a", 0.5), ("b", 0.3), ("c", 0.2)))


def test_style_weights() -> None:
    checks = StyleChecks()
    assert style_reward(RewardChain((), (), STYLES), "a c", checks) == pytest.approx(0.7)
    halved = tuple(Style(style.name, style.weight / 2, style.check) for style in STYLES)
    assert style_reward(RewardChain((), (), halved), "a c", checks) == pytest.approx(0.7), "weights count by their sum"
    assert style_reward(ONE, "a", checks) == 0.0, "no styles"
    raising = Style("raises", 1.0, lambda text: 1 / 0 > 0)
    assert style_reward(RewardChain((), (), (*STYLES, raising)), "a b c", checks) == pytest.approx(0.5)
    assert checks.failures == 1


@pytest.mark.skipif(all(fault(name) for name in SAFE), reason="no sandbox on this machine")
def test_predicates_of_a_model_run_in_the_sandbox() -> None:
    """Contract: one function that returns a bool; whatever else it does counts as failed, and the run goes on."""
    checks = StyleChecks(Sandbox(SandboxSettings(steps=20_000, wall_seconds=5.0)))
    good = "import re\nLIMIT = 3\ndef short(text):\n    return len(re.findall(r'\\w+', text)) <= LIMIT"
    assert checks(Style("good", 1.0, source=good), "one two three")
    assert not checks(Style("good", 1.0, source=good), "one two three four")
    assert checks.failures == 0
    bad = {
        "raises": "def f(text):\n    return 1 / 0",
        "loops": "def f(text):\n    while True:\n        pass",
        "truthy": "def f(text):\n    return 'yes'",
        "two functions": "def f(text):\n    return True\ndef g(text):\n    return True",
        "none": "LIMIT = 3",
        "network": "import socket\ndef f(text):\n    return bool(socket.create_connection(('127.0.0.1', 22)))",
    }
    for number, source in enumerate(bad.values(), start=1):
        assert not checks(Style("bad", 1.0, source=source), "text")
        assert checks.failures == number
    checks.close()


def test_stuffing_is_shown() -> None:
    """A bare list of key words scores as much as a sentence, and its share of key words shows it."""
    assert content_reward(ONE, "alpha beta gamma") == content_reward(ONE, REFERENCE) == 1.0
    assert keyword_share(ONE, "alpha beta gamma") == 1.0
    assert keyword_share(ONE, REFERENCE) == pytest.approx(3 / 5)
    assert keyword_share(ONE, "") == 0.0


def test_lexical_limits_are_what_they_are() -> None:
    """Known weakness: meaning that is not in the key words does not count."""
    chain = RewardChain(("low risk, high yield",), ((("risk", "yield"),),))
    assert content_reward(chain, "high risk, low yield") == 1.0


def test_length_term() -> None:
    assert [length_penalty(ratio) for ratio in (0.9, 1.0, 1.2)] == [0.0] * 3
    assert length_penalty(0.5) == pytest.approx(0.5)
    assert length_penalty(2.0) == pytest.approx(1.0)
    assert length_ratio(ONE, "one two") == pytest.approx(0.4)
    assert length_ratio(RewardChain(("",), ()), "one") == 0.0


def test_extracted_chain_rewards_its_reference() -> None:
    for text in ("The capital of Chad is N'Djamena. It lies on the Chari river.", "take the key", "north"):
        chain = extracted([text, text.upper()])
        assert content_reward(chain, text) == 1.0
        assert style_reward(chain, text, StyleChecks()) == pytest.approx(1.0)
        assert content_reward(chain, "something else entirely") == 0.0
    with pytest.raises(ValueError, match="at least one reference"):
        extracted([])


def test_inconsistent_chains_are_refused() -> None:
    with pytest.raises(ValueError, match="key words for each"):
        RewardChain(("a", "b"), ((("a",),),))
    for style in (Style("x", 1.0), Style("x", 1.0, bool, "def f"), Style("x", -1.0, bool)):
        with pytest.raises(ValueError, match="weight"):
            RewardChain((), (), (style,))
