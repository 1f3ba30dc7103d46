"""The lane's dvc.yaml lists the code that its stages import, and the hashes of kept runs cover it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.control.lane.runs import code_of
from stages.control.lane.settings import PARAMS, load_lane
from stages.control.problems import PROBLEMS
from stages.runtime import deps

ROOT = deps.ROOT
LANGUAGE_MODEL = Path("stages/control/advice/language_model.py")
"""Imports the engine where a method asks a language model for advice, which none of the lane's does (see below)."""


def modules(*problems: str) -> list[str]:
    return [PROBLEMS[name].module for name in problems]


@cache
def roots() -> dict[str, list[str]]:
    """Modules that `python -m stages.control` imports for each stage, also by name."""
    used = sorted({method.problem for method in load_lane(ROOT / PARAMS).methods.values()} - {"offline"})
    plays = ["stages.control.__main__", "stages.control.lane.runs", "stages.control.lane.films"]
    return {
        "data": ["stages.control.lane.runs", "stages.control.offline.collecting"],
        "run": [*plays, *modules(*used)],
        "run_offline": [*plays, *modules("offline")],
        "page": ["stages.control.lane.settings", "stages.records.episode", "stages.reporting.control_page"],
    }


def imported(names: list[str]) -> set[Path]:
    """The files of modules and of all that they import; of the command's own module, none of the latter: it has all stages'."""
    seen: set[Path] = set()
    waiting = [path for name in names if (path := deps.module_path(name))]
    assert len(waiting) == len(names)
    while waiting:
        item = waiting.pop()
        if item in seen or deps.exempt(item):
            continue
        seen.add(item)
        if item not in (LANGUAGE_MODEL, Path("stages/control/__main__.py")):
            waiting.extend(deps._with(item))
    return {item for item in seen if (ROOT / item).stat().st_size}


def inside(file: Path, listed: str) -> bool:
    return Path(listed) == file or Path(listed) in file.parents


@pytest.mark.parametrize("stage", ["data", "page", "run", "run_offline"])
def test_listed_dependencies_match_the_imports(stage: str) -> None:
    """Contract: DVC does not follow imports; a change in a module that a stage uses re-runs it, and none of a part that it does
    not use."""
    stages = yaml.safe_load((ROOT / "reports/control/dvc.yaml").read_text(encoding="utf-8"))["stages"]
    assert set(stages) == set(roots())
    _, listed = deps.listed(stages, stage)
    used = imported(roots()[stage])
    assert sorted(str(file) for file in used if not any(inside(file, one) for one in listed)) == []
    assert [one for one in listed if not any(inside(file, one) for file in used)] == []
    assert listed == sorted(listed)


def test_no_method_of_the_lane_asks_a_language_model() -> None:
    """Else `run` depends on what LANGUAGE_MODEL imports, and on the model's folder."""
    decisions: list[Any] = [method.settings.get("decision", {}) for method in load_lane(ROOT / PARAMS).methods.values()]
    assert all(one.get("kind", "scripted") == "scripted" for one in decisions)


@pytest.mark.parametrize("stage", ["run", "run_offline"])
def test_kept_seeds_are_of_the_code_that_dvc_depends_on(stage: str, tmp_path: Path) -> None:
    """Contract: a seed that an ended run left is not used after a change of code that DVC re-runs the method for."""
    stages = yaml.safe_load((ROOT / "reports/control/dvc.yaml").read_text(encoding="utf-8"))["stages"]
    listed = deps.listed(stages, stage)[1]
    for path in ("stages/control", "stages/records", "stages/values"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "one.py").write_text("x = 1\n")
    for file in ("stages/seeding.py", "stages/environments/wordle/rules.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("x = 1\n")
    before = code_of(tmp_path)
    for path in listed:
        changed = tmp_path / path / "one.py" if (tmp_path / path).is_dir() else tmp_path / path
        changed.write_text("x = 2\n")
        after = code_of(tmp_path)
        assert after != before, path
        before = after
