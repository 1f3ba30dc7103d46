"""stages.records.task: the opening of an episode and its success."""

from __future__ import annotations

from stages.records.task import SUCCESS_TERM, opening, succeeded


def test_opening_joins_task_and_observation():
    assert opening("find the key", "a room") == "find the key\na room"
    assert opening("", "a room") == "a room"
    assert opening("find the key", "") == "find the key"


def test_success_is_a_return_of_one_unless_a_term_overrides_it():
    assert succeeded(1.0, {})
    assert succeeded(0.6 + 0.4, {"exact_match": 0.0})
    assert not succeeded(0.9, {"won": 1.0})
    assert succeeded(-3.0, {SUCCESS_TERM: 1.0})
    assert not succeeded(2.0, {SUCCESS_TERM: 0.0})
