"""Lane control in the report: the summary of its results, and its chapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stages.params import Params
from stages.reporting.blocks import Table
from stages.reporting.control_summary import FILE, LANE, files
from stages.reporting.inputs import load_inputs
from stages.reporting.page import DETAILS
from stages.reporting.sections.control import control_section

RESULTS = """method,problem,task,figure,mean,lowest,highest
sac,gymnasium,Pendulum-v1,overestimation,-10.5,-16.25,0.5
sac,gymnasium,Pendulum-v1,return_end,-137.25,-202.5,-75.5
sac,gymnasium,Pendulum-v1,return at 500,-1441.5,-1601.5,-1328.5
sac,gymnasium,Pendulum-v1,end of runs,-200,-250,-150
dsac_t,gymnasium,Pendulum-v1,return_end,-100,-120,-90
dsac_t,gymnasium,Pendulum-v1,return at 500,-1300,-1400,-1200
dsac_t,gymnasium,Pendulum-v1,improvement over sac,0.875,0.5,1
ravl,reach,,return,3.5,3.5,3.5
ravl,reach,,overestimation,0.25,0,0.5
ravl,reach,,rollouts,50,50,50
"""


def summary(root: Path, text: str = RESULTS) -> dict:
    (root / LANE).parent.mkdir(parents=True, exist_ok=True)
    (root / LANE).write_text(text)
    ((path, content),) = files(root).items()
    assert path == FILE
    return json.loads(content)


def test_the_summary_by_hand(tmp_path: Path) -> None:
    """Where no interval of a run's end is stored, its last evaluation; of an exact world, the figures that every run of its
    problem stores."""
    assert files(tmp_path) == {}
    sac, dsac_t, ravl = summary(tmp_path)["methods"]
    assert sac["end"] == {"mean": -200.0, "lowest": -250.0, "highest": -150.0}
    assert (sac["baseline"], sac["improvement"], sac["figures"]) == (None, None, {})
    assert sac["overestimation"]["mean"] == -10.5
    assert dsac_t["end"]["mean"] == -100.0
    assert (dsac_t["baseline"], dsac_t["improvement"]["mean"], dsac_t["overestimation"]) == ("sac", 0.875, None)
    assert (ravl["played"], ravl["end"]) == (False, None)
    assert list(ravl["figures"]) == ["return", "overestimation"]


def test_the_chapter_by_hand(full_run: tuple[Path, Params], tmp_path: Path) -> None:
    inputs = load_inputs(*full_run)
    assert control_section(inputs) is None
    section = control_section(replace(inputs, control=summary(tmp_path)))
    assert section is not None
    played, exact = section.blocks
    assert isinstance(played, Table)
    assert isinstance(exact, Table)
    assert played.rows == [
        ["Pendulum-v1", "sac", "−200 (−250 to −150)", "–", "−10.5 (−16.2 to 0.5)"],
        ["Pendulum-v1", "dsac_t", "−100 (−120 to −90)", "0.875 (0.5 to 1) over sac", "–"],
    ]
    alone = [{**one, "improvement": None} for one in summary(tmp_path)["methods"]]
    section = control_section(replace(inputs, control={"methods": alone}))
    assert section is not None
    assert isinstance(section.blocks[0], Table)
    assert section.blocks[0].header == ("task", "method", "end of runs", "over-estimation (range)")
    assert exact.rows == [["ravl", "reach", "return", "3.5"], ["ravl", "reach", "overestimation", "0.25 (0 to 0.5)"]]
    assert control_section in DETAILS


def test_damaged_results_are_refused_by_line(tmp_path: Path) -> None:
    for text in (RESULTS + "sac,gymnasium,Pendulum-v1,return_mean,much,0,1\n", "method,problem\nsac,gymnasium\n"):
        with pytest.raises(ValueError, match=r"results\.csv, line (12|2) is no figure of a method .*; run `make control` again"):
            summary(tmp_path, text)
