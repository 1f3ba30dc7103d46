"""The password of the Prefect servers that this checkout starts, in the file `auth` in PREFECT_HOME.

A worker runs any command that the API schedules: an API without a password would give this account to every user of the machine
and to every web page in its browser.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

FILE = "auth"
USER = "bellwether"
API, SERVER = "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"
"""The password that clients send; the password that servers require."""
HOSTS = ("127.0.0.1", "localhost")
"""Names of this machine."""


def file(environment: Mapping[str, str]) -> Path:
    """Path of the password file."""
    return Path(environment["PREFECT_HOME"]).expanduser() / FILE


def auth_string(path: Path) -> str:
    """`user:password`, created at random the first time, in a file that only its owner can read. Raises PermissionError for a
    file that others can read or own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # of several processes, the first creates it
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"{path} holds the password of Prefect's API, and others can read or change it (owner {found.st_uid}, mode "
                f"{stat.filemode(found.st_mode)}); delete it to get a new one"
            )
        if not (text := handle.read().strip()):
            text = f"{USER}:{secrets.token_urlsafe(32)}"
            handle.write(f"{text}\n")
    return text


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings that make Prefect's servers require the password, and its clients send it, to servers of this machine only. Values
    in `environment` take precedence."""
    password = environment.get(SERVER) or auth_string(file(environment))
    address = environment.get("PREFECT_API_URL")
    local = not address or urlsplit(address).hostname in HOSTS
    return {SERVER: password, **({API: password} if local and not environment.get(API) else {})}


def origins(port: int) -> str:
    """Origins whose pages may read responses of the server at `port`: its own."""
    return ",".join(f"http://{host}:{port}" for host in HOSTS)


def pair(text: str) -> tuple[str, str]:
    """User and password, separated."""
    user, _, password = text.partition(":")
    return user, password
