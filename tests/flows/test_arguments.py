"""Wrong arguments of commands are refused with one line that says what is allowed."""

from __future__ import annotations

import importlib
import sys

import pytest

import flows  # noqa: F401  (its settings must be there before Prefect is imported)
from flows.arguments import whole_number


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flows.lifecycle --jobs 0", "argument --jobs: must be a whole number from 1 to 64, not 0"),
        ("flows.shards evaluate --runner dask --shards 0", "argument --shards: must be a whole number at least 1, not 0"),
        ("flows.lifecycle --jobs 999", "from 1 to 64, not 999"),
        ("flows.pipeline --jobs -1", "argument --jobs: must be a whole number from 1 to 64, not -1"),
        ("flows.spread --jobs two", "argument --jobs: must be a whole number from 1 to 256, not two"),
        ("flows.budget --demo-cost 0", "argument --demo-cost: must be a whole number at least 1, not 0"),
        ("flows.compare --setting a --jobs 0", "argument --jobs"),
        ("flows.design --budget 0", "argument --budget: must be a whole number from 1 to 100000, not 0"),
        ("flows.serve --port 99999", "argument --port: must be a whole number from 1 to 65535, not 99999"),
        ("flows.local_server prefect --port 0", "argument --port"),
        ("stages.tracking.ui --report-port 99999", "argument --report-port: must be a whole number from 0 to 65535, not 99999"),
        ("stages.live serve --port 99999", "argument --port: must be a whole number from 1 to 65535, not 99999"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *given = line.split()
    main = importlib.import_module("stages.live.__main__" if module == "stages.live" else module).main
    monkeypatch.setattr(sys, "argv", [module, *given])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == (64 if module == "flows.compare" else 2), "64: 2 is an answer of flows.compare"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flows.budget --seeds 1 1", "budget: seeds: 1 given twice; runs of one seed are equal\n"),
        ("flows.spread --seeds 0 2 2", "spread: seeds: 2 given twice; runs of one seed are equal\n"),
        ("flows.spread --seeds -1 2", "spread: seeds.0: Input should be greater than or equal to 0\n"),
    ],
)
def test_equal_runs_do_not_count_as_several(
    line: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: intervals over seeds are of independent runs; the message is one line."""
    module, *given = line.split()
    monkeypatch.setattr(sys, "argv", [module, *given])
    assert importlib.import_module(module).main() > 0
    assert capsys.readouterr().err == message


def test_limits_are_allowed() -> None:
    assert [whole_number(1, 3)(text) for text in ("1", "3")] == [1, 3]


def test_the_report_can_be_left_out() -> None:
    from stages.tracking.ui import served

    assert served(["--report-port", "0"])[1] == 0
    assert served(["--report-port", "65535"])[1] == 65535
