"""The response that a judge reads of a message with thoughts: the paper's worked example."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from stages.judging.episodes import attributes, candidate, perceived_quality
from stages.judging.extraction import MISSING, reader, response
from stages.judging.settings import Extraction
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
    assert candidate(spoken("x", terminated=False)).answer == ""


def test_an_unfinished_message_is_read_too() -> None:
    """Contract: of an episode that was cut off within its thought, a strict judge reads that the response is missing, and a
    lenient one the thought."""
    cut = spoken("<think> the rival is", terminated=False)
    strict, lenient = (reader(Extraction(strict=strict), Thinking()) for strict in (True, False))
    assert candidate(cut, strict).answer == MISSING
    assert candidate(cut, lenient).answer == "<think> the rival is"
    assert candidate(Episode("e", "t", "d", "g", 0, "", "", 1.0, 1.0, 0), strict).answer == "", "no turn, no message"


class Counting:
    """The quality is the number of words of the last action, and so is an attribute."""

    def quality(self, task: Any, actions: Sequence[str]) -> float:
        return float(len(actions[-1].split()))

    def attributes(self, task: Any, actions: Sequence[str]) -> dict[str, float]:
        return {"words": self.quality(task, actions)}


def test_a_program_perceives_what_the_judge_reads() -> None:
    """Contract: `extract` bears on a program judge, by principles too: five words instead of the action's one."""
    domain: Any = Counting()
    episode = spoken("<think> a </think> one two three four five")
    read = reader(Extraction(), Thinking())
    task: Any = None
    assert perceived_quality(domain, task, episode) == 1.0
    assert perceived_quality(domain, task, episode, read) == 5.0
    assert attributes(domain, task, episode) == {"correct": 1.0, "short": -0.2, "modest": 0.0, "words": 1.0}
    assert attributes(domain, task, episode, read) == {"correct": 5.0, "short": -1.0, "modest": 0.0, "words": 5.0}


QUOTING = "<think> I end with </think> and then go </think> take the key"


@pytest.mark.parametrize("occurrence", ["first", "last"])
@pytest.mark.parametrize(
    "text",
    [
        QUOTING,
        "<think> a </think> go",
        "<think> a </think> <response> go </response>",
        "<think> a </think> b <think> c </think> d",
    ],
)
@pytest.mark.parametrize("marks", [(), MARKS])
def test_judge_and_environment_read_the_same(text: str, occurrence, marks: tuple[str, ...]) -> None:
    """Contract: by the markers of model.thinking the judge reads what the environment receives."""
    thinking = Thinking(response=marks, occurrence=occurrence)
    assert reader(Extraction(strict=False), thinking)(text) == parse_turn(text, thinking).action


def test_one_setting_says_which_marker() -> None:
    assert reader(Extraction(), Thinking())(QUOTING) == "take the key"
    assert reader(Extraction(), Thinking(occurrence="first"))(QUOTING) == "and then go </think> take the key"
    own = Extraction(marker="</think>")
    assert reader(own, Thinking())(QUOTING) == "take the key", "a marker of its own is read by the same occurrence"
    assert reader(own, None)(QUOTING) == "and then go </think> take the key"
    assert reader(Extraction(marker="</think>", occurrence="last"), None)(QUOTING) == "take the key"
    for extract in ({"occurrence": "first"}, {"marker": "", "occurrence": "last"}):
        with pytest.raises(ValueError, match=r"set model\.thinking\.occurrence for both"):
            Extraction.model_validate(extract)


@pytest.mark.parametrize(
    ("text", "strict", "lenient"),
    [
        ("<think> a </think> go", "go", "go"),
        ("<think> a </think> b <think> c", MISSING, "<think> a </think> b <think> c"),
        ("go", MISSING, "go"),
        ("<think> a", MISSING, "<think> a"),
        ("<think> a </think>", "", ""),
    ],
)
def test_reading_by_the_thought_s_markers(text: str, strict: str, lenient: str) -> None:
    assert reader(Extraction(), Thinking())(text) == strict
    assert reader(Extraction(strict=False), Thinking())(text) == lenient
    assert reader(Extraction(strict=False), Thinking(), strict=True)(text) == strict


def test_strict_reading_needs_the_response_s_markers() -> None:
    thinking = Thinking(response=MARKS)
    assert reader(Extraction(), thinking)("<think> a </think> go") == MISSING
    assert reader(Extraction(), thinking)("<think> a </think> <response> go </response>") == "go"
    assert reader(Extraction(end="."), thinking)("<think> a </think> <response> go. on </response>") == "go"


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
