"""The report's chapter on contributions, and the documents' table of them over seeds, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.control.exact.shapley import CoalitionError
from stages.evaluation.settings import Attribution
from stages.evaluation.statistics import StatisticsError
from stages.params import Params
from stages.reporting import contributions, spread
from stages.reporting.blocks import Block, Table, Text
from stages.reporting.inputs import Inputs, load_inputs
from stages.reporting.sections.contributions import contributions_section

SOLVED = {"sft": (0, 0, 0, 0), "rl@textworld": (1, 0, 0, 0), "rl@search": (0, 1, 1, 0), "merged": (1, 1, 1, 1)}
"""Model -> tasks solved: v(textworld) = 1/4, v(search) = 1/2, v(both) = 1."""


def outcomes(solved: dict[str, tuple[int, ...]], domain: str = "search") -> list[dict[str, Any]]:
    return [
        {
            **{"model": model, "domain": domain, "task_id": f"t{task}", "cluster": f"c{task}", "panel": "p"},
            "success": bool(success),
        }
        for model, tasks in solved.items()
        for task, success in enumerate(tasks)
    ]


def over_seeds(*seeds: dict[str, tuple[int, ...]]) -> list[dict[str, Any]]:
    return [
        {**row, "seed": seed, "attempts": 2, "successes": 2 * int(row["success"])}
        for seed, one in enumerate(seeds)
        for domain in ("textworld", "search")
        for row in outcomes(one, domain)
    ]


def blocks_of(inputs: Inputs) -> list[Block]:
    section = contributions_section(inputs)
    assert section is not None
    return section.blocks


def test_specialists_of_the_run_by_hand(full_run: tuple[Path, Params]) -> None:
    """(1/4 + 1/2) / 2 and (1/2 + 3/4) / 2 of a gain of 1, which is the same on all tasks."""
    inputs = load_inputs(*full_run)
    (found,) = blocks_of(replace(inputs, outcomes=outcomes(SOLVED)))
    assert isinstance(found, Table)
    cells = [(row[0], row[1], row[2], row[4], row[5]) for row in found.rows]
    assert cells == [
        ("search", "rl@textworld", "+37.5", "37.5 %", "4"),
        ("search", "rl@search", "+62.5", "62.5 %", "4"),
        ("search", "all together", "+100.0", "–", "4"),
    ]
    assert found.title == "Specialists in the merged model, over sft"
    (whole,) = blocks_of(inputs)
    assert isinstance(whole, Table)
    assert [row[0] for row in whole.rows] == ["search"] * 3 + ["textworld"] * 3 + ["all"] * 3


def test_the_run_without_a_merge_of_all_its_specialists(full_run: tuple[Path, Params]) -> None:
    inputs = load_inputs(*full_run)
    partial = {model: of for model, of in SOLVED.items() if model != "rl@textworld"}
    (note,) = blocks_of(replace(inputs, outcomes=outcomes(partial)))
    assert isinstance(note, Text)
    assert "not shown: rl@textworld was not evaluated; add it to evaluate.models." in note.text
    assert contributions_section(replace(inputs, outcomes=outcomes({"sft": (0, 1)}))) is None
    assert contributions_section(replace(inputs, outcomes=[])) is None
    three = inputs.params.model_copy(update={"domains": ["search", "textworld", "shop"]})
    (note,) = blocks_of(replace(inputs, params=three, outcomes=outcomes({**SOLVED, "rl@shop": (0, 0, 0, 0)})))
    assert isinstance(note, Text)
    assert "3 players have 8 coalitions; merges of some of the specialists are not evaluated" in note.text


def test_roles_of_a_team_by_hand(full_run: tuple[Path, Params]) -> None:
    """The solver alone solves one of four tasks, with the planner three: 1/4 and 1/2, of a gain of 3/4 that is not clear on four
    tasks."""
    inputs = load_inputs(*full_run)
    evaluate = inputs.params.evaluate.model_copy(update={"attribution": Attribution(method="banzhaf", replacement="random")})
    team = {"rl@search[]": (0,) * 4, "rl@search[planner]": (0,) * 4, "rl@search[solver]": (1, 0, 0, 0)}
    given = replace(
        inputs,
        params=inputs.params.model_copy(update={"evaluate": evaluate}),
        outcomes=outcomes({"sft": (0, 0, 0, 0), "rl@search": (1, 1, 1, 0)}),
        coalitions=outcomes(team),
    )
    about, found = blocks_of(given)
    assert isinstance(about, Text)
    assert about.text.startswith(
        "Banzhaf values, which do not sum to the gain. A member outside a coalition is replaced: its message"
    )
    assert isinstance(found, Table)
    assert [(row[1], row[2], row[4]) for row in found.rows] == [
        ("planner", "+25.0", "–"),
        ("solver", "+50.0", "–"),
        ("all together", "+75.0", "–"),
    ]
    lacking = replace(given, coalitions=outcomes({name: of for name, of in team.items() if name != "rl@search[]"}))
    note = blocks_of(lacking)[-1]
    assert isinstance(note, Text)
    assert "coalition (empty) has no model" in note.text


def test_an_evaluation_of_other_domains_is_refused(full_run: tuple[Path, Params]) -> None:
    """Contract: after an edit of `domains`, the report asks for the evaluation instead of failing somewhere on the page."""
    root, params = full_run
    other = params.model_copy(update={"domains": ["keydoor"]})
    with pytest.raises(ValueError, match=r"has results of .*search.*, and none of keydoor.*run 'dvc repro evaluate' first"):
        load_inputs(root, other)


def test_coalitions_are_no_models_of_the_run(full_run: tuple[Path, Params], tmp_path: Path) -> None:
    """Contract: rows of a team's coalitions are kept apart, so that no other chapter and no kept run counts them."""
    from stages.evaluation.panels import EVALUATION_SCHEMA
    from stages.records.episode import read_rows, write_table

    root, params = full_run
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/evaluation.json").write_bytes((root / "reports/evaluation.json").read_bytes())
    rows = read_rows(root / "data/evaluation/rows.parquet")
    extra = [{**row, "model": "rl@search[solver]"} for row in rows if row["model"] == "rl@search"]
    write_table(tmp_path / "data/evaluation/rows.parquet", EVALUATION_SCHEMA, [*rows, *extra])
    found = load_inputs(tmp_path, params)
    assert found.outcomes == load_inputs(root, params).outcomes
    assert {row["model"] for row in found.coalitions} == {"rl@search[solver]"}
    assert len(found.coalitions) == len(extra)


