"""Atomic, durable writes of files and folders.

Everything that a later step reads (outputs, checkpoints, reports, queues) is written to a name ending in `.partial`, flushed to
the disk (fsync) and renamed, so that readers see the old content or the new, never a part. The next write replaces what a killed
process left; DVC and `stages/runtime/lineage.py` ignore it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
AT_ONCE = 16
"""Files that are flushed concurrently."""
_NO_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""Errors of file systems that cannot flush a folder."""


def _partial_of(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync_folder(path: Path) -> None:
    """Flush the names in a folder."""
    try:
        _sync_file(path)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def _sync_tree(path: Path) -> None:
    """Flush everything below `path`. File systems batch concurrent requests, which is ten times faster for many small files."""
    found = [(Path(folder), names) for folder, _, names in os.walk(path, topdown=False)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(_sync_file, [folder / name for folder, names in found for name in names]))
    for folder, _ in found:
        _sync_folder(folder)


def _share(folder: Path) -> None:
    """Let those read the files in `folder` who may read the folder: some libraries make files for their owner alone."""
    readers = folder.stat().st_mode & 0o444
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | readers)


@contextmanager
def atomic_file(path: Path | str, *, durable: bool = True) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` at the end of the block. Creates the folder if needed.

    An exception leaves `path` unchanged. durable: flush to the disk before the rename; unnecessary for files that matter only
    while this process runs. Raises OSError.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = _partial_of(path)
    try:
        _remove(partial)
        yield partial
        if durable:
            _sync_file(partial)
        os.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise
    if durable:
        _sync_folder(path.parent)


def atomic_bytes(path: Path | str, data: bytes, *, durable: bool = True) -> None:
    """Write `data` to `path` as `atomic_file` does."""
    with atomic_file(path, durable=durable) as partial:
        partial.write_bytes(data)


def atomic_text(path: Path | str, text: str, *, durable: bool = True) -> None:
    """Write `text` as UTF-8 to `path` as `atomic_file` does, without converting line ends."""
    atomic_bytes(path, text.encode(), durable=durable)


def append_lines(path: Path | str, lines: Iterable[bytes]) -> None:
    """Add lines, given without their ends, to a file: all of them or, on a full disk, nothing, since a part of a line would spoil
    the next one. No other process may write meanwhile. Raises OSError."""
    data = b"".join(line + b"\n" for line in lines)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(handle).st_size
        if os.write(handle, data) < len(data):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """Yield an empty folder to write to, which replaces `path` at the end of the block.

    An exception leaves `path` unchanged. Folders can't be exchanged atomically on all systems: `path` is missing briefly
    between two renames. Raises OSError.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial, old = _partial_of(path), _partial_of(path.with_name(f"{path.name}.old"))
    try:
        _remove(old)
        _remove(partial)
        partial.mkdir()
        yield partial
        _share(partial)
        _sync_tree(partial)
        if path.exists() or path.is_symlink():
            os.replace(path, old)
        os.replace(partial, path)
    except BaseException:
        _remove(partial)
        raise
    _sync_folder(path.parent)
    _remove(old)


@contextmanager
def atomic_files(folder: Path | str) -> Iterator[Path]:
    """Yield an empty folder to write files to; at the end of the block each is moved to `folder`, whose other files stay.

    Each file is replaced atomically; an exception leaves all unchanged. Raises OSError.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / PARTIAL
    try:
        _remove(partial)
        partial.mkdir()
        yield partial
        _sync_tree(partial)
        for path in sorted(partial.iterdir()):
            os.replace(path, folder / path.name)
    finally:
        _remove(partial)
    _sync_folder(folder)


@contextmanager
def locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold an exclusive lock on `path`, which is created if needed and must not be a link. Without `wait`, yields False
    if another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
