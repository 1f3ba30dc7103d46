"""Raw records: one JSON object per line of data/raw/<domain>.jsonl. Nothing is dropped silently.

`python -m stages.curation raw DOMAIN --count N --seed S > data/raw/DOMAIN.jsonl` makes such a file from a domain's recipes,
with the settings that params.yaml has for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.environments.protocol import Domain
from stages.exchange.records import parse_object
from stages.records.task import SPLITS, Split
from stages.runtime.validation import brief


@dataclass(frozen=True)
class RawRecord:
    """A checked record and where it came from; `file` is relative to the repository."""

    record: Mapping[str, Any]
    file: str
    line: int

    @property
    def task_id(self) -> str:
        return self.record["task_id"]

    @property
    def split(self) -> str:
        return self.record["split"]


@dataclass(frozen=True)
class Rejection:
    """Why something was left out. `reason` is a short class that is counted, `detail` says what exactly was wrong."""

    reason: str
    detail: str
    file: str
    line: int
    task_id: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", brief(self.detail))

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}: {self.detail}"

    @classmethod
    def of(cls, source: RawRecord, reason: str, detail: str) -> Rejection:
        return cls(reason, detail, source.file, source.line, source.task_id)


def parse_line(line: bytes, domain: Domain) -> dict[str, Any]:
    """A raw record from one line. Raises ValueError saying what is wrong with it."""
    record = parse_object(line)
    for key in ("task_id", "split"):
        if not isinstance(record.get(key), str) or not record[key]:
            raise ValueError(f"'{key}' must be a non-empty string, not {record.get(key)!r}")
    if record["split"] not in SPLITS:
        raise ValueError(f"'split' must be one of {list(SPLITS)}, not {record['split']!r}")
    domain.check(record)
    return record


def check_lines(lines: Iterable[bytes], file: str, domain: Domain) -> tuple[list[RawRecord], list[Rejection]]:
    """The well-formed records of `lines`, in order, and a rejection with file and line for each of the others."""
    records, rejections = [], []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(RawRecord(parse_line(line, domain), file, number))
        except ValueError as error:
            rejections.append(Rejection("malformed", str(error), file, number))
    return records, rejections


def read_raw(path: Path, label: str, domain: Domain) -> tuple[list[RawRecord], list[Rejection]]:
    """Read a raw file; `label` names it in messages. Raises FileNotFoundError."""
    return check_lines(path.read_bytes().splitlines(), label, domain)


def record_line(record: Mapping[str, Any]) -> str:
    """A record as it stands in a raw file, without the line's end."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def make_raw(domain: Domain, asked: Mapping[Split, int], seed: int) -> tuple[list[RawRecord], list[Rejection]]:
    """Records straight from a domain's recipes, enough for `asked` (split -> tasks) where the domain makes that many.

    For domains that ship no raw file. `recipes` decides how splits share a count, so the count is doubled, at most twice,
    until every split has what was asked.
    """
    label = f"recipes of domain {domain.name}"
    records: list[RawRecord] = []
    rejections: list[Rejection] = []
    for factor in (1, 2, 4):
        lines = [record_line(record).encode() for record in domain.recipes(factor * sum(asked.values()), seed)]
        records, rejections = check_lines(lines, label, domain)
        if all(sum(record.split == split for record in records) >= count for split, count in asked.items()):
            break
    return records, rejections


def unlike_settings(records: Sequence[RawRecord], domain: Domain, file: str) -> list[str]:
    """A line if the kinds of `records` are not those that the domain's settings give, else none.

    A domain may bring `record_kinds(record) -> set[str]` and `recipe_kinds() -> set[str]`; without them nothing is said.
    """
    kinds_of = getattr(domain, "record_kinds", None)
    if kinds_of is None or not records:
        return []
    wanted: set[str] = domain.recipe_kinds()  # type: ignore[attr-defined]
    found: set[str] = set().union(*(kinds_of(record.record) for record in records))
    differences = []
    if wanted - found:
        differences.append(f"no record has {', '.join(sorted(wanted - found))}")
    if found - wanted:
        differences.append(f"records have {', '.join(sorted(found - wanted))}, which the settings do not name")
    if not differences:
        return []
    command = f"python -m stages.curation raw {domain.name} --count {len(records)} --seed 0 > {file}"
    return [
        f"{file} was made with other settings than those of per_domain.{domain.name}.environment in params.yaml: "
        f"{'; '.join(differences)}; make it again with '{command}'"
    ]
