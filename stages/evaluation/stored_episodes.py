"""The episodes behind an evaluation, token for token: data/evaluation/episodes.parquet, one row group per job and model.

A job's episodes travel as one compressed Arrow buffer, so that a large evaluation never holds all its tokens as Python objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.records.episode import EPISODE_SCHEMA, FORGOTTEN_COLUMN, Episode, episode_from, undamaged
from stages.runtime.files import atomic_file

FILE = Path("data") / "evaluation" / "episodes.parquet"
PLAYED_SCHEMA = pa.schema([("model", pa.string()), ("attempt", pa.int32()), *EPISODE_SCHEMA])
"""EPISODE_SCHEMA with the model's name, as in the rows of the evaluation, and the number of the attempt at the task. Ids are
unique per model: all models play the same attempts. FORGOTTEN_COLUMN follows if one of the episodes forgets an observation."""


def packed(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Rows of PLAYED_SCHEMA without `model` as an Arrow stream compressed with zstd."""
    schema = PLAYED_SCHEMA.remove(0)
    if any(row.get("forgotten") for row in rows):
        schema = schema.append(pa.field(*FORGOTTEN_COLUMN))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(pa.Table.from_pylist([dict(row) for row in rows], schema=schema))
    return sink.getvalue().to_pybytes()


def unpacked(data: bytes) -> list[Episode]:
    """The episodes of packed rows, in their order."""
    return [episode_from(row) for row in pa.ipc.open_stream(data).read_all().drop_columns(["attempt"]).to_pylist()]


def write_played(path: Path, parts: Iterable[tuple[str, bytes]]) -> None:
    """Write (model, packed rows) in the given order; the same parts always give the same bytes. Raises OSError."""
    settings: dict[str, Any] = {"compression": "zstd", "version": "2.6", "write_statistics": ["model", "domain"]}
    parts, (name, kind) = list(parts), FORGOTTEN_COLUMN
    forgets = any(name in pa.ipc.open_stream(data).schema.names for _, data in parts)
    schema = PLAYED_SCHEMA.append(pa.field(name, kind)) if forgets else PLAYED_SCHEMA
    with atomic_file(path) as partial, pq.ParquetWriter(partial, schema, **settings) as writer:
        for model, data in parts:
            table = pa.ipc.open_stream(data).read_all()
            if forgets and name not in table.column_names:
                table = table.append_column(name, pa.array([[]] * len(table), kind))
            named = table.add_column(0, "model", pa.array([model] * len(table), pa.string()))
            writer.write_table(named.cast(schema), row_group_size=max(len(named), 1))


def played_groups(path: Path, domain: str, models: Sequence[str]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(model, its rows in the domain) in the order of `models`, one model in memory at a time; nothing without the file.

    Raises ValueError for a damaged file.
    """
    if not path.exists():
        return
    for model in models:
        with undamaged(path, "delete it and run evaluate again"):
            rows = pq.read_table(path, filters=[("model", "=", model), ("domain", "=", domain)]).to_pylist()
        if rows:
            yield model, rows


def stored_groups(path: Path) -> frozenset[tuple[str, str]]:
    """(model, domain) of the episodes in the file; none without the file. Raises ValueError for a damaged file."""
    if not path.exists():
        return frozenset()
    with undamaged(path, "delete it and run evaluate again"):
        table = pq.read_table(path, columns=["model", "domain"])
    return frozenset(zip(*(table.column(name).to_pylist() for name in ("model", "domain")), strict=True))
