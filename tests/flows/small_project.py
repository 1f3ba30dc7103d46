"""A small DVC project with the lifecycle's structure: a matrix stage, and one that joins its outputs."""

from __future__ import annotations

from pathlib import Path

DVC_YAML = """
stages:
  join:
    cmd: cat made/*.txt > joined.txt
    deps: [made]
    params: [domains]
    outs: [joined.txt]
  make:
    matrix: {domain: "${domains}"}
    cmd: mkdir -p made && echo ${item.domain} ${scale} > made/${item.domain}.txt
    deps: [source.txt]
    params: [scale]
    outs: ["made/${item.domain}.txt"]
"""


def make_project(root: Path) -> Path:
    (root / "dvc.yaml").write_text(DVC_YAML)
    (root / "params.yaml").write_text("domains: [a, b]\nscale: 1\n")
    (root / "source.txt").write_text("source\n")
    (root / ".dvc").mkdir()  # like `dvc init --no-scm`, which takes seconds
    (root / ".dvc" / "config").write_text("[core]\n    analytics = false\n    no_scm = True\n")
    (root / ".dvcignore").write_text("")
    return root


WORK_PY = '''
"""Act as the file `how` says: end, fail, or run until killed, with a child in its own session."""
import json, pathlib, subprocess, sys, time

how = pathlib.Path("how").read_text().split()
with open("attempts", "a") as attempts:
    attempts.write("x")
if how[0] == "hold":
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    progress = pathlib.Path(".bellwether/progress")
    progress.mkdir(parents=True, exist_ok=True)
    state = {"label": "work: training", "done": 3, "total": 12, "unit": "step"}
    (progress / "work.json").write_text(json.dumps(state))
    pathlib.Path("pids").write_text(f"{child.pid}")
    time.sleep(300)
if how[0] == "fail" and len(pathlib.Path("attempts").read_text()) <= int(how[1]):
    sys.exit("the disk is full")
if how[0] == "bad":
    print("work: params.yaml: unknown key 'rl.step'. Did you mean 'steps'?", file=sys.stderr)
    sys.exit(2)
pathlib.Path("worked.txt").write_text("done\\n")
'''
WORK = """
  work:
    cmd: python work.py
    deps: [how, joined.txt]
    outs: [worked.txt]
"""


def set_behaviour(root: Path, how: str) -> None:
    """Set how the stage `work` behaves, which makes it outdated, and reset its attempts."""
    (root / "how").write_text(how)
    (root / "attempts").unlink(missing_ok=True)
    (root / "pids").unlink(missing_ok=True)


def add_work(root: Path) -> Path:
    (root / "dvc.yaml").write_text((root / "dvc.yaml").read_text() + WORK)
    (root / "work.py").write_text(WORK_PY)
    set_behaviour(root, "end")
    return root
