"""docs/guarantees.md shows the counts of docs/guarantees.json, and names existing tests and commands."""

from __future__ import annotations

import re

from stages.params import ROOT

from . import page
from .outcomes import LOST, REFUSED, Outcome, Tally, check_refusal, run_case
from .suites import COUNTS


def test_page_shows_the_recorded_counts() -> None:
    assert page.page() == page.PAGE.read_text(encoding="utf-8"), "run 'python -m tests.fuzz page'"
    figures = page.figures()
    assert set(figures) == set(COUNTS)
    for name, row in figures.items():
        assert row["tried"] == row["refused"] + row["accepted"] + row["lost"] > 0
        assert row["lost"] == 0, name
        assert f"--count {row['tried']} " in row["command"]


def test_page_names_existing_tests() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", text)
    assert len(named) > 12
    for file, test in named:
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_unclear_refusal_is_lost() -> None:
    """A traceback, and an empty or overlong message or one that does not name the file, count as lost."""
    assert check_refusal("a.yaml: 'seed' must be a number", "a.yaml").kind == REFUSED
    assert [check_refusal(message, "a.yaml").kind for message in ("", "no", "a.yaml" + "x" * 9999)] == [LOST] * 3

    def fails() -> Outcome:
        raise RecursionError("deep")

    assert "RecursionError" in run_case(fails).detail
    tally = Tally("params", 0)
    tally.add(7, "replaced", run_case(fails))
    assert tally.row() == {"tried": 1, "refused": 0, "accepted": 0, "lost": 1, "seed": 0}
    assert tally.lost[0][:2] == (7, "replaced")


def test_hanging_case_is_lost() -> None:
    def hangs() -> Outcome:
        while True:
            pass

    assert "not done after 1 s" in run_case(hangs, timeout_s=1).detail
