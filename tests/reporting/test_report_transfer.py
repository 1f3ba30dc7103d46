"""Panels of domains that nothing was trained on, in the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from stages.params import Params
from stages.reporting.inputs import load_inputs
from stages.reporting.sections.outcome import evaluated_domains, lead, outcome_section, panels_text, results_table, tiles
from stages.reporting.viewer.groups import group_count, groups_of


def test_results_on_validation_tasks_are_no_results_on_unseen_ones(full_run: tuple[Path, Params]) -> None:
    inputs = load_inputs(*full_run)
    for split, said, unsaid in (({}, "frozen panel of unseen tasks", "validation"), ({"split": "valid"}, "validation", "unseen")):
        given = replace(inputs, evaluation={**inputs.evaluation, **split})
        text = f"{outcome_section(given).intro} {panels_text(given).text}"
        assert said in text
        assert unsaid not in text


def test_transfer_panels_are_shown_as_such(full_run: tuple[Path, Params]) -> None:
    """Contract: they come last, with every model's success, and are not among the domains that were trained on."""
    root, params = full_run
    inputs = load_inputs(root, params)
    trained = params.domains[0]
    evaluation = {
        **inputs.evaluation,
        "panels": {**inputs.evaluation["panels"], "shop": "f00d"},
        "models": {name: {**found, "shop": found[trained]} for name, found in inputs.evaluation["models"].items()},
    }
    transfer = params.model_copy(update={"evaluate": params.evaluate.model_copy(update={"transfer": ["shop"]})})
    with_shop = replace(inputs, params=transfer, evaluation=evaluation)
    assert evaluated_domains(with_shop) == [*params.domains, "shop"]
    assert [tile["domain"] for tile in tiles(with_shop)][-1] == "shop, not trained on"
    assert "shop" not in lead(with_shop)
    assert "panel f00d, nothing was trained on it" in panels_text(with_shop).text
    shown = {row[1] for row in results_table(with_shop).rows if row[0] == "shop" and row[1]}
    assert shown == set(evaluation["models"])
    assert group_count(root, with_shop) == group_count(root, inputs) + len(evaluation["models"])
    assert {group.domain for group in groups_of(root, with_shop)} >= set(params.domains)
