"""The section on agent designs: shown if a search was run, with panel results, and marked if the model has changed since."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from stages.params import Params
from stages.records.episode import read_json, write_json
from stages.reporting.inputs import load_inputs
from stages.reporting.sections.designs import design_section

LABELS = ("as params.yaml has it", "window 2", "temperature 0.0", "choose vote, draws 3", 'note "<b>Be brief.</b>"')


def results(evaluation: dict[str, Any], method: str = "agentswift") -> dict[str, Any]:
    """Five designs, the fourth of which wins."""
    scores, origins = (0.5, 0.42, 0.55, 0.61, 0.0), ("root", "covering", "promising", "tree", "tree")
    nodes = [
        {
            **{
                "name": f"d{place}",
                "label": label,
                "parent": max(-1, place - 1),
                "origin": origin,
                "score": score,
                "error": 0.05,
            },
            **{"predicted": None if place < 2 else score - 0.1, "std": None if place < 2 else 0.08, "reused": 0, "visits": 1},
            **{"failed": "too long" if score == 0 else "", "by_domain": {}, "failures": {}},
        }
        for place, (label, score, origin) in enumerate(zip(LABELS, scores, origins, strict=True))
    ]
    comparison = {"difference": 0.06, "low": -0.01, "high": 0.13, "p": 0.08, "verdict": "undecided", "n": 200, "clusters": 50}
    played = {"default": 0.66, "winner": 0.72, "comparison": comparison}
    return {
        **{"settings": {"method": method, "metric": "success", "attempts": 2}, "space": {"draws": [3, 5]}, "designs": 120},
        **{"default": "d0", "nodes": nodes, "best": [0.5, 0.5, 0.55, 0.61, 0.61], "rank_correlation": 0.5},
        "domains": {
            domain: {"panel": panel, "search": ["a"] * 48, "confirm": ["b"] * 24, "description": {}}
            for domain, panel in evaluation["panels"].items()
        },
        "finalists": [
            {"name": name, "label": label, "search": [0.61, 0.05], "confirm": [0.58, 0.07]}
            for name, label in (("d3", LABELS[3]), ("d0", LABELS[0]))
        ],
        "overlay": "evaluate:\n  models: [merged+vote]\n  best_of: {n: 3}\n",
        "winner": {"name": "d3", "label": LABELS[3], "evaluate": {"models": ["merged+vote"], "best_of": {"n": 3}}},
        "panel": {
            **{"domains": dict.fromkeys(evaluation["panels"], played), "default": 0.66, "winner": 0.72, "model": "merged"},
            "policy_hash": next(iter(evaluation["models"]["merged"].values()))["policy_hash"],
        },
    }


@pytest.fixture
def searched(full_run: tuple[Path, Params], tmp_path: Path) -> tuple[Path, Params, dict[str, Any]]:
    root, params = full_run
    shutil.copytree(root, tmp_path / "run")
    evaluation = read_json(root / "reports/evaluation.json")
    policies = {row["policy_hash"] for row in evaluation["models"]["merged"].values()}
    for row in evaluation["models"]["merged"].values():
        row["policy_hash"] = min(policies)  # as in a real run, where a model has one
    write_json(tmp_path / "run/reports/evaluation.json", evaluation)
    found = results(evaluation)
    write_json(tmp_path / "run/reports/design/agentswift.json", found)
    return tmp_path / "run", params, found


def text_of(section: Any) -> str:
    return "\n".join(str(block) for block in section.blocks)


def test_without_a_search_there_is_no_section(full_run: tuple[Path, Params]) -> None:
    assert design_section(load_inputs(*full_run)) is None


def test_section_shows_search_and_panel_results(searched: tuple[Path, Params, dict[str, Any]]) -> None:
    root, params, _ = searched
    section = design_section(load_inputs(root, params))
    assert section is not None
    text = text_of(section)
    assert "Winner: choose vote, draws 3." in text
    assert "have changed since this search" not in text
    for expected in ("66.0 %", "72.0 %", "+6.0", "−1.0 to +13.0", "undecided", "58.0 ± 7.0 %", "merged+vote", "48 of search"):
        assert expected in text, expected
    assert text.count("<svg") == 3
    assert [block.kind for block in section.blocks[:3]] == ["text", "table", "table"]
    again = design_section(load_inputs(root, params))
    assert text_of(again) == text, "not deterministic"


def test_methods_share_one_curve_and_outdated_search_is_marked(searched: tuple[Path, Params, dict[str, Any]]) -> None:
    root, params, found = searched
    other = {**found, "settings": {**found["settings"], "method": "random"}, "best": [0.5, 0.5, 0.5, 0.52, 0.52]}
    write_json(root / "reports/design/random.json", other)
    section = design_section(load_inputs(root, params))
    assert section is not None
    assert section.blocks[1].kind == "table"
    found["panel"]["policy_hash"] = "another"
    write_json(root / "reports/design/agentswift.json", found)
    stale = design_section(load_inputs(root, params))
    assert stale is not None
    assert "have changed since this search" in text_of(stale)


def test_search_without_improvement_is_reported(searched: tuple[Path, Params, dict[str, Any]]) -> None:
    root, params, found = searched
    found["winner"] = {**found["winner"], "name": "d0", "label": LABELS[0]}
    for of in found["panel"]["domains"].values():
        of.pop("comparison", None)
    write_json(root / "reports/design/agentswift.json", found)
    section = design_section(load_inputs(root, params))
    assert section is not None
    assert "No design scored higher on the confirmation tasks" in text_of(section)


def test_page_contains_design_section(searched: tuple[Path, Params, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import report
    from stages.runtime.stage import StageContext
    from stages.runtime.tracker import Tracker

    root, params, _ = searched
    neighbours = [build for build in report.DETAILS if build.__module__.endswith((".merging", ".designs", ".provenance"))]
    monkeypatch.setattr(report, "SUMMARY", [])  # drawing the other chapters takes long
    monkeypatch.setattr(report, "DETAILS", neighbours)
    report.run(StageContext("report", None, params, root, Tracker()))
    page = (root / "reports/report.html").read_text(encoding="utf-8")
    assert '<section class="chapter" id="designs">' in page
    assert page.index('id="merge"') < page.index('id="designs"') < page.index('id="parameters"')
    assert "&lt;b&gt;Be brief.&lt;/b&gt;" in page
    assert not re.search(r"<b>Be brief", page)
