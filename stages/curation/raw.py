"""Raw records: one JSON object per line of data/raw/<domain>.jsonl. Nothing is dropped silently.

`python -m stages.curation raw DOMAIN --count N --seed S > data/raw/DOMAIN.jsonl` generates such a file from a domain's recipes
and its settings in params.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.environments.protocol import Domain
from stages.exchange.records import parse_object
from stages.records.task import SPLITS, Split
from stages.runtime.validation import brief


@dataclass(frozen=True)
class RawRecord:
    """A checked record and its source; `file` is relative to the repository."""

    record: Mapping[str, Any]
    file: str
    line: int

    @property
    def task_id(self) -> str:
        return self.record["task_id"]

    @property
    def split(self) -> str:
        return self.record["split"]

    @cached_property
    def content(self) -> str:
        return content(self.record)


@dataclass(frozen=True)
class Rejection:
    """A rejected record or task: `reason` is a short class that is counted, `detail` the explanation."""

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


def content(record: Mapping[str, Any]) -> str:
    """All keys of a record but task_id, as text: equal for records of the same task."""
    return json.dumps({key: value for key, value in record.items() if key != "task_id"}, sort_keys=True)


def parse_line(line: bytes, domain: Domain) -> dict[str, Any]:
    """A raw record from one line. Raises ValueError if it is invalid."""
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
    """A record as a line of a raw file, without the line break."""
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def make_raw(domain: Domain, asked: Mapping[Split, int], seed: int) -> tuple[list[RawRecord], list[Rejection]]:
    """Records from the recipes of a domain without a raw file: `asked` tasks per split, if the domain makes that many. `recipes`
    divides a count among the splits, so the count is doubled, at most twice, until every split has enough."""
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
    """A warning if the kinds of `records` differ from those of the domain's settings. Needs the domain's optional methods
    `record_kinds(record) -> set[str]` and `recipe_kinds() -> set[str]`."""
    kinds_of = getattr(domain, "record_kinds", None)
    if kinds_of is None or not records:
        return []
    wanted: set[str] = domain.recipe_kinds()  # type: ignore[attr-defined]
    found: set[str] = set().union(*(kinds_of(record.record) for record in records))
    differences = []
    if wanted - found:
        differences.append(f"no record has {', '.join(sorted(wanted - found))}")
    if found - wanted:
        differences.append(f"records have {', '.join(sorted(found - wanted))}, which the settings lack")
    if not differences:
        return []
    command = f"python -m stages.curation raw {domain.name} --count {len(records)} --seed 0 > {file}"
    return [
        f"{file} was made with other settings than per_domain.{domain.name}.environment in params.yaml: "
        f"{'; '.join(differences)}; regenerate it with '{command}'"
    ]
