"""A checkout in which design searches run."""

from __future__ import annotations

from pathlib import Path

import pytest
from search_checkout import VALUES, write_files

from stages.curation.panel import make_panel, write_panel
from stages.environments.search import SearchDomain
from stages.params import ROOT
from stages.records.episode import write_tasks


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny_policy: Path) -> Path:
    """A checkout with a panel of 8 tasks, 4 validation tasks and a policy."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "stages").mkdir()
    (root / "stages" / "code.py").write_text("")
    (root / "dvc.yaml").write_text((ROOT / "dvc.yaml").read_text())
    write_files(root, VALUES)
    for folder in ("data/base", "data/models/sft"):
        (root / folder).mkdir(parents=True)
        for path in tiny_policy.iterdir():
            (root / folder / path.name).write_bytes(path.read_bytes())
    domain, curated = SearchDomain(), root / "data/curated/search"
    records = {split: [one for one in domain.recipes(400, 0) if one["split"] == split] for split in ("test", "valid")}
    tasks = domain.build(
        [*records["test"][:4], *records["test"][-4:], *records["valid"][:2], *records["valid"][-2:]], curated / "worlds", 1
    )
    write_tasks(curated / "tasks.parquet", tasks)
    write_panel(curated / "panel.json", make_panel(domain, tasks, curated / "worlds"))
    return root
