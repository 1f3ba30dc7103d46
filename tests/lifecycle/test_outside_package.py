"""The pipeline with an environment of an editable package, and with the template package."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkout import ROOT, Checkout
from outside import install_editable, python_path, write_package

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SUMS = """
from stages.environments.calculator import CalculatorDomain


class SumsDomain(CalculatorDomain):
    name = "sums"
"""


def test_edit_of_the_package_reruns_curate(source: Path, tmp_path: Path) -> None:
    """Contract: the stages of dvc.yaml depend on the package that provides their environment."""
    write_package(tmp_path, "sums-game", {"bellwether.domains": 'sums = "sums_game:SumsDomain"'}, code=SUMS)
    install_editable(tmp_path, "sums-game")
    checkout = Checkout.make(tmp_path / "checkout", source)
    checkout.environment["PYTHONPATH"] = python_path(tmp_path, checkout.root)
    path = checkout.root / "params.yaml"
    values = yaml.safe_load(path.read_text())
    own = {name: {} for name in ("environment", "curate", "rollout", "annotate", "rl")}
    path.write_text(yaml.safe_dump({**values, "domains": ["sums"], "per_domain": {"sums": own}}, sort_keys=False))
    assert checkout.repro("curate@sums") == (["curate@sums"], [])
    assert checkout.repro("curate@sums") == ([], [])
    with (tmp_path / "sums-game/sums_game/__init__.py").open("a") as handle:
        handle.write("# edited in place\n")
    assert checkout.repro("curate@sums") == (["curate@sums"], [])


def test_template_package_runs_from_curate_to_merge(source: Path, tmp_path: Path) -> None:
    """Contract: an outside environment, RL method and merge method need no edit of this repository."""
    shutil.copytree(ROOT / "examples/plugin", tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(tmp_path / "target")]
    subprocess.run([*command, str(tmp_path / "source")], check=True)
    checkout = Checkout.make(tmp_path / "checkout", source)
    checkout.environment["PYTHONPATH"] = f"{tmp_path / 'target'}:{checkout.root}"
    path = checkout.root / "params.yaml"
    values = yaml.safe_load(path.read_text())
    own = {name: {} for name in ("environment", "curate", "rollout", "annotate")}
    own["rl"] = {"algorithm": "rank_pg", "settings": {"scale": 0.5}, "tasks_per_step": 2}
    values |= {"domains": ["maze"], "per_domain": {"maze": own}, "merge": {"method": "largest"}}
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    ran, _ = checkout.repro("merge")
    assert ran == ["curate@maze", "sft", "rollout@maze", "annotate@maze", "rl@maze", "merge"]
    assert (checkout.root / "data/models/merged/model.safetensors").exists()
