"""Which calls promote a specialist, and which say what the router saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from narrow_calls import call_of, logged, small_settings, strange, write_log
from tiny import make_tiny_policy

from stages.agent.policy import load_policy
from stages.conversion.curate_calls import part_of
from stages.conversion.rounds import Round, convert
from stages.conversion.router import LARGE, CallRouter
from stages.conversion.settings import Conversion
from stages.conversion.specialise import parameters

NO_CALL = "no test call with a reported outcome is answered with enough confidence"


def parts_of(**more: Any) -> dict[str, list[dict[str, Any]]]:
    """Training calls that are all answered "wish 0", and 40 validation and test calls each with the fields `more`."""
    train = [{**call, "response": "wish 0"} for call in logged(40, ("intent",))]
    held_out = [{**call, **more} for call in logged(80, ("intent",), 100)]
    return {"train": train, "valid": held_out[:40], "test": held_out[40:]}


def specialised(policy: Path, root: Path, parts: dict[str, list[dict[str, Any]]], **router: Any) -> tuple[bool, dict[str, Any]]:
    """Whether the cluster of these calls gets a specialist, and the row of the report."""
    router = {"epsilon": 0.02, "min_confidence": 0.0, "min_calls": 30, **router}
    settings = Conversion.model_validate(small_settings(policy, router=router))
    made, row = Round(settings, root, 1).specialist(0, parts)
    assert (made is None) == (row["served_by"] == LARGE) != (root / "out/specialist-0").exists()
    return made is not None, row


@pytest.mark.parametrize(
    "fields", [{"outcome": None}, {"outcome": 1, "provenance": "specialist 0"}, {"outcome": 0}, {"outcome": 1}]
)
def test_wrong_answers_are_not_promoted(tiny_policy: Path, tmp_path: Path, fields: dict[str, Any]):
    """Contract: a specialist whose every answer differs from the large model's is refused, whatever was reported: unknown
    outcomes, a specialist's own answers and ties with a wrong large model are no evidence."""
    done, row = specialised(tiny_policy, tmp_path, parts_of(response="wish 7", **fields))
    assert (done, row["why"]) == (False, NO_CALL)
    assert row["candidates"]["tiny"]["score"] == 0.0


def test_promotion_takes_confirmed_test_calls(tiny_policy: Path, tmp_path: Path):
    """Of 40 test calls, 29 are in traces that succeeded and 6 in ones that failed; 5 have no outcome."""
    parts = parts_of(response="wish 0")
    for place, call in enumerate(parts["test"]):
        call["outcome"] = 1 if place < 29 else 0 if place < 35 else None
    done, row = specialised(tiny_policy, tmp_path, parts)
    assert (done, row["confirmed"], row["kept"], row["difference_lower_bound"]) == (False, 29, 1.0, 0.0)
    assert row["quality_large"] == row["quality_specialist"] == pytest.approx(29 / 35)
    assert row["why"] == "29 confirmed test calls are answered with enough confidence; router.min_calls is 30"
    done, row = specialised(tiny_policy, tmp_path, parts, min_calls=29)
    assert (done, row["confirmed"]) == (True, 29)
    assert "why" not in row


def test_a_specialist_that_saves_nothing_is_not_promoted(tmp_path: Path, tiny_policy: Path):
    """Contract: a call that falls back pays both models, so that a specialist must keep a larger share of its calls than it costs
    of the large model (here the same model: 1)."""
    settings = small_settings(
        tiny_policy, teacher=str(tiny_policy), router={"epsilon": 0.02, "min_confidence": 0.0, "min_calls": 30}
    )
    parts = parts_of(response="wish 0", outcome=1)
    made, row = Round(Conversion.model_validate(settings), tmp_path, 1).specialist(0, parts)
    assert (made, row["served_by"], row["kept"], row["rho"]) == (None, LARGE, 1.0, 1.0)
    assert row["why"] == "it keeps 100% of its calls, and each costs 100% of the large model's: it saves nothing"


def test_without_a_right_validation_call_nothing_is_calibrated(tiny_policy: Path, tmp_path: Path):
    """Contract: a threshold comes from confirmed validation calls; without any, the specialist never answers."""
    parts = parts_of(response="wish 0")
    parts["valid"] = [{**call, "outcome": None} for call in parts["valid"]]
    done, row = specialised(tiny_policy, tmp_path, parts)
    assert (done, row["threshold"], row["kept"], row["why"]) == (False, 2.0, 0.0, NO_CALL)


def test_share_and_cost_are_those_of_the_routers_test_calls(tmp_path: Path, tiny_policy: Path):
    """Contract: test calls go where the router sends them, which reads prompts alone: the strange ones resemble no cluster,
    though their answers are those of one. Validation calls, which chose the threshold, do not count."""
    large = make_tiny_policy(tmp_path / "large", num_hidden_layers=4)
    intents, dates = [{**call, "response": "wish 0"} for call in logged(72, ("intent",))], list(logged(12, ("date",), 77))
    tests = [call for call in (*intents, *dates) if part_of(call["trace"], 0) == "test"]
    for call in tests[:2]:
        call["outcome"] = None  # routed and paid for all the same
    write_log(tmp_path / "calls.jsonl", [*intents, *dates, *strange(4, "test"), *strange(5, "valid", 500)])
    router = {"min_confidence": 0.3, "min_calls": 6}
    settings = Conversion.model_validate(small_settings(tiny_policy, teacher=str(large), router=router))
    report = convert(settings, tmp_path)
    assert len(tests) == 12  # 8 intents, 4 dates
    assert report["test_calls"] == 16
    own = next(row for row in report["clusters"].values() if row["served_by"] == "tiny")
    assert (own["rows"]["test"], own["weight"], own["routed"], own["kept"]) == (8, 0.5, 1.0, 1.0)
    assert (own["confirmed"], report["quality"]) == (6, 1.0)
    rho = parameters(load_policy(tiny_policy)) / parameters(load_policy(large))
    assert report["replaceable_share"] == 0.5
    assert report["cost_per_call"] == pytest.approx(0.5 * rho + 0.5)
    assert report["fallback_rate"] == 4 / 16
    routed = CallRouter.load(tmp_path / "out").route([call_of("date", 500), *strange(1, "test")])
    assert [(one.by, one.cluster, one.fallback) for one in routed] == [(LARGE, 1, ""), (LARGE, -1, "similarity")]
