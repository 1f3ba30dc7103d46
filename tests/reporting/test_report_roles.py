"""The report's chapter on roles, shown only where training had some: who spoke, what it cost, what was said in which order."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from stages.params import Params
from stages.records.episode import Episode, Owner, TurnRecord, episode_row
from stages.reporting.blocks import Figures, Table
from stages.reporting.inputs import Inputs, load_inputs
from stages.reporting.page import render_page
from stages.reporting.sections.roles import roles_section


def spoken(name: str, role: str, actions: list[str], reward: float, **fields: Any) -> dict[str, Any]:
    """An episode of `role`: 5 tokens of prompt, 2 of each action, 3 of each result, a tool call but for the last action."""
    made = Episode(name, name, "search", name, 0, "", "", 1.0, 1.0, 0, role=role, **fields)
    made.append(range(5), Owner.PROMPT, -1)
    made.messages = [{"role": "user", "content": f"Prompt of {name}."}]
    for turn, action in enumerate(actions):
        last = turn == len(actions) - 1
        start = len(made.token_ids)
        made.append([1, 2], Owner.POLICY, turn, [-1.0, -1.0])
        made.turns.append(TurnRecord(action, "", True, reward if last else 0.0, float(not last), "", action, start, start + 2))
        made.append([] if last else [7, 8, 9], Owner.ENVIRONMENT, turn)
    made.reward = reward
    return {**episode_row(made), "reward_terms": "{}", "advantages": [0.0] * len(made.token_ids)}


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
