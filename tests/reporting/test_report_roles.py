"""The report's chapter on roles, shown only where training had some: who spoke, what it cost, what was said in which order."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from role_episodes import spoken

from stages.params import Params
from stages.reporting.blocks import Figures, Table
from stages.reporting.inputs import Inputs, load_inputs
from stages.reporting.page import render_page
from stages.reporting.sections.roles import cost_table, prompt_table, roles_section


def with_roles(inputs: Inputs) -> Inputs:
    rows = []
    for step in (1, 20):
        rows += [
            spoken(f"propose-{step}", "proposer", ["search heir Kelmar", "question Who is the heir of <b>Dorvin</b>?"], 0.25),
            spoken(f"ssp-{step}", "solver", ["search Dorvin heir", "answer Kelmar"], 1.0),
            spoken(f"ssp2-{step}", "solver", ["answer Selat"], 0.0),
        ]
        rows = [{"step": step, **row} for row in rows if "step" not in row] + [row for row in rows if "step" in row]
    search, noise = inputs.domains["search"], random.Random(0)
    history = {name: list(values) for name, values in (search.rl_history or {}).items()}
    steps = len(history["step"])
    for name, start, end in (("valid", 0.4, 0.9), ("solve_rate", 0.8, 0.5), ("diversity", 1.0, 0.9), ("gate/reader", 0.5, 0.1)):
        history[name] = [start + (end - start) * step / steps + noise.gauss(0, 0.02) for step in range(steps)]
    history["gate/words"] = [0.0] * steps
    episodes = {f"rl step {step}": [row for row in rows if row["step"] == step] for step in (1, 20)}
    changed = replace(search, rl_history=history, episodes={**search.episodes, **episodes})
    return replace(inputs, domains={**inputs.domains, "search": changed})


def test_a_run_without_roles_has_no_such_chapter(full_run: tuple[Path, Params]) -> None:
    root, params = full_run
    assert roles_section(load_inputs(root, params)) is None


def test_costs_reasons_and_quotes_by_hand(full_run: tuple[Path, Params]) -> None:
    root, params = full_run
    section = roles_section(with_roles(load_inputs(root, params)))
    assert section is not None
    figures = next(block for block in section.blocks if isinstance(block, Figures))
    assert [drawing.caption.split(" ")[0] for drawing in figures.drawings] == ["Share", "Share", "Share"]
    costs, gate, said = (block for block in section.blocks if isinstance(block, Table))
    assert [list(row) for row in costs.rows[:2]] == [
        ["1", "proposer", "1", "2", "4", "8", "1", "0.25"],
        ["1", "solver", "2", "1.5", "3", "6.5", "0.5", "0.5"],
    ]
    assert [row[0] for row in costs.rows] == ["1", "1", "20", "20"]
    assert [row[0] for row in gate.rows] == ["reader"], "reasons that never occurred are left out"
    assert [row[0] for row in said.rows] == ["proposer", "solver", "solver"]
    assert said.rows[0][1] == "Prompt of propose-20."
    assert said.rows[0][2] == "search heir Kelmar → question Who is the heir of <b>Dorvin</b>?"


def test_calls_of_priced_tools_are_counted_beside_what_they_cost() -> None:
    """Two calls that cost 90 and 10 are 2 calls; a planner, whose texts are no actions, has none."""
    solver = spoken("t/0", "solver", ["ask large", "ask small", "answer y"], 1.0, play="t/0", moves=[1, 2, 3])
    solver["turns"] = [{**turn, "cost": cost} for turn, cost in zip(solver["turns"], (90.0, 10.0, 0.0), strict=True)]
    solver["reward_terms"] = '{"correct": 1.0, "calls/large": 1.0, "calls/small": 1.0}'
    planner = spoken("t/0/planner", "planner", ["plan"], 0.0, play="t/0", moves=[0])
    table = cost_table({1: [solver, planner]})
    shown = {row[1]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert {role: (row["tool calls"], row["cost of calls"]) for role, row in shown.items()} == {
        "planner": ("0", "0"),
        "solver": ("2", "100"),
    }


def test_prompts_of_roles_are_listed_with_their_hashes() -> None:
    table = prompt_table({"team": {"roles": ["planner", "solver"], "prompts": {"planner.txt": "ab" * 32}}})
    assert table is not None
    assert [list(row) for row in table.rows] == [["planner.txt", "ab" * 32]]
    assert prompt_table({"team": {"roles": ["solver"], "prompts": {}}}) is None
    assert prompt_table({}) is None


def test_plays_of_several_roles_are_quoted_in_the_order_of_their_moves(full_run: tuple[Path, Params]) -> None:
    root, params = full_run
    inputs = load_inputs(root, params)
    planner = spoken("t/0@planner", "planner", ["plan one", "plan two"], 0.0, play="t/0", moves=[0, 2])
    solver = spoken("t/0@solver", "solver", ["search x", "answer y"], 1.0, play="t/0", moves=[1, 3])
    rows = [{**row, "step": 1} for row in (planner, solver)]
    search = replace(inputs.domains["search"], episodes={"rl step 1": rows})
    section = roles_section(replace(inputs, domains={"search": search}))
    assert section is not None
    said = [block for block in section.blocks if isinstance(block, Table)][-1]
    assert [(row[0], row[2]) for row in said.rows] == [
        ("planner", "plan one"),
        ("solver", "search x"),
        ("planner", "plan two"),
        ("solver", "answer y"),
    ]


def test_the_page_escapes_what_roles_said(full_run: tuple[Path, Params]) -> None:
    from stages.reporting.episodes import browser_data

    root, params = full_run
    inputs = with_roles(load_inputs(root, params))
    section = roles_section(inputs)
    assert section is not None
    browser = browser_data({domain: {} for domain in inputs.domains}, 0, inputs.tokenizer, 0)
    page = render_page(inputs, [], [section], browser)
    assert 'id="roles"' in page
    assert "&lt;b&gt;Dorvin" in page
    assert "<b>Dorvin" not in page
