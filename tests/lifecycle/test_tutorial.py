"""docs/tutorial.md: its commands run in their order and print what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
SET_UP = ("make install", "source .venv/bin/activate")
OFFLINE = "-q --no-deps --no-build-isolation --no-index"
REPLACED = {
    "pip install --no-build-isolation -e my_game": f"pip install {OFFLINE} --target packages ./my_game",
    "make lifecycle": "python -m flows.pipeline && dvc metrics show reports/metrics.json",
    'make keep NOTE="GRPO"': 'python -m stages.reporting.keep --note "GRPO" && dvc --wait-for-lock repro report',
}
"""What a make target runs after its set-up; the package is not installed into the environment of the tests."""


def steps() -> list[tuple[str, list[str]]]:
    """The commands, each with the lines that the page shows of its output."""
    found: list[tuple[str, list[str]]] = []
    for line in re.findall(r"^    (.+)$", TEXT, re.M):
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), []))
        elif line != "[...]":
            found[-1][1].append(line)
    return found


def play(folder: Path, command: str) -> str:
    """The command's output in the checkout `folder`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder / "packages"), "BELLWETHER_TRACKING": "off"}
    done = subprocess.run(
        ["bash", "-ec", REPLACED.get(command, command)], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of the working tree."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    for name in filter(None, subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout.split("\0")):
        if (ROOT / name).is_file() and not name.startswith("tests/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def run_steps(checkout: Path, chosen: list[tuple[str, list[str]]]) -> None:
    for command, shown in chosen:
        printed = play(checkout, command)
        for line in shown:
            assert line in printed, f"{command} does not print: {line}\n{printed}"


@pytest.mark.slow
def test_the_environment_is_checked_and_configured(checkout: Path) -> None:
    """Contract: the commands up to the first training run as the page shows them."""
    before = [step for step in steps() if step[0] not in SET_UP]
    first = next(number for number, (command, _) in enumerate(before) if command == "make lifecycle")
    assert first == 5
    run_steps(checkout, before[:first])
    assert "domains: [courier]" in (checkout / "params.yaml").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_tutorial_prints_what_it_shows(checkout: Path) -> None:
    run_steps(checkout, [step for step in steps() if step[0] not in SET_UP])
