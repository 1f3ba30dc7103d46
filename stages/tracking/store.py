"""The local MLflow store of a checkout: `mlflow.db` and the artifact folder `mlartifacts`.

MLflow stores absolute artifact URIs. When a checkout is copied or moved, `relocate` rewrites them in its database; otherwise new
runs would write their artifacts into the original checkout.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlparse

DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
TIMEOUT_S = 30.0
"""How long to wait for other writers of the database."""


def _stored_uri(connection: sqlite3.Connection) -> str | None:
    """The URI of the artifact folder in the database; None if it has none yet."""
    pattern = f"file:%/{ARTIFACTS}%"
    row = connection.execute("SELECT artifact_location FROM experiments WHERE artifact_location LIKE ?", (pattern,)).fetchone()
    before, found, _ = f"{row[0]}/".rpartition(f"/{ARTIFACTS}/") if row else ("", "", "")
    return f"{before}/{ARTIFACTS}" if found else None


def _rewrite(connection: sqlite3.Connection, old: str, new: str) -> None:
    """Replace the URI prefix `old` by `new` in every text column."""
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        columns = connection.execute(f'PRAGMA table_info("{table}")').fetchall()
        for name in [name for _, name, kind, *_ in columns if "CHAR" in kind.upper() or "TEXT" in kind.upper()]:
            rest = len(old) + 1
            update = f'UPDATE "{table}" SET "{name}" = ? || substr("{name}", ?)'
            where = f'WHERE "{name}" = ? OR substr("{name}", 1, ?) = ?'
            connection.execute(f"{update} {where}", (new, rest, old, rest, f"{old}/"))


def relocate(root: Path) -> str | None:
    """Point the database of checkout `root` to its own artifact folder; returns the previous URI if it was another.

    Only URIs below a folder `mlartifacts` change. The caller holds the connection lock. Raises sqlite3.Error.
    """
    database, here = root / DATABASE, root / ARTIFACTS
    if not database.exists():
        return None
    with closing(sqlite3.connect(database, timeout=TIMEOUT_S)) as connection, connection:
        old, new = _stored_uri(connection), here.as_uri()
        if old is None or old == new:
            return None
        there = Path(unquote(urlparse(old).path))
        if there.exists() and here.exists() and there.samefile(here):  # another path to the same folder
            return None
        _rewrite(connection, old, new)
    return old
