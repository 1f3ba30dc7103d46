"""The lifecycle with an environment of another package, which is edited in place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from checkout import Checkout
from outside import install_editable, python_path, write_package

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SUMS = """
from stages.environments.calculator import CalculatorDomain


class SumsDomain(CalculatorDomain):
    name = "sums"
"""


def test_curate_runs_again_after_an_edit_of_the_package(source: Path, tmp_path: Path) -> None:
    """Contract: dvc.yaml's own stages see a change in the package that brings their environment."""
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
