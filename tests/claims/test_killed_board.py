"""`make claims` killed with SIGKILL, while the start is built and while runs are in progress.

The project's stages are stubs of a few lines: what is tested is the command's own work, from the commit to the verdict.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from stages.claims.experiment import FOLDER
from stages.claims.runner import FOLDER as WORKSPACES
from stages.evaluation.panels import EVALUATION_SCHEMA
from stages.params import ROOT
from stages.records.episode import write_table

STEPS = 3
STAGES = {
    "__init__": "",
    "parent": (ROOT / "stages" / "runtime" / "parent.py").read_text(),
    "events": """
import os
def record(text):
    with open(os.environ["EVENTS"], "a") as events:
        events.write(text + chr(10))
""",
    "annotate": """
import os, pathlib, time
from stages.events import record
from stages.runtime.parent import die_with_parent
die_with_parent()
record("start began")
while not pathlib.Path(os.environ["EVENTS"] + ".go").exists():
    time.sleep(0.05)
pathlib.Path("data/annotated").write_text("pairs")
record("start finished")
""",
    "rl": f"""
import json, pathlib, time
import yaml
from stages.events import record
from stages.runtime.parent import die_with_parent
die_with_parent()
rl = yaml.safe_load(open("params.yaml"))["rl"]
assert pathlib.Path("data/annotated").read_text() == "pairs"
checkpoint = pathlib.Path("checkpoint")
for step in range(int(checkpoint.read_text()) if checkpoint.exists() else 0, {STEPS}):
    time.sleep(0.05)
    record(f"{{rl['algorithm']}}/{{rl['seed']}} step {{step}}")
    partial = checkpoint.with_suffix(".partial")  # as stages do, so that a kill leaves the old or the new one
    partial.write_text(str(step + 1))
    partial.replace(checkpoint)
pathlib.Path("reports/rl").mkdir(parents=True)
pathlib.Path("reports/rl/search.json").write_text(json.dumps({{"environment_steps": 12}}))
""",
    "evaluate": """
import json, pathlib, shutil
import yaml
from stages.events import record
params = yaml.safe_load(open("params.yaml"))
seed, rloo = params["rl"]["seed"] or 0, params["rl"]["algorithm"] == "rloo"
success = 0.1 * seed + (0.2 + 0.01 * (seed % 2)) * rloo
record("evaluated " + params["evaluate"]["models"][0])
pathlib.Path("data/evaluation").mkdir(exist_ok=True)
shutil.copy("data/base/rows.parquet", "data/evaluation/rows.parquet")
of = {name: {"mean": success} for name in ("success", "turns", "cost", "tokens")}
pathlib.Path("reports").mkdir(exist_ok=True)
pathlib.Path("reports/evaluation.json").write_text(json.dumps({"models": {params["evaluate"]["models"][0]: {"search": of}}}))
""",
}
EXPERIMENT = {
    **{"method": "RLOO", "paper": "p", "switch": "rl.algorithm: rloo", "environment": "search"},
    **{"family": "policy_optimisation", "looks": [4, 6], "untuned": "no training", "ungated": "no training"},
    "budget": {"environment_steps": 10},
    "arms": {"rloo": {"rl": {"algorithm": "rloo"}}, "grpo": {"rl": {"algorithm": "grpo"}}},
    "claims": [{"says": "RLOO is better.", "arm": "rloo", "against": "grpo", "threshold": 0.02}],
}
PIPELINE = {
    "stages": {
        "annotate": {
            "matrix": {"domain": ["search"]},
            "cmd": "python -m stages.annotate",
            "deps": ["stages/annotate.py"],
            "outs": ["data/annotated"],
        }
    }
}


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True)


def project(root: Path) -> None:
    """A checkout with one experiment, committed."""
    files = {f"stages/{name}.py": text for name, text in STAGES.items()}
    files |= {
        ".dvcignore": "",
        "data/base/a": "a",
        "data/packages/a": "a",
        "data/raw/a": "a",
        "dvc.yaml": yaml.safe_dump(PIPELINE),
    }
    files |= {str(FOLDER / "rloo.yaml"): yaml.safe_dump(EXPERIMENT), "params.yaml": (ROOT / "params.yaml").read_text()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    write_table(root / "data/base/rows.parquet", EVALUATION_SCHEMA, [])
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        git(root, *arguments)


def begin(root: Path) -> subprocess.Popen[bytes]:
    """Starts what `make claims METHOD=rloo` starts, two runs at a time."""
    program = root.parent / "claim.py"  # outside the project, so that it does not import the project's `stages`
    program.write_text("from stages.claims.__main__ import main\nraise SystemExit(main())\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "BELLWETHER_"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), "EVENTS": str(root / "events"), "BELLWETHER_JOBS": "2"}
    environment["SHELL"] = "/bin/sh"  # dash (Debian's sh) stays between DVC and the stage
    with (root / "output").open("ab") as output:
        return subprocess.Popen([sys.executable, str(program), "rloo"], cwd=root, env=environment, stdout=output, stderr=output)


def events(root: Path) -> list[str]:
    return (root / "events").read_text().splitlines() if (root / "events").exists() else []


def processes_in(root: Path) -> list[str]:
    """Processes whose working directory is below `root`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                folder = os.readlink(entry / "cwd")
                found += [entry.name] if Path(folder).is_relative_to(root) else []
    return found


def kill_when(root: Path, reached: Callable[[list[str]], bool]) -> None:
    """Starts the command, kills it once the event log satisfies `reached`, and waits until its stages have ended, too."""
    process = begin(root)
    while not reached(events(root)):
        assert process.poll() is None, (root / "output").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while processes_in(root):
        assert time.monotonic() < deadline, "a stage outlived the command that had started it"
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_claims_command_resumes(tmp_path: Path) -> None:
    """Contract: no finished run is repeated, a killed one resumes from its checkpoint, and an unfinished start is rebuilt."""
    root = tmp_path / "project"
    project(root)
    kill_when(root, lambda lines: "start began" in lines)
    assert "start finished" not in events(root)
    (root / "events.go").touch()
    kill_when(root, lambda lines: "grpo/1 step 1" in lines)
    saved = json.loads((root / FOLDER / "rloo.json").read_text())
    assert saved["claims"][0]["verdict"] is None
    ended = set(saved["runs"])
    assert set() < ended < {f"{arm}/{seed}" for arm in EXPERIMENT["arms"] for seed in range(4)}
    before = events(root)
    git(root, "commit", "--allow-empty", "-qm", "b")

    assert begin(root).wait() == 0, (root / "output").read_text()
    report = json.loads((root / FOLDER / "rloo.json").read_text())
    claim = report["claims"][0]
    assert (claim["verdict"], claim["difference"], claim["seeds"], len(report["runs"])) == ("reproduced", 0.205, 4, 8)
    assert report["runs"]["grpo/3"]["metrics"]["panel.success"] == pytest.approx(0.3)
    assert len(report["commits"]) == 2, "the second commit changes nothing that runs depend on"
    seen = Counter(events(root))
    assert {f"{run} step {step}" for run in report["runs"] for step in range(STEPS)} == {line for line in seen if "step" in line}
    assert seen["grpo/1 step 0"] == 1, "the run in progress resumed from its checkpoint"
    assert not {line.split(" ")[0] for line in events(root)[len(before) :]} & ended
    assert (seen["start finished"], seen["evaluated sft"]) == (1, 1)
    left = {path for path in (root / WORKSPACES).glob("*/*") if path.is_dir()}
    assert [path.name.split("-")[0] for path in left] == ["start"]
