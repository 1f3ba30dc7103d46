"""Files of curate.imports."""

from __future__ import annotations

import pytest

from stages.curation.settings import Curate


@pytest.mark.parametrize("second", ["data/raw/b/demos.jsonl", "data/raw/a/demos.parquet"])
def test_files_whose_records_would_share_ids_are_refused(second: str) -> None:
    """Contract: imported records are named after their file's stem, so no two files have the same one."""
    with pytest.raises(ValueError, match=f"lists data/raw/a/demos.jsonl and {second}, whose records .* rename one of the files"):
        Curate(imports=["data/raw/a/demos.jsonl", second])
    assert Curate(imports=["data/raw/a/demos.jsonl", "data/raw/b/more.jsonl"]).imports
