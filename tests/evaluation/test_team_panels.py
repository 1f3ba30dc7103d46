"""Panels that a team plays: the acting member's episodes are the model's, the others speak and their tokens count."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stages.agent.team import Member, write_team
from stages.engine.engine import EngineSettings, Sampling
from stages.evaluation.panels import Settings, jobs_of, load_panels, play, unload
from stages.evaluation.team_episodes import team_hash
from stages.runtime.resources import Resources

SETTINGS = Settings(0, Sampling(max_tokens=6), EngineSettings.of(Resources(slots=8), 512))


def played(curated: Path, folder: Path, slots: int = 8) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows, and what the sample episodes read first."""
    unload()  # another test's team may have had the same folder
    jobs = jobs_of(folder, "h", load_panels(curated, ["search"]), curated, 2, 100)
    settings = replace(SETTINGS, engine=replace(SETTINGS.engine, slots=slots))
    outcomes = [play(job, settings) for job in jobs]
    read = [sample["messages"][0]["content"] for outcome in outcomes for sample in outcome.samples]
    return [row for outcome in outcomes for row in outcome.rows], read


@pytest.fixture
def team(tmp_path: Path, tiny_policy: Path) -> Path:
    """Weights of a solver with those of a planner below them."""
    shutil.copytree(tiny_policy, tmp_path / "solver")
    shutil.copytree(tiny_policy, tmp_path / "solver" / "agents" / "planner")
    return tmp_path / "solver"


def test_a_solver_reads_the_plans_and_their_tokens_count(curated: Path, tiny_policy: Path, team: Path) -> None:
    """Contract: a solver that sees nobody plays as it does alone, a few tokens more being written; one that reads the plans plays
    otherwise; neither depends on the engine's slots. In another domain it plays alone."""
    alone, _ = played(curated, tiny_policy)
    write_team(team, "search", True, [Member(role="planner"), Member(role="solver")])
    apart, read = played(curated, team)
    assert not any("planner:" in text for text in read)
    assert [{**row, "tokens": 0} for row in apart] == [{**row, "tokens": 0} for row in alone]
    assert all(row["tokens"] > other["tokens"] for row, other in zip(apart, alone, strict=True))
    write_team(team, "search", True, [Member(role="planner"), Member(role="solver", sees=["planner"])])
    together, read = played(curated, team)
    assert read
    assert all("\nplanner: " in text for text in read)
    assert played(curated, team, slots=4) == (together, read)
    write_team(team, "factbook", True, [Member(role="planner"), Member(role="solver", sees=["planner"])])
    assert played(curated, team)[0] == alone


def test_a_teams_name_depends_on_all_its_weights(team: Path) -> None:
    """Contract: no checkpoint of an evaluation is taken for that of a team with another planner or other rules."""
    members = [Member(role="planner"), Member(role="solver", sees=["planner"])]
    names = []
    for own in (True, False):
        write_team(team, "search", own, members)
        names.append(team_hash("h", team, ["search"]))
    write_team(team, "search", True, [members[0], Member(role="solver")])
    names.append(team_hash("h", team, ["search"]))
    write_team(team, "search", True, members)
    (team / "agents" / "planner" / "config.json").write_text((team / "config.json").read_text() + "\n")
    names.append(team_hash("h", team, ["search"]))
    assert len({*names, "h"}) == 5
