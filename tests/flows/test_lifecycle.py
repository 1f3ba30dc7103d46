"""The flow itself, on a small DVC project, with Prefect's own test server."""

from __future__ import annotations

from pathlib import Path

import pytest

import flows  # noqa: F401  (its settings must be there before Prefect is imported)


@pytest.fixture(scope="module")
def prefect_server():
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


def test_one_task_per_stage_and_one_identity_for_all(prefect_server: None, project: Path) -> None:
    """A flow run is the same as `dvc repro`: the same stages run, the same files come out, and a second run does nothing."""
    import prefect

    from flows.lifecycle import lifecycle

    text = (project / "dvc.yaml").read_text()
    (project / "dvc.yaml").write_text(text.replace("echo ${item.domain} ${scale} >", "echo $LIFECYCLE_RUN_ID >"))
    first = lifecycle(root=str(project))
    assert {name: done.ran for name, done in first.items()} == {"make": ("make@a", "make@b"), "join": ("join",)}
    identities = (project / "joined.txt").read_text().split()
    assert len(identities) == 2
    assert len(set(identities)) == 1
    second = lifecycle(root=str(project))
    assert [(done.ran, len(done.unchanged)) for done in second.values()] == [((), 2), ((), 1)]

    with prefect.get_client(sync_client=True) as client:
        names = sorted(run.name.split("-")[0] for run in client.read_task_runs())
    assert names == ["join", "join", "make", "make"]
