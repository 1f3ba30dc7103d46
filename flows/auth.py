"""Who may ask the API of the Prefect servers that this checkout starts: whoever can read the file `auth` in PREFECT_HOME.

A worker runs what the API is told to run, so that an API which answers anybody gives this account away: to every other user of
the machine, and to every web page that its browser shows.
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
"""What is sent with each request; what a server wants to be sent."""
HOSTS = ("127.0.0.1", "localhost")
"""How this machine calls itself."""


def file(environment: Mapping[str, str]) -> Path:
    """Where the string is kept."""
    return Path(environment["PREFECT_HOME"]).expanduser() / FILE


def auth_string(path: Path) -> str:
    """`user:password`, made at random the first time, in a file that its owner alone can read.

    Raises PermissionError, saying what to do, for a file that others can read or have written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+", encoding="ascii") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # of several processes, the first makes it
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise PermissionError(
                f"{path} holds the password of Prefect's API, and others can read or change it (owner {found.st_uid}, mode "
                f"{stat.filemode(found.st_mode)}); delete it, and a new one is made"
            )
        if not (text := handle.read().strip()):
            text = f"{USER}:{secrets.token_urlsafe(32)}"
            handle.write(f"{text}\n")
    return text


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of Prefect that make its servers here ask for the password, and its clients here send it: to no server but
    one of this machine. What `environment` has set stays."""
    wanted = environment.get(SERVER) or auth_string(file(environment))
    address = environment.get("PREFECT_API_URL")
    local = not address or urlsplit(address).hostname in HOSTS
    return {SERVER: wanted, **({API: wanted} if local and not environment.get(API) else {})}


def origins(port: int) -> str:
    """The pages that a browser lets read what a server at `port` says: its own."""
    return ",".join(f"http://{host}:{port}" for host in HOSTS)


def pair(text: str) -> tuple[str, str]:
    """User and password of the string, for clients that want them apart."""
    user, _, password = text.partition(":")
    return user, password
