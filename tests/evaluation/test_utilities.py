"""evaluate.utilities: every model is asked once, and the figures are the same from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stages.evaluation import utilities
from stages.evaluation.utilities import utilities_of
from stages.judging.utility_settings import Utilities
from stages.params import parse_params
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker

SECTION = {
    "outcomes": ["a key", "a lamp", "a box", "a door", "a barn"],
    "options": ["a", "b"],
    **{"epochs": 20, "lotteries": 5, "triads": 5},
}


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    (tmp_path / "params.yaml").write_text("{}\n")
    values: dict[str, Any] = {"domains": ["search"], "per_domain": {"search": {}}, "model": {"max_length": 128}}
    return StageContext("evaluate", None, parse_params(values), tmp_path, Tracker())


def test_models_with_the_same_weights_are_asked_once_and_repeat(context: StageContext, tiny_policy: Path, monkeypatch) -> None:
    calls = []
    asked = utilities._asked
    monkeypatch.setattr(utilities, "_asked", lambda *given: calls.append(given) or asked(*given))
    folders = {"sft": tiny_policy, "merged": tiny_policy, "sft+q": tiny_policy}
    found = utilities_of(context, folders, Utilities.model_validate(SECTION))
    assert found["outcomes"] == SECTION["outcomes"]
    assert list(found["models"]) == ["sft", "merged"]
    assert found["models"]["sft"] == found["models"]["merged"]
    assert sum(found["models"]["sft"]["mu"]) == pytest.approx(0.0, abs=1e-4)
    assert -1 <= found["models"]["sft"]["lottery_r"] <= 1
    again = utilities_of(context, folders, Utilities.model_validate(SECTION))
    assert again == found
    assert len(calls) == 1, "the second time from the checkpoint"


def test_models_that_are_not_evaluated_are_refused(context: StageContext, tiny_policy: Path) -> None:
    with pytest.raises(ValueError, match=r"evaluate\.utilities\.models \['rl@x'\] names none of the evaluated models sft"):
        utilities_of(context, {"sft": tiny_policy}, Utilities.model_validate({**SECTION, "models": ["rl@x"]}))
