"""INSPO: which candidates are worth an episode, on which questions they are verified, and centred weights."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from stages.agent.instructions import QUESTION, fault
from training.instruction_sources import EVOLVING, episodes_of, playing, source_of, turn
from training.toys import letter_tasks


def test_candidates_are_rejected_before_any_episode() -> None:
    """Contract: no play for a candidate without its placeholder, too long, known, or with an answer."""
    source = source_of(lambda *_: pytest.fail("an episode was played"), max_words=4)
    texts = ["Look.", f"{QUESTION} {QUESTION}", f"a b c d e {QUESTION}", QUESTION, f"Say rome {QUESTION}"]
    assert source.checked([(text, 0) for text in texts], 2) == []
    assert dict(source.counts) == {"no_question": 2, "too_long": 1, "known": 1, "tells_answer": 1}
    (kept,) = source.checked([(f"Go. {QUESTION}", 0), (f"Go. {QUESTION}", 1)], 2)
    assert (kept.number, kept.parent, source.counts["known"]) == (3, 0, 2)
    assert fault(f"Romeo {QUESTION}", 1) is None


@pytest.mark.parametrize(
    ("text", "tells"),
    [
        (f"Say Kelmar. {QUESTION}", True),
        (f"(Kelmar) {QUESTION}", True),
        (f'Try "Kelmar", first. {QUESTION}', True),
        (f"Say KEL-MAR {QUESTION}", True),
        (f"Say Kelmaria. {QUESTION}", False),
        (f"{QUESTION}, in the USA", True),
        (f"In United States. {QUESTION}", True),
        (f"Think of 1.284 million. {QUESTION}", True),
        (f"Think of 1.285 million. {QUESTION}", False),
        (f"Write valid actions. {QUESTION}", False),
    ],
)
def test_answers_are_found_behind_punctuation_and_in_all_accepted_forms(text: str, tells: bool) -> None:
    accepted = ["the United States", "USA"]
    specs = [{"answer": "Kelmar"}, {"answer": accepted[0], "accepted": accepted}, {"answer": "1,284,000"}]
    source = source_of()
    for task, spec in zip(letter_tasks(3), specs, strict=True):
        source.inputs.tasks[task.task_id] = replace(task, spec=spec)  # type: ignore[index]
    assert bool(source.checked([(text, 0)], 2)) is not tells
    assert source.counts["tells_answer"] == int(tells)


def test_the_word_question_of_the_placeholder_is_no_answer() -> None:
    source = source_of()
    source.inputs.tasks["t"] = replace(letter_tasks(1)[0], spec={"answer": "question"})  # type: ignore[index]
    assert source.checked([(f"Go. {QUESTION}", 0)], 2)
    assert not source.checked([(f"Read the question. {QUESTION}", 0)], 2)


def test_centred_rewards_are_less_the_questions_success() -> None:
    """Rewards 1 on questions of success 0.5: w = 0.9 * 0 + 0.1 * (1 - 0.5); the next time, their success is 0.75."""
    source = source_of(seeds=[QUESTION], population=1, centre=True)
    drawn = source.draw(0)
    source.observe(0, episodes_of(source, {0: 1.0}))
    assert source.best.weight == pytest.approx(0.05)
    assert {source.sampler.success[task.task_id] for task in drawn} == {0.75}
    assert source.metrics()["instruction_entropy"] == 0.0


def test_centred_weights_start_where_centred_rewards_are() -> None:
    """Contract: an instruction that is as good as the questions' success keeps its weight, so that unused ones do not win. First
    weights 0, used with rewards 0.5 at success 0.5: 0.9 * 0 + 0.1 * 0. From 0.5 it would be 0.45, against an unused 0.5."""
    source = source_of(**{**EVOLVING, "centre": True})
    assert [one.weight for one in source.population] == [0.0, 0.0]
    source.draw(0)
    source.drawn = {task_id: (base, 0) for task_id, (base, _) in source.drawn.items()}
    source.observe(0, episodes_of(source, {0: 0.5}))
    assert [one.weight for one in source.population] == [0.0, 0.0]
    assert source_of(**{**EVOLVING, "centre": True, "first_weight": 0.2}).best.weight == 0.2
    assert source_of(**EVOLVING).best.weight == 0.5


def test_evolution_waits_for_questions_outside_the_buffer() -> None:
    """Contract: candidates are verified on verify.questions questions that the buffer does not hold, on no fewer and no others.
    Of 12 questions the buffer (capacity 10) holds 10, then 9."""
    asked: list[Any] = []
    source = source_of(playing(asked, "Never"), **{**EVOLVING, "buffer": 10, "min_trials": 1})
    for number in range(10):
        source.buffer.add(0, sorted(source.inputs.tasks)[number], "find it", [turn("go")] * 3, 0.5, False)
    source.begin(1)
    assert dict(source.counts) == {}
    for step in (2, 3):
        source.begin(step)
    assert (asked, source.counts["steps_waited"], source.counts["written"]) == ([], 2, 0)
    other = source_of(playing(asked, "Never"), **{**EVOLVING, "buffer": 10, "min_trials": 1})
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    other.buffer.add(0, sorted(source.inputs.tasks)[1], "find it", [turn("go")] * 3, 0.0, False)
    assert other.unseen() == [sorted(other.inputs.tasks)[number] for number in (0, 10, 11)]
    other.begin(3)
    assert {request.task.task_id.split("+")[0] for request in asked} == set(other.unseen())
    assert other.counts["written"] == 4
    other.begin(5)
    assert other.counts["written"] == 4, "evolved once"


def test_too_few_questions_to_verify_on_are_refused() -> None:
    verify = {"questions": 13}
    with pytest.raises(ValueError, match=r"verify\.questions is 13, but toy has only 12 training tasks .* raise curate\.train"):
        source_of(**{**EVOLVING, "verify": verify})
    source_of(**{**EVOLVING, "verify": verify, "evolve_every": 4})
    source_of(evolve_every=0)  # of the default verify.questions, there are too few
    source_of(seeds=[QUESTION], population=1)
