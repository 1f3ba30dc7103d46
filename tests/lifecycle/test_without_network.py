"""Contract: nothing is downloaded at run time. Stages run in their own network namespace, without even 127.0.0.1."""

from __future__ import annotations

import subprocess

import pytest
from checkout import DVC, Checkout

NO_NETWORK = ["unshare", "--user", "--map-root-user", "--net"]


def can_unshare_network() -> bool:
    try:
        return subprocess.run([*NO_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not can_unshare_network(), reason="`unshare --net` is not permitted here"),
]


def repro_without_network(checkout: Checkout, *arguments: str) -> str:
    """Output of `dvc repro --force`, which must succeed."""
    command = [*NO_NETWORK, *DVC, "repro", "--force", *arguments]
    done = subprocess.run(command, cwd=checkout.root, env=checkout.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def test_stage_that_loads_models_needs_no_network(done: Checkout) -> None:
    lock = done.lock
    assert "Running stage 'sft'" in repro_without_network(done, "--single-item", "sft")
    assert done.lock == lock


@pytest.mark.slow
def test_whole_pipeline_needs_no_network(done: Checkout) -> None:
    lock = done.lock
    assert repro_without_network(done).count("Running stage") == len(lock)
    assert done.lock == lock
