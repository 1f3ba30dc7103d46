"""The response that a judge reads of a message with thoughts: the paper's worked example."""

from __future__ import annotations

import pytest

from stages.judging.episodes import candidate
from stages.judging.extraction import MISSING, response
from stages.records.episode import Episode, TurnRecord
from stages.records.thinking import Thinking, parse_turn

MARKS = ("<response>", "</response>")


@pytest.mark.parametrize(
    ("text", "lenient", "strict"),
    [
        ("<think>p</think> <response> hi </response>", "hi", "hi"),
        ("hi", "hi", MISSING),
        ("<response>hi", "hi", MISSING),
        ("<response>a<response>b</response>", "a<response>b", "a<response>b"),
    ],
)
def test_markers(text: str, lenient: str, strict: str) -> None:
    assert response(text, *MARKS, strict=False).strip() == lenient
    assert response(text, *MARKS) == strict


def test_the_last_marker_on_request() -> None:
    assert response("<response>a<response>b</response>", *MARKS, occurrence="last") == "b"


def test_without_markers_the_whole_text_is_the_response() -> None:
    assert response("a thought and an answer", "") == "a thought and an answer"


def test_after_a_thought() -> None:
    assert response("<think>\n z \n</think>\n\n y", "</think>") == "y"
    assert response("<think> no end", "</think>", strict=False) == "<think> no end"


def spoken(message: str, terminated: bool = True) -> Episode:
    made = Episode("e", "t", "d", "g", 0, "", "", 1.0, 1.0, 0, terminated=terminated)
    made.turns.append(TurnRecord("action", "", True, 0.0, 0.0, "", "action", 0, 0))
    made.messages = [{"role": "user", "content": "task"}, {"role": "assistant", "content": message}]
    return made


def test_candidates_depend_on_the_response_alone() -> None:
    """Contract: two outputs with equal responses and different thoughts are the same to a judge."""
    one, other = (
        candidate(spoken(f"<think> {thought} </think> go"), lambda text: response(text, "</think>")) for thought in "ab"
    )
    assert one == other
    assert one.answer == "go"
    assert candidate(spoken("<think> a </think> go")).answer == "action", "without extraction: what the environment received"
    assert candidate(spoken("x", terminated=False), lambda text: "read").answer == ""


def test_the_environment_receives_what_is_between_the_response_s_markers() -> None:
    marks = Thinking(response=MARKS)
    assert parse_turn("<think> z </think> <response> go east </response>", marks).action == "go east"
    assert parse_turn("<think> z </think> go east", marks).action == "go east"
    assert parse_turn("<think> z </think> <response> go east", marks).action == "go east"
    assert Thinking().model_dump() == {"start": "<think>", "end": "</think>"}, "unset keys change no hash"


@pytest.mark.parametrize("given", [["a"], ["a", "a"], ["a", ""], ["a", "b", "c"]])
def test_response_markers_are_two(given: list[str]) -> None:
    with pytest.raises(ValueError, match="response"):
        Thinking.model_validate({"response": given})
