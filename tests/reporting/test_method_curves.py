"""The learning curves on methods' pages: from galleries of the board, and from lane control."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from stages.claims.experiment import FOLDER
from stages.claims.judging import write
from stages.claims.results import Results
from stages.records.card import Card
from stages.reporting.board.pages import pages
from stages.reporting.board.rows import entries
from stages.reporting.site.method_curves import LANE, control_pictures, gallery_curves, method_pictures

SPEC: dict[str, Any] = {
    "family": "policy_optimisation",
    "method": "Every method",
    "paper": "one run of each",
    "switch": "rl.algorithm",
    "environment": "search",
    "looks": [1],
    "budget": {"environment_steps": 1000},
    "untuned": "defaults",
    "ungated": "nothing is judged",
    "arms": {"grpo": {}, "rloo": {}, "dpo": {}},
}
LANE_ROWS = """method,problem,task,figure,mean,lowest,highest
dsac_t,gymnasium,Pendulum-v1,return at 500,-900,-1000,-800
dsac_t,gymnasium,Pendulum-v1,return at 1000,-300,-350,-200
dsac_t,gymnasium,Pendulum-v1,overestimation,3,2,4
sac,gymnasium,Pendulum-v1,return at 500,-950,-1000,-900
sac,gymnasium,Pendulum-v1,return at 1000,-500,-600,-400
"""


def card(slug: str) -> Card:
    texts = ("title", "paper", "equation", "switch", "assumptions", "reduces_to", "tested_by")
    return Card(slug=slug, **{name: f"{slug}'s {name}" for name in texts})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout with a gallery of two methods that play episodes and one that learns from pairs."""
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "gallery_search.yaml").write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    (tmp_path / LANE).parent.mkdir(parents=True)
    (tmp_path / LANE).write_text(LANE_ROWS, encoding="utf-8")
    results = Results()
    for arm, column, played in (("grpo", "success", 100), ("rloo", "success", 100), ("dpo", "pair_accuracy", 0)):
        found = {"metrics": {}, "environment_steps": 1000, "seconds": 2.0, "commit": "c" * 40, "code": "0", "key": arm}
        results.outcomes[f"{arm}/0"] = found
        steps = enumerate((0.25, 0.5, 0.75), start=1)
        results.tables.curves[f"{arm}/0"] = [
            {"step": n, "environment_steps": played, column: value, "loss": 1.0} for n, value in steps
        ]
    write(tmp_path, "gallery_search", entries(tmp_path)["gallery_search"].experiment, results)
    return tmp_path


def test_a_run_shows_success_or_what_it_has_instead(root: Path) -> None:
    found = gallery_curves(root, entries(root)["gallery_search"])
    measure, axis, (places, values) = found["rloo"]
    assert (measure, axis) == ("success", "environment steps")
    np.testing.assert_allclose(places, [100, 200, 300])
    np.testing.assert_allclose(values, [25, 50, 75])
    measure, axis, (places, _) = found["dpo"]
    assert (measure, axis) == ("pair_accuracy", "training steps")
    np.testing.assert_allclose(places, [1, 2, 3])


def test_methods_have_pictures_of_their_own_run(root: Path) -> None:
    cards = {slug: card(slug) for slug in ("rloo", "dpo", "dsac_t", "slerp")}
    pictures = method_pictures(root, entries(root), cards)
    assert set(pictures) == {"rloo", "dpo", "dsac_t"}
    text, svg = pictures["rloo"]
    assert "dashed: `grpo`" in text
    assert "`make claims METHOD=gallery_search`" in text
    assert svg.startswith("<svg")
    assert "grpo" not in pictures["dpo"][0]  # it shows another measure
    assert "`make control METHOD=dsac_t`" in pictures["dsac_t"][0]


def test_without_the_lanes_results_there_are_no_pictures_of_it(tmp_path: Path) -> None:
    assert control_pictures(tmp_path, {"dsac_t": card("dsac_t")}) == {}


def test_a_gallery_has_a_page_without_verdicts(root: Path) -> None:
    found = pages(root)
    page = found[FOLDER / "gallery_search.md"]
    assert "judges nothing" in page
    assert "figures/gallery_search_curves.svg" in page
    assert "## Gate" not in page
    assert "[Every method](gallery_search.md)" in found[FOLDER / "README.md"]
