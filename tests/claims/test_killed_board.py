"""`make claims` killed with SIGKILL, while the start is made and while runs are played, on stages that take no time.

The stages of this project are a few lines: what is tested is the board's own work, from the commit to the verdict.
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
    "diary": """
import os
def say(text):
    with open(os.environ["DIARY"], "a") as diary:
        diary.write(text + chr(10))
""",
    "annotate": """
import os, pathlib, time
from stages.diary import say
from stages.runtime.parent import die_with_parent
die_with_parent()
say("start begun")
while not pathlib.Path(os.environ["DIARY"] + ".go").exists():
    time.sleep(0.05)
pathlib.Path("data/annotated").write_text("pairs")
say("start made")
""",
    "rl": f"""
import json, pathlib, time
import yaml
from stages.diary import say
from stages.runtime.parent import die_with_parent
die_with_parent()
rl = yaml.safe_load(open("params.yaml"))["rl"]
assert pathlib.Path("data/annotated").read_text() == "pairs"
checkpoint = pathlib.Path("checkpoint")
for step in range(int(checkpoint.read_text()) if checkpoint.exists() else 0, {STEPS}):
    time.sleep(0.05)
    say(f"{{rl['algorithm']}}/{{rl['seed']}} step {{step}}")
    checkpoint.write_text(str(step + 1))
pathlib.Path("reports/rl").mkdir(parents=True)
pathlib.Path("reports/rl/search.json").write_text(json.dumps({{"environment_steps": 12}}))
""",
    "evaluate": """
import json, pathlib, shutil
import yaml
from stages.diary import say
params = yaml.safe_load(open("params.yaml"))
seed, rloo = params["rl"]["seed"] or 0, params["rl"]["algorithm"] == "rloo"
success = 0.1 * seed + (0.2 + 0.01 * (seed % 2)) * rloo
say("evaluated " + params["evaluate"]["models"][0])
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
    files |= {"data/base/a": "a", "data/packages/a": "a", "data/raw/a": "a", "dvc.yaml": yaml.safe_dump(PIPELINE)}
    files |= {str(FOLDER / "rloo.yaml"): yaml.safe_dump(EXPERIMENT), "params.yaml": (ROOT / "params.yaml").read_text()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    write_table(root / "data/base/rows.parquet", EVALUATION_SCHEMA, [])
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        git(root, *arguments)


def begin(root: Path) -> subprocess.Popen[bytes]:
    """What `make claims METHOD=rloo` runs, two runs at a time."""
    program = root.parent / "claim.py"  # beside the project, whose own `stages` it must not find
    program.write_text("from stages.claims.__main__ import main\nraise SystemExit(main())\n")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "BELLWETHER_"))}
    environment = {**kept, "PYTHONPATH": str(ROOT), "DIARY": str(root / "diary"), "BELLWETHER_JOBS": "2"}
    environment["SHELL"] = "/bin/sh"  # dash, where Debian is, stays between DVC and the stage
    with (root / "said").open("ab") as said:
        return subprocess.Popen([sys.executable, str(program), "rloo"], cwd=root, env=environment, stdout=said, stderr=said)


def diary(root: Path) -> list[str]:
    return (root / "diary").read_text().splitlines() if (root / "diary").exists() else []


def at_work(root: Path) -> list[str]:
    """Processes whose folder is below `root`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                folder = os.readlink(entry / "cwd")
                found += [entry.name] if Path(folder).is_relative_to(root) else []
    return found


def killed_when(root: Path, there: Callable[[list[str]], bool]) -> None:
    """Begin, and kill once the diary says so; whoever was at work ends with it."""
    process = begin(root)
    while not there(diary(root)):
        assert process.poll() is None, (root / "said").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 60
    while at_work(root):
        assert time.monotonic() < deadline, "a stage outlived the command that had started it"
        time.sleep(0.05)


def test_a_killed_board_goes_on_where_it_was(tmp_path: Path) -> None:
    """Contract: no run that ended is repeated, one that was killed goes on from its checkpoint, the start is made whole."""
    root = tmp_path / "project"
    project(root)
    killed_when(root, lambda said: "start begun" in said)
    assert "start made" not in diary(root)
    (root / "diary.go").touch()
    killed_when(root, lambda said: "grpo/1 step 1" in said)
    saved = json.loads((root / FOLDER / "rloo.json").read_text())
    assert saved["claims"][0]["verdict"] is None
    ended = set(saved["runs"])
    assert set() < ended < {f"{arm}/{seed}" for arm in EXPERIMENT["arms"] for seed in range(4)}
    half = diary(root)
    git(root, "commit", "--allow-empty", "-qm", "b")

    assert begin(root).wait() == 0, (root / "said").read_text()
    report = json.loads((root / FOLDER / "rloo.json").read_text())
    claim = report["claims"][0]
    assert (claim["verdict"], claim["difference"], claim["seeds"], len(report["runs"])) == ("reproduced", 0.205, 4, 8)
    assert report["runs"]["grpo/3"]["metrics"]["panel.success"] == pytest.approx(0.3)
    assert len(report["commits"]) == 2, "the code that bears on runs is the same"
    said = Counter(diary(root))
    assert {f"{run} step {step}" for run in report["runs"] for step in range(STEPS)} == {line for line in said if "step" in line}
    assert said["grpo/1 step 0"] == 1, "the run in hand went on from its checkpoint"
    assert not {line.split(" ")[0] for line in diary(root)[len(half) :]} & ended
    assert (said["start made"], said["evaluated sft"]) == (1, 1)
    left = {path for path in (root / WORKSPACES).glob("*/*") if path.is_dir()}
    assert [path.name.split("-")[0] for path in left] == ["start"]
