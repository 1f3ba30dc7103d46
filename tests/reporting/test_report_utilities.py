"""The chapter on preferences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.params import Params
from stages.reporting.blocks import Table, Text
from stages.reporting.inputs import Inputs, load_inputs
from stages.reporting.sections.utilities import shown, utilities_section

OUTCOMES = ["a key", "a lamp", "a box", "nothing"]


def model(mu: list[float], **changes: Any) -> dict[str, Any]:
    numbers = {"pairs": 5.0, "confidence": 0.875, "accuracy": 1.0, "log_loss": 0.2, "soft_cycles": 0.04, "hard_cycles": 0.0}
    return {**numbers, "order_consistency": 0.75, "indifferent": False, "mu": mu, "variance": [0.1] * 4, "choices": [], **changes}


@pytest.fixture(scope="module")
def asked(full_run: tuple[Path, Params]) -> Inputs:
    inputs = load_inputs(*full_run)
    models = {
        "base": model([0.0] * 4, indifferent=True),
        "sft": model([1.0, 0.5, -0.5, -1.0]),
        "merged": model([-1.0, 0.5, 1.5, -1.0]),
    }
    evaluation = {**inputs.evaluation, "utilities": {"outcomes": OUTCOMES, "models": models}}
    control = {"kind": "soft", "questions": 12.0, "held_out": 3.0, "agreement_before": 0.5, "agreement_after": 1.0}
    return replace(inputs, evaluation=evaluation, sft={**(inputs.sft or {}), "control": control})


def test_without_questions_there_is_no_chapter(full_run: tuple[Path, Params]) -> None:
    assert utilities_section(load_inputs(*full_run)) is None


def test_coherence_utilities_changes_and_control(asked: Inputs) -> None:
    section = utilities_section(asked)
    assert section is not None
    tables = {block.title: block for block in section.blocks if isinstance(block, Table)}
    texts = " ".join(block.text for block in section.blocks if isinstance(block, Text))
    assert list(tables["Coherence of choices"].rows[1]) == ["sft", "5", "87.5 %", "100.0 %", "0.2", "4.0 %", "0.0 %", "75.0 %"]
    assert list(tables["Utilities"].rows[0]) == ["a box", "0", "-0.5", "1.5", "2"], (
        "by the last model, which is compared with sft"
    )
    assert "merged against sft: most preferred more, a box (+2.00); less, a key (-2.00)" in texts
    assert "All choices of base are equally likely" in texts
    assert "agree with the assembly on 100.0 % of 3 held-out pairs, before on 50.0 %" in texts


def test_of_many_outcomes_the_extremes_are_shown() -> None:
    assert shown([0.0, 2.0, 1.0, 3.0, -1.0], most=3) == [3, 1, 4]