def test_contributions_over_seeds_by_hand() -> None:
    """In the second lifecycle the search specialist solves nothing, and with the other one task: 0.625, 0 and 0.375, 0.25."""
    rows = over_seeds(SOLVED, {**SOLVED, "rl@search": (0, 0, 0, 0), "merged": (1, 0, 0, 0)})
    found = {(domain, name): (per_seed.tolist(), mean) for domain, name, per_seed, mean in contributions.over_seeds(rows)}
    assert found["search", "search"][0] == [0.625, 0.0]
    assert found["search", "textworld"][0] == [0.375, 0.25]
    assert found["search", "all together"][0] == [1.0, 0.25]
    assert found["search", "search"][1].difference == pytest.approx(0.3125)
    assert found["search", "search"][1].low < 0.3125 < found["search", "search"][1].high
    lines = contributions.block(rows).splitlines()
    assert lines[2].startswith("| textworld | `rl@textworld` | +31.2 |")
    assert lines[2].endswith("| +25.0 to +37.5 |")
    assert "of 2 lifecycles" in lines[-1]


def test_lifecycles_without_the_numbers_are_refused() -> None:
    assert contributions.block([]) == spread.NOT_MEASURED
    with pytest.raises(CoalitionError, match="merged was not evaluated"):
        contributions.block(over_seeds({model: of for model, of in SOLVED.items() if model != "merged"}))
    with pytest.raises(StatisticsError, match=r"has no \('sft', 0, 't0'\): run `python -m flows\.spread` again"):
        contributions.block(over_seeds(SOLVED)[1:])
