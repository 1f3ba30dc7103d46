"""The report's chapter on priced tools."""

from __future__ import annotations

from typing import Any

from stages.evaluation.summary import summarise
from stages.params import parse_params
from stages.reporting.blocks import Figures, Table
from stages.reporting.inputs import Inputs
from stages.reporting.sections.tools import tools_section


def row(task: int, success: bool, cost: float, difficulty: float, **calls: float) -> dict[str, Any]:
    shared = {"domain": "search", "attempt": 0, "panel": "p", "policy_hash": "h", "stop_reason": "terminated"}
    outcome = {"success": success, "reward": float(success), "turns": 2, "tokens": 9, "accepted": 1.0, "cost": cost}
    names = {"task_id": f"t{task}", "cluster": f"c{task}", "difficulty": difficulty, "answer": None, "solution": None}
    return {**shared, **outcome, **names, **({"calls": calls} if calls else {})}


ROWS = [row(0, True, 10.0, 1.0, large=0.0, small=1.0), row(1, False, 90.0, 2.0, large=2.0, small=1.0)]


def inputs(rows: list[dict[str, Any]]) -> Inputs:
    values = {"domains": ["search"], "per_domain": {"search": {}}}
    models = {"sft": {"search": summarise(rows, 1, 0.95, 200, 0)}}
    evaluation = {"panels": {"search": "p"}, "models": models, "comparisons": []}
    return Inputs(parse_params(values), evaluation, None, None, None, {}, None)


def test_spending_of_each_model_is_shown_by_tool_and_difficulty() -> None:
    """Contract: what priced tools cost is reported beside what it bought: 100 in all for one success."""
    section = tools_section(inputs(ROWS))
    assert section is not None
    figures, table = section.blocks
    assert isinstance(figures, Figures)
    assert "50" in figures.drawings[0].svg.text
    assert isinstance(table, Table)
    shown = dict(zip(table.header, table.rows[0], strict=True))
    assert shown["model"] == "sft"
    assert shown["success"] == "50.0 %"
    assert (shown["cost"], shown["cost per success"]) == ("50", "100")
    assert (shown["large"], shown["small"]) == ("1.00", "1.00")
    assert (shown["calls at difficulty 1"], shown["calls at difficulty 2"]) == ("1.00", "3.00")


def test_there_is_no_chapter_without_priced_tools() -> None:
    plain = [{key: value for key, value in one.items() if key != "calls"} for one in ROWS]
    assert "calls" not in summarise(plain, 1, 0.95, 200, 0)
    assert tools_section(inputs(plain)) is None
