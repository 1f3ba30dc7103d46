"""Record files in the formats that `datasets`, pandas, TRL and verl read: JSON Lines and Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.records.episode import undamaged
from stages.runtime.files import atomic_file, atomic_text

KINDS = (".jsonl", ".parquet")
DEPTH = 100
"""Maximum nesting of objects and lists in a record."""
TOO_DEEP = f"values are nested too deeply (more than {DEPTH} objects and lists inside one another)"


def check_kind(path: Path) -> None:
    """Raise ValueError unless the file name ends in one of KINDS."""
    if path.suffix not in KINDS:
        raise ValueError(f"{path} must end in {' or '.join(KINDS)}, which selects the format")


def write_records(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, which must have the same keys, atomically; the same rows always give the same bytes.

    Raises ValueError for an empty list and for an unknown file name suffix.
    """
    check_kind(path)
    if not rows:
        raise ValueError(f"no rows to write to {path}")
    if path.suffix == ".parquet":
        with atomic_file(path) as partial:
            pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), partial, compression="zstd", version="2.6")
    else:
        atomic_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | ValueError]]:
    """(line number, record), or (line number, error) for an invalid line. Lines, or rows of a Parquet file, count from 1.

    Raises FileNotFoundError, and ValueError for an unknown file name suffix or a damaged Parquet file.
    """
    check_kind(path)
    if path.suffix == ".parquet":
        with undamaged(path, "replace it or remove it"):
            rows = list(_table_rows(pq.read_table(path)))
        yield from enumerate(rows, start=1)
        return
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            yield number, parse_object(line)
        except ValueError as error:
            yield number, error


def _table_rows(table: pa.Table) -> Iterator[dict[str, Any] | ValueError]:
    """The rows of a table; a row with invalid UTF-8 becomes an error without affecting the others."""
    try:
        yield from table.to_pylist()
        return
    except UnicodeDecodeError:
        pass
    for place in range(len(table)):
        try:
            (row,) = table.slice(place, 1).to_pylist()
            yield row
        except UnicodeDecodeError as error:
            yield ValueError(f"not UTF-8 text ({error})")


def parse_object(line: bytes) -> dict[str, Any]:
    """The object in a line of JSON. Raises ValueError, "reason (detail)", for anything else and for values that tables can't
    hold: text with half a surrogate pair, nesting deeper than DEPTH, integers beyond Python's limit on digits."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error})") from error
    except RecursionError as error:
        raise ValueError(TOO_DEEP) from error
    except ValueError as error:  # Python refuses to read an integer of more than sys.get_int_max_str_digits() digits
        raise ValueError(f"a number is too long ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"a record must be a JSON object, not {type(value).__name__}")
    _check_values(value)
    return value


def _check_values(value: Any) -> None:
    """Raise ValueError for a value that nests too deeply or contains text that is not Unicode. Not recursive, so that deep
    nesting can't exhaust the stack."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    while waiting:
        held, depth = waiting.pop()
        if isinstance(held, str):
            try:
                held.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"text that is not Unicode ({error})") from error
        elif isinstance(held, (dict, list)):
            if depth > DEPTH:
                raise ValueError(TOO_DEEP)
            parts = [*held, *held.values()] if isinstance(held, dict) else held
            waiting += [(part, depth + 1) for part in parts]
