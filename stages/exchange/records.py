"""Files of records: JSON Lines and Parquet, which `datasets`, pandas, TRL and verl read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.files import atomic_file, atomic_text

KINDS = (".jsonl", ".parquet")


def check_kind(path: Path) -> None:
    """Raise ValueError for a file whose name ends otherwise than in one of KINDS."""
    if path.suffix not in KINDS:
        raise ValueError(f"{path} must end in {' or '.join(KINDS)}, which says what it holds")


def write_records(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with equal keys, atomically, the same rows always in the same bytes.

    Raises ValueError for none at all and for a file of another kind.
    """
    check_kind(path)
    if not rows:
        raise ValueError(f"there is nothing to write to {path}")
    if path.suffix == ".parquet":
        with atomic_file(path) as partial:
            pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), partial, compression="zstd", version="2.6")
    else:
        atomic_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """(line, record), or what is wrong with that line; a Parquet file's rows are counted as lines, from 1.

    Raises FileNotFoundError, and ValueError for a file of another kind or a Parquet file that is broken.
    """
    check_kind(path)
    if path.suffix == ".parquet":
        try:
            table = pq.read_table(path)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is not a readable Parquet file ({error})") from error
        yield from enumerate(table.to_pylist(), start=1)
        return
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        yield number, parse_line(line)


def parse_line(line: bytes) -> dict[str, Any] | ValueError:
    """The object in a line of JSON, or what is wrong with it."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"not UTF-8 text ({error})")
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON ({error})")
    if not isinstance(value, dict):
        return ValueError(f"a record must be a JSON object, not {type(value).__name__}")
    return value
