"""A domain's raw records: from data/raw/<domain>.jsonl, or from the domain's recipes if there is no such file; and splits that
the recipes draw anew, each with a seed of its own (curate.seeds)."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.curation.raw import RawRecord, Rejection, check_lines, content, make_raw, read_raw, record_line, unlike_settings
from stages.environments.protocol import Domain
from stages.records.task import SPLITS, Split

SHARE = 64
"""Recipes divide records among the splits; at most so many are drawn for one of the split."""
SPARE = 4
"""One more record is drawn for so many requested, to replace those that cleaning rejects."""


@dataclass
class Source:
    """Checked records of all splits. `file`: where they come from, but for those of the splits in `drawn`, which has the numbers
    of records that were drawn anew."""

    file: str
    records: list[RawRecord]
    rejections: list[Rejection]
    warnings: list[str]
    labels: dict[Split, str]
    """Where each split's records come from, for messages."""
    drawn: dict[str, Any]

    def summary(self, unused: int, warnings: Sequence[str]) -> dict[str, Any]:
        """For the data report; `unused`: valid records that were not needed; `warnings`: further ones."""
        found = {"file": self.file, "records": len(self.records), "unused": unused, "warnings": [*self.warnings, *warnings]}
        return {**found, "drawn": self.drawn} if self.drawn else found


def draw(
    domain: Domain, split: Split, count: int, seed: int, known: Collection[str]
) -> tuple[list[RawRecord], list[Rejection], int]:
    """The first `count` records of `split` from the domain's recipes with `seed` whose content is not in `known`, or fewer if the
    recipes end; rejections; number of those that are in `known`."""
    lines, repeated = [], 0
    only = {"splits": {split}} if "splits" in inspect.signature(domain.recipes).parameters else {}
    for record in domain.recipes(SHARE * count, seed, **only):
        if record["split"] == split and content(record) in known:
            repeated += 1
        elif record["split"] == split:
            lines.append(record_line(record).encode())
        if len(lines) == count:
            break
    return *check_lines(lines, f"recipes of domain {domain.name} with seed {seed}", domain), repeated


def read_source(domain: Domain, path: Path, asked: Mapping[Split, int], seed: int, seeds: Mapping[Split, int]) -> Source:
    """Records for `asked` tasks per split. `path`: the domain's raw file, if it exists; `seed`: of recipes in its place; `seeds`:
    of splits drawn anew, which repeat no task of the file. Raises ValueError if the recipes have no new task for one."""
    shipped = path.exists()
    label = f"data/raw/{domain.name}.jsonl" if shipped else f"recipes of domain {domain.name}"
    records, rejections = read_raw(path, label, domain) if shipped else make_raw(domain, asked, seed)
    warnings = unlike_settings(records, domain, label) if shipped else []
    kept = [record for record in records if record.split not in seeds]
    source = Source(label, kept, rejections, warnings, dict.fromkeys(SPLITS, label), {})
    known = {record.content for record in records}
    for split in [split for split in SPLITS if split in seeds]:
        own, count = seeds[split], asked[split] + asked[split] // SPARE + 1
        drawn, faulty, repeated = draw(domain, split, count, own, known if shipped else ())
        if known.issuperset(record.content for record in drawn) and (shipped or own != seed):
            raise ValueError(
                f"curate.seeds.{split}: {own}: the recipes of domain {domain.name} make no {split} task that {label} lacks; "
                f"choose another seed, or remove {split} from curate.seeds"
            )
        source.records += drawn
        source.rejections += faulty
        source.labels[split] = f"recipes of domain {domain.name} with seed {own}"
        source.drawn[split] = {"seed": own, "records": len(drawn), "repeated": repeated}
    return source
