"""Reads trajectories that other tools wrote: ATIF documents and logs of Inspect, in files or folders of files."""

from __future__ import annotations

import io
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from stages.exchange import atif, inspect_log
from stages.exchange.records import parse_object
from stages.records.episode import Episode

SUFFIXES = (".json", ".jsonl", ".eval")
MAX_MEMBER = 2**30
"""Most bytes of one file in a `.eval`, uncompressed."""
_SAMPLE = re.compile(r"samples/[^/].*\.json")
_ZSTD = 93
"""Compression method of zip files; Python reads it from 3.14 on."""
_LOCAL_HEADER = struct.Struct("<26x2H")


@dataclass(frozen=True)
class Item:
    """One trajectory: an ATIF document or a sample of an Inspect log. `where`: file, and line or sample."""

    where: str
    kind: str
    value: Mapping[str, Any]

    @property
    def ours(self) -> bool:
        return atif.is_ours(self.value) if self.kind == "atif" else inspect_log.is_ours(self.value)

    def episode(self) -> Episode:
        """The exported episode. Raises ValueError for another tool's."""
        try:
            if not self.ours:
                raise ValueError("only episodes exported by this project can become episodes again; write conversations (.jsonl)")
            return atif.episode_of(self.value) if self.kind == "atif" else inspect_log.episode_of(self.value)
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error

    def records(self) -> list[dict[str, Any]]:
        """Its conversations, for `curate.imports`. Raises ValueError naming what can't be read."""
        try:
            return list(atif.records_of(self.value)) if self.kind == "atif" else [inspect_log.record_of(self.value)]
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.where}: malformed ({error!r})") from error
        except ValueError as error:
            raise ValueError(f"{self.where}: {error}") from error


def read_items(source: Path) -> Iterator[Item]:
    """All trajectories of a file, or of the files of a folder in the order of their names.

    Raises FileNotFoundError, and ValueError naming the file for anything else than ATIF and Inspect's logs.
    """
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        if not files:
            raise ValueError(f"{source} has no files that end in {', '.join(SUFFIXES)}")
        for path in files:
            yield from read_items(path)
        return
    if source.suffix not in SUFFIXES:
        raise ValueError(f"{source} must end in {', '.join(SUFFIXES)}, or be a folder of such files")
    try:
        if source.suffix == ".eval":
            yield from _packed(source)
        elif source.suffix == ".jsonl":
            for number, line in enumerate(source.read_bytes().splitlines(), start=1):
                yield from _document(parse_object(line), f"{source}:{number}")
        else:
            yield from _document(parse_object(source.read_bytes()), str(source))
    except ValueError as error:
        raise error if str(error).startswith(str(source)) else ValueError(f"{source}: {error}") from error


def _document(value: Mapping[str, Any], where: str) -> Iterator[Item]:
    if atif.is_trajectory(value):
        yield Item(where, "atif", value)
    elif inspect_log.is_log(value):
        yield from (Item(f"{where}, sample {sample.get('id')}", "inspect", sample) for sample in inspect_log.samples_of(value))
    else:
        raise ValueError(f"{where} is neither an ATIF trajectory (schema_version) nor a log of Inspect (eval, status)")


def _packed(source: Path) -> Iterator[Item]:
    """The samples of a `.eval`, in the order in which they were added."""
    content = source.read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as held:
            members = [info for info in held.infolist() if _SAMPLE.fullmatch(info.filename)]
            for info in members:
                yield Item(f"{source}, {info.filename}", "inspect", parse_object(_member(held, info, content)))
    except (zipfile.BadZipFile, struct.error, pa.ArrowException, NotImplementedError, EOFError, OSError, RuntimeError) as error:
        raise ValueError(f"{source} is not a readable .eval file ({error})") from error
    if not members:
        raise ValueError(f"{source} has no samples")


def _member(held: zipfile.ZipFile, info: zipfile.ZipInfo, content: bytes) -> bytes:
    """A file of the zip. Raises ValueError if it is too large."""
    if info.file_size > MAX_MEMBER:
        raise ValueError(f"{info.filename} has {info.file_size} bytes; at most {MAX_MEMBER} are read")
    if info.compress_type != _ZSTD:
        return held.read(info)
    name, extra = _LOCAL_HEADER.unpack_from(content, info.header_offset)
    start = info.header_offset + _LOCAL_HEADER.size + name + extra
    packed = content[start : start + info.compress_size]
    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        return stream.read(info.file_size)
