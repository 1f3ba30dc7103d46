"""Records and tasks of a tiny search domain."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stages.curation.raw import RawRecord
from stages.environments.search import SearchDomain
from stages.records.task import Task


@pytest.fixture
def domain() -> SearchDomain:
    return SearchDomain()


@pytest.fixture
def records(domain: SearchDomain) -> list[RawRecord]:
    """120 checked records of fifteen worlds, with all splits."""
    return [RawRecord(record, "raw.jsonl", line) for line, record in enumerate(domain.recipes(120, 0), start=1)]


@pytest.fixture
def tasks(domain: SearchDomain, records: list[RawRecord], tmp_path: Path) -> list[Task]:
    return domain.build([record.record for record in records], tmp_path / "worlds", 1)


@pytest.fixture
def lines(domain: SearchDomain) -> list[str]:
    return [json.dumps(record) for record in domain.recipes(120, 0)]
