"""A curated domain that the tests of panels and of the stage share."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.curation.panel import make_panel, write_panel
from stages.environments.search import SearchDomain
from stages.records.episode import write_tasks


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A curated search domain with a panel of 8 tasks in 2 worlds or more."""
    folder = tmp_path_factory.mktemp("curated")
    domain = SearchDomain()
    records = [record for record in domain.recipes(64, 0) if record["split"] == "test"]
    tasks = domain.build(records[:4] + records[-4:], folder / "search" / "worlds", 1)
    write_tasks(folder / "search" / "tasks.parquet", tasks)
    write_panel(folder / "search" / "panel.json", make_panel(domain, tasks, folder / "search" / "worlds"))
    return folder
