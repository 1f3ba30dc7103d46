"""prefect.yaml names existing flows with typed settings."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
from pydantic import ValidationError

import flows  # noqa: F401  (configures Prefect, so it comes before Prefect's import)
from flows.bootstrap import QUEUE_LIMITS, deployments
from flows.pipeline import stage_graph
from flows.process import BAD_PARAMETERS, ROOT, StageFailedError

BY_NAME = {item["name"]: item for item in deployments()}


def test_deployments_have_their_schedules_and_queues() -> None:
    assert list(BY_NAME) == ["lifecycle-nightly", "lifecycle-on-change", "compare", "design", "convert", "claims"]
    assert BY_NAME["lifecycle-nightly"]["schedules"][0]["cron"] == "0 2 * * *"
    assert BY_NAME["claims"]["schedules"][0]["cron"] == "0 6 * * 0"
    assert {item["work_pool"]["name"] for item in BY_NAME.values()} == {"bellwether"}
    assert QUEUE_LIMITS["checkout"] == 1
    for name in ("lifecycle-nightly", "lifecycle-on-change", "claims"):
        assert BY_NAME[name]["work_pool"]["work_queue_name"] == "checkout"


@pytest.mark.parametrize("name", BY_NAME)
def test_entry_point_is_a_flow_that_accepts_its_parameters(name: str) -> None:
    from prefect import Flow

    path, function = BY_NAME[name]["entrypoint"].split(":")
    if not (ROOT / path).exists():
        pytest.skip(f"{path} is not in this checkout")
    found: Any = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), function)
    assert isinstance(found, Flow)
    assert inspect.getdoc(found.fn)
    found.validate_parameters(BY_NAME[name].get("parameters", {}))


def test_settings_have_ranges_and_the_stages_of_dvc_yaml() -> None:
    from flows.lifecycle import Settings

    schema = Settings.model_json_schema()["properties"]
    assert schema["until"]["anyOf"][0]["enum"] == list(stage_graph(ROOT))
    for field in schema.values():
        assert field["title"]
        assert field["description"]
    for wrong in ({"retries": -1}, {"retry_delay_s": 3601}, {"jobs": 65}, {"until": "rollouts"}, {"stop": "rl"}):
        with pytest.raises(ValidationError):
            Settings(**wrong)


@pytest.mark.parametrize(("code", "again"), [(BAD_PARAMETERS, False), (1, True), (-9, True)])
def test_stage_is_retried_unless_its_parameters_are_invalid(code: int, again: bool) -> None:
    from prefect.states import Failed

    from flows.lifecycle import can_be_retried, stage

    assert stage.retry_condition_fn is can_be_retried
    failed = Failed(data=StageFailedError("rl@search failed", code))
    assert can_be_retried(None, None, failed) is again
    assert can_be_retried(None, None, Failed(data=OSError("no space left")))


def test_invalid_comparison_is_rejected_before_it_runs() -> None:
    from flows.compare import Comparison

    settings = {name: {"overrides": [f"rl.algorithm={name}"]} for name in ("grpo", "rloo")}
    assert Comparison(settings=settings).metric == "success"
    assert Comparison(settings=settings, seeds=[0, 1, 2], looks=[2, 3], metric="turns", margin=0.5).looks == [2, 3]
    wrong = [
        {"metric": "sucess"},
        {"seeds": [0]},
        {"jobs": 0},
        {"settings": {"grpo": {}}},
        {"settings": {**settings, "sft": {"model": "stf"}}},
        {"settings": {**settings, "rloo": {"overrides": ["rl.algorithm rloo"]}}},
        {"looks": [8, 12, 20]},  # of five seeds
        {"looks": [5, 3], "seeds": [0, 1, 2]},
        {"metric": "turns"},  # within which margin?
    ]
    for values in wrong:
        with pytest.raises(ValidationError):
            Comparison(**{"settings": settings, **values})


def test_claims_flow_offers_the_experiments_of_the_board() -> None:
    from prefect.utilities.callables import parameter_schema

    from flows.claims import claims, known_methods

    schema = parameter_schema(claims).model_dump_for_openapi()
    assert schema["properties"]["methods"]["anyOf"][0]["items"]["enum"] == known_methods(ROOT)
