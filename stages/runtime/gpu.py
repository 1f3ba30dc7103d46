"""A lock per GPU: one stage at a time."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stages.runtime.files import locked
from stages.runtime.lineage import stage_entry
from stages.runtime.run_params import RunParams


def user_folder() -> Path:
    """This user's private folder for files that all checkouts on this machine share; created if needed.

    Raises PermissionError if the path exists and is not a private folder of this user.
    """
    folder = Path(tempfile.gettempdir()) / f"bellwether-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # lstat: do not follow another user's link
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a private folder of yours (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}), so its "
            f"locks can't be trusted; remove it, or set TMPDIR to a folder of your own"
        )
    return folder


@contextmanager
def own_gpu(device: str, title: str) -> Iterator[float]:
    """Lock the GPU that `device` (`cuda`, `cuda:1`) denotes against other stages of this user in any checkout. Prints a message
    and waits while another stage holds it; yields the seconds waited. Of a launcher's processes, only the first (LOCAL_RANK 0)
    takes the lock."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = int(device.partition(":")[2] or 0)
    name = visible[number] if number < len(visible) else str(number)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield 0.0
        return
    path = user_folder() / f"gpu-{name.replace('/', '_')}.lock"
    with locked(path, wait=False) as acquired:
        if acquired:
            yield 0.0
            return
    print(f"{title}: GPU {name} is in use by another stage; waiting until it is free ({path})", flush=True)
    began = time.monotonic()
    with locked(path, wait=True):
        yield time.monotonic() - began


def uses_gpu(root: Path, name: str, params: RunParams) -> bool:
    """Whether the stage uses a GPU: params.yaml sets one, and dvc.yaml lists resources.device for the stage."""
    return params.resources.device.startswith("cuda") and "resources.device" in stage_entry(root, name, None).get("params", [])
