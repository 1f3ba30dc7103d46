"""The code that bears on a run, as a hash: results name it, so that a page can say which verdicts are of older code."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from stages.control.problems import PROBLEMS
from stages.runtime import deps
from stages.runtime.yaml_files import read_yaml

STAGES = ("curate", "sft", "rollout", "annotate", "rl", "evaluate")
"""The stages that runs consist of; their code is listed in dvc.yaml."""
MODULES = {
    "labels": "stages.claims.mcts_labels",
    "designs": "stages.claims.design_search",
    **{name: problem.module for name, problem in PROBLEMS.items()},
}
"""What runs by one command, `python -m MODULE --settings FILE --result FILE`: lanes, and the problems of lane control."""


def _files(path: Path) -> list[Path]:
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [file for file in found if file.is_file() and "__pycache__" not in file.parts]


@cache
def code_of(root: Path, program: str) -> str:
    """16 hex digits of the code in the checkout `root` that bears on runs of `Experiment.program`."""
    listed: set[Path] = set()
    if program not in PROBLEMS:
        stages = read_yaml(root / "dvc.yaml")["stages"]
        of_run = (*STAGES, "merge") if program == "merge" else STAGES
        listed = {Path(path) for stage in of_run if stage in stages for path in deps.listed(stages, stage)[1]}
    if program in MODULES:
        listed |= set(deps.code(MODULES[program].removeprefix("stages.").replace(".", "/")))
    digest = hashlib.sha256()
    for file in sorted({file for path in listed for file in _files(root / path)}):
        digest.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
