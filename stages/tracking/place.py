"""Where a checkout keeps its runs: `mlflow.db`, and beside it the folder `mlartifacts` with the files that runs attach.

MLflow stores absolute addresses of files. A checkout that was copied or moved brings its database along, so the addresses in it
are brought up to date before anybody uses it: else new runs would put their files into the checkout that it was copied from.
"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote, urlparse

DATABASE, ARTIFACTS = "mlflow.db", "mlartifacts"
WAIT_S = 30.0
"""For others that write to the database."""


def _former(connection: sqlite3.Connection) -> str | None:
    """The address of the folder of files that the database names; None before there is one."""
    pattern = f"file:%/{ARTIFACTS}%"
    row = connection.execute("SELECT artifact_location FROM experiments WHERE artifact_location LIKE ?", (pattern,)).fetchone()
    before, found, _ = f"{row[0]}/".rpartition(f"/{ARTIFACTS}/") if row else ("", "", "")
    return f"{before}/{ARTIFACTS}" if found else None


def _rename(connection: sqlite3.Connection, former: str, now: str) -> None:
    """Put `now` in the place of `former` wherever a text is that address or one below it."""
    tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    for table in tables:
        columns = connection.execute(f'PRAGMA table_info("{table}")').fetchall()
        for name in [name for _, name, kind, *_ in columns if "CHAR" in kind.upper() or "TEXT" in kind.upper()]:
            below = len(former) + 1
            changed = f'UPDATE "{table}" SET "{name}" = ? || substr("{name}", ?)'
            where = f'WHERE "{name}" = ? OR substr("{name}", 1, ?) = ?'
            connection.execute(f"{changed} {where}", (now, below, former, below, f"{former}/"))


def bring_up_to_date(root: Path) -> str | None:
    """Let the database of the checkout `root` name its own folder of files; returns the address that it named, if another.

    Only addresses of files in a folder `mlartifacts` are changed. The caller holds the lock on the database's connection.
    Raises sqlite3.Error.
    """
    database, here = root / DATABASE, root / ARTIFACTS
    if not database.exists():
        return None
    with closing(sqlite3.connect(database, timeout=WAIT_S)) as connection, connection:
        former, now = _former(connection), here.as_uri()
        if former is None or former == now:
            return None
        there = Path(unquote(urlparse(former).path))
        if there.exists() and here.exists() and there.samefile(here):  # the same folder by another name
            return None
        _rename(connection, former, now)
    return former
