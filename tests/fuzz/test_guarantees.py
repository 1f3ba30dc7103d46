"""docs/guarantees.md has the counts of docs/guarantees.json, and names tests and commands that exist."""

from __future__ import annotations

import re

from stages.params import ROOT

from . import page
from .outcomes import LOST, REFUSED, Outcome, Tally, clear, tried
from .suites import COUNTS


def test_the_page_shows_what_the_suites_counted() -> None:
    assert page.page() == page.PAGE.read_text(encoding="utf-8"), "run 'python -m tests.fuzz page'"
    figures = page.figures()
    assert set(figures) == set(COUNTS)
    for name, row in figures.items():
        assert row["tried"] == row["refused"] + row["accepted"] + row["lost"] > 0
        assert row["lost"] == 0, name
        assert f"--count {row['tried']} " in row["command"]


def test_what_the_page_names_is_there() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/.]+)(?:::(\w+))?`", text)
    assert len(named) > 12
    for file, test in named:
        assert (ROOT / file).exists(), file
        assert not test or f"def {test}(" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{test}"


def test_an_outcome_is_lost_unless_it_is_clear() -> None:
    """A traceback, a refusal without words, without the file's name or of endless length is lost, and counted so."""
    assert clear("a.yaml: 'seed' must be a number", "a.yaml").kind == REFUSED
    assert [clear(said, "a.yaml").kind for said in ("", "no", "a.yaml" + "x" * 9999)] == [LOST] * 3

    def fails() -> Outcome:
        raise RecursionError("deep")

    assert "RecursionError" in tried(fails).detail
    tally = Tally("params", 0)
    tally.add(7, "replaced", tried(fails))
    assert tally.row() == {"tried": 1, "refused": 0, "accepted": 0, "lost": 1, "seed": 0}
    assert tally.lost[0][:2] == (7, "replaced")


def test_a_case_that_hangs_is_lost() -> None:
    def hangs() -> Outcome:
        while True:
            pass

    assert "not done after 1 s" in tried(hangs, patience_s=1).detail
