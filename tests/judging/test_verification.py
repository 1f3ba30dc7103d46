"""Scores of verifiers: the paper's worked examples, rules, and a small generative verifier that is fitted."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.agent.policy import load_policy
from stages.judging.fit_verifier import OPENERS, divided, fit, labelled_pairs, logged_pairs, measured
from stages.judging.generative import GenerativeVerifier
from stages.judging.verification import Verdict, contains, jaccard, last_line, verdict, zscores


def test_soft_and_binary_scores_of_the_paper() -> None:
    right, wrong, other = Verdict(0.9, 0.05, True), Verdict(0.2, 0.7, False), Verdict(0.1, 0.1, None)
    assert [one.score("soft") for one in (right, wrong, other)] == pytest.approx([0.9, 0.3, 0.0])
    assert [one.score("binary") for one in (right, wrong, other)] == [1.0, 0.0, 0.0]
    assert other.score("soft", 0.25) == 0.25


def test_soft_score_does_not_depend_on_the_draw_if_the_labels_have_all_mass() -> None:
    assert verdict(0.6, 0.4, 0.1).score("soft") == pytest.approx(verdict(0.6, 0.4, 0.9).score("soft")) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("uniform", "drawn"), [(0.0, True), (0.19, True), (0.2, False), (0.49, False), (0.5, None), (0.99, None)]
)
def test_the_draw_follows_the_probabilities(uniform: float, drawn: bool | None) -> None:
    assert verdict(0.2, 0.3, uniform).drawn is drawn


def test_renormalised_labels_leave_nothing_else() -> None:
    found = verdict(0.2, 0.3, 0.99, renormalised=True)
    assert (found.right, found.wrong, found.drawn) == (pytest.approx(0.4), pytest.approx(0.6), False)


def test_standardised_scores() -> None:
    assert zscores([0.9, 0.1, 0.5, 0.5]) == pytest.approx([2**0.5, -(2**0.5), 0.0, 0.0])
    assert zscores([0.4] * 4) == [0.0] * 4
    assert zscores([0.0, 0.0]) == [0.0, 0.0]
    assert zscores([]) == []


def test_rules() -> None:
    assert contains("paris", "Paris, France")
    assert jaccard("paris", "paris france") == 0.5
    assert not contains("paris", "lyon")
    assert jaccard("paris", "lyon") == 0.0
    assert contains("new york", "in New York!")
    assert not contains("new york", "york new")
    assert not contains("art", "paris departs")
    assert not contains("", "anything")
    assert jaccard("", "") == 0.0


def test_lists_of_candidates_can_be_bounded() -> None:
    assert contains("paris", "lyon nice paris lille")
    assert not contains("paris", "lyon nice paris lille", most_words=3)


@pytest.mark.parametrize(("text", "line"), [("a\nb", "b"), ("a\n b \n\n  ", "b"), ("", ""), (" \n", "")])
def test_last_line(text: str, line: str) -> None:
    assert last_line(text) == line


QUESTIONS = {f"t{index}": f"where is the key {index}" for index in range(40)}
PLACES = ("kitchen", "barn", "north room", "lamp box")
REFERENCES = {name: [f"answer {PLACES[index % 4]}"] for index, name in enumerate(sorted(QUESTIONS))}


def test_labelled_pairs_are_right_and_wrong_by_turns() -> None:
    """Contract: a wrong answer is no reference of its task; the same pairs for the same seed; tasks are held out whole."""
    pairs = labelled_pairs(QUESTIONS, {**REFERENCES, "t0": []}, 0)
    assert pairs == labelled_pairs(QUESTIONS, {**REFERENCES, "t0": []}, 0) != labelled_pairs(QUESTIONS, REFERENCES, 1)
    assert [pair.right for pair in pairs] == [True, False] * 39
    for pair in pairs:
        assert (pair.answer in REFERENCES[pair.task_id]) == pair.right
    assert {pair.answer for pair in pairs} & {*OPENERS}
    known, held = divided(pairs, 0)
    assert sorted(known + held, key=pairs.index) == pairs
    assert not {pair.task_id for pair in known} & {pair.task_id for pair in held}
    assert held


def test_logged_pairs_have_the_labels_of_the_episodes() -> None:
    """Every recorded answer with its label, one reference per task as a right answer, and openers as wrong ones."""
    answers = {"t1": [("answer barn", True), ("answer well", False)], "elsewhere": [("x", True)]}
    pairs = logged_pairs(QUESTIONS, {**REFERENCES, "t0": []}, answers, 0)
    assert pairs == logged_pairs(QUESTIONS, {**REFERENCES, "t0": []}, answers, 0)
    assert {pair.task_id for pair in pairs} == {*QUESTIONS} - {"t0"}
    openers = [pair for pair in pairs if pair.answer in OPENERS]
    assert openers
    assert not any(pair.right for pair in openers)
    of_task = [(pair.answer, pair.right) for pair in pairs if pair.task_id == "t1" and pair not in openers]
    assert of_task == [*answers["t1"], (REFERENCES["t1"][0], True)]


def test_fitted_verifier_tells_right_from_wrong_on_other_tasks(tiny_policy: Path) -> None:
    verifier = GenerativeVerifier(load_policy(tiny_policy), ["A", "B"], 128)
    known, held = divided(labelled_pairs(QUESTIONS, REFERENCES, 0), 0)
    losses = fit(verifier, known, 150, 3e-3, 0)
    assert sum(losses[-10:]) / 10 < 0.5 * sum(losses[:3]) / 3
    found = measured(verifier, held)
    assert found["pairs"] == len(held)
    assert found["accuracy"] >= 0.75
    again = GenerativeVerifier(load_policy(tiny_policy), ["A", "B"], 128)
    assert fit(again, known, 5, 3e-3, 0) == losses[:5]
    with pytest.raises(ValueError, match="no task has references"):
        fit(again, [], 1, 3e-3, 0)


def test_probabilities_do_not_depend_on_other_prompts(tiny_policy: Path) -> None:
    verifier = GenerativeVerifier(load_policy(tiny_policy), ["A", "B"], 128)
    prompts = [verifier.prompt_tokens("where", "answer kitchen", text) for text in ("answer kitchen", "answer barn", "no")]
    found = verifier.probabilities(prompts)
    assert found == [verifier.probabilities([prompt])[0] for prompt in prompts]
    assert all(0 < right < 1 and 0 < wrong < 1 for right, wrong in found)


@pytest.mark.parametrize("labels", [["YES it is", "NO"], ["A", "A"]])
def test_labels_that_are_not_two_tokens_are_refused(tiny_policy: Path, labels: list[str]) -> None:
    with pytest.raises(ValueError, match=r"rl.verifier.labels .* two different single tokens"):
        GenerativeVerifier(load_policy(tiny_policy), labels, 128)
