"""Scores of verifiers: the paper's worked examples, rules, and a small generative verifier that is fitted."""

from __future__ import annotations

from math import exp, inf, log
from pathlib import Path
from random import Random

import pytest

from stages.agent.policy import load_policy
from stages.environments.briefing import BriefingDomain
from stages.environments.briefing.brief import BEST, Asked, mistakes
from stages.judging.fit_verifier import OPENERS, divided, fit, labelled_pairs, logged_pairs, measured, swapped
from stages.judging.generative import GenerativeVerifier
from stages.judging.verification import Verdict, contains, jaccard, last_line, verdict, zscores


def test_soft_and_binary_scores_of_the_paper() -> None:
    right, wrong, other = Verdict(0.9, 0.05, True), Verdict(0.2, 0.7, False), Verdict(0.1, 0.1, None)
    assert [one.score("soft") for one in (right, wrong, other)] == pytest.approx([0.9, 0.3, 0.0])
    assert [one.score("binary") for one in (right, wrong, other)] == [1.0, 0.0, 0.0]
    assert other.score("soft", 0.25) == 0.25


def test_soft_score_does_not_depend_on_the_draw_if_the_labels_have_all_mass() -> None:
    labels = log(0.6), log(0.4)
    assert verdict(*labels, 0.1).score("soft") == pytest.approx(verdict(*labels, 0.9).score("soft")) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("uniform", "drawn"), [(0.0, True), (0.19, True), (0.2, False), (0.49, False), (0.5, None), (0.99, None)]
)
def test_the_draw_follows_the_probabilities(uniform: float, drawn: bool | None) -> None:
    assert verdict(log(0.2), log(0.3), uniform).drawn is drawn


def test_renormalised_labels_leave_nothing_else() -> None:
    found = verdict(log(0.2), log(0.3), 0.99, renormalised=True)
    assert (found.right, found.wrong, found.drawn) == (pytest.approx(0.4), pytest.approx(0.6), False)


def test_labels_whose_probabilities_are_0_in_floats_are_renormalised() -> None:
    """exp(-1000) is 0: the share of right is 2 / 3 all the same. Without renormalising, neither is drawn."""
    found = verdict(-1000.0 + log(2), -1000.0, 0.5, renormalised=True)
    assert (found.right, found.wrong, found.drawn) == (pytest.approx(2 / 3), pytest.approx(1 / 3), True)
    assert verdict(-1000.0, -2000.0, 0.999, renormalised=True) == Verdict(1.0, 0.0, True)
    assert verdict(-1000.0, -1000.0, 0.0) == Verdict(0.0, 0.0, None)
    with pytest.raises(ValueError, match="-inf and -inf"):
        verdict(-inf, -inf, 0.5, renormalised=True)


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


def test_wrong_answers_have_no_other_wording_than_right_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each wording of briefs opens about as many wrong answers as right ones, many wrong ones name the task's entity, and none
    states what a reference states; some have no content at all."""
    monkeypatch.chdir(tmp_path)
    domain = BriefingDomain()
    tasks = {task.task_id: task for task in domain.build(list(domain.recipes(150, 0)), Path("unused"), 1)}
    questions = {name: task.prompt for name, task in tasks.items()}
    references = {name: domain.references(task) for name, task in tasks.items()}
    pairs = labelled_pairs(questions, references, 0, {name: domain.mistakes(task) for name, task in tasks.items()})
    right, wrong = ([pair for pair in pairs if pair.right is label] for label in (True, False))
    assert len(right) == len(wrong) == 450
    opened = [sum(pair.answer.startswith("Of ") for pair in side) for side in (right, wrong)]
    assert all(120 < count < 180 for count in opened), "of 450"
    assert 0.3 < sum(tasks[pair.task_id].spec["entity"] in pair.answer for pair in wrong) / len(wrong) < 0.8
    assert {pair.answer for pair in wrong} & {*questions.values()}, "a question again"
    assert {pair.answer for pair in wrong} & {": ; .", "has and .", "Of , its is , its is ."}, "a reference without content"
    for pair in wrong:
        assert domain.quality(tasks[pair.task_id], [pair.answer]) < BEST - 1e-9


def test_mistakes_of_a_brief_are_wrong_in_every_wording() -> None:
    asked = Asked("Kelmar", (("ally", "Corbas"), ("founder", "Dorvin"), ("rival", "Teldin")), ("rival", "founder"), "list", 9)
    found = mistakes(asked)
    assert found[::3] == [
        "Kelmar: rival Teldin; founder Dorvin; ally Corbas.",
        "Kelmar: founder Dorvin; rival Teldin.",
        "Kelmar: rival Teldin.",
        "Kelmar: rival Dorvin; founder Teldin.",
    ]
    assert found[5] == "Of Kelmar, its founder is Dorvin, its rival is Teldin."
    alone = Asked("Kelmar", (("ally", "Corbas"),), ("ally",), "list", 9)
    assert mistakes(alone) == []


def test_a_word_of_another_answer_takes_its_place() -> None:
    found = {swapped("Kelmar: ally Corbas.", "Dorvin: ally Teldin.", Random(seed)) for seed in range(9)}
    assert found == {"Dorvin: ally Corbas.", "Kelmar: ally Teldin."}
    assert swapped("a b", "A b c", Random(0)) == "a b"


def test_logged_pairs_have_the_labels_of_the_episodes() -> None:
    """Every recorded answer with its label, one reference per task as a right answer, and openers as wrong ones."""
    answers = {"t1": [("answer barn", True), ("answer well", False)], "elsewhere": [("x", True)]}
    pairs = logged_pairs(QUESTIONS, {**REFERENCES, "t0": []}, answers, 0)
    assert pairs == logged_pairs(QUESTIONS, {**REFERENCES, "t0": []}, answers, 0)
    assert {pair.task_id for pair in pairs} == {*QUESTIONS} - {"t0"}
    empty = {*OPENERS, *QUESTIONS.values(), "answer"}
    openers = [pair for pair in pairs if pair.answer in empty]
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
    found = verifier.logprobs(prompts)
    assert found == [verifier.logprobs([prompt])[0] for prompt in prompts]
    assert all(right < 0 and wrong < 0 and exp(right) + exp(wrong) < 1 for right, wrong in found)


@pytest.mark.parametrize("labels", [["YES it is", "NO"], ["A", "A"]])
def test_labels_that_are_not_two_tokens_are_refused(tiny_policy: Path, labels: list[str]) -> None:
    with pytest.raises(ValueError, match=r"rl.verifier.labels .* two different single tokens"):
        GenerativeVerifier(load_policy(tiny_policy), labels, 128)
