"""Files of curate.imports with mutated values, keys and bytes: each record becomes an episode, a pair or a rejection that names
file and line; what was imported can be written and read back; an unreadable file is rejected by name."""

from __future__ import annotations

import io
import itertools
import json
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.curation.demonstrations import play_out
from stages.curation.imports import Importer
from stages.environments.search import SearchDomain
from stages.exchange.episodes import conversation
from stages.records.episode import read_episodes, read_rows, write_episodes, write_json, write_table
from stages.records.preferences import PREFERENCE_SCHEMA
from stages.records.task import Task

from . import mutation
from .outcomes import ACCEPTED, LOST, REFUSED, LostError, Outcome, check_refusal, run_case

MAX_LENGTH = 640
OPERATORS = (*mutation.VALUES, *mutation.KEYS)


class World:
    """A search domain with a few tasks, and valid records about them."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.domain = SearchDomain()
        self.tasks: list[Task] = self.domain.build(list(self.domain.recipes(48, 0)), Path(self.folder.name), 1)
        environment = self.domain.make(Path(self.folder.name))
        shown = [task for task in self.tasks if task.split != "test"][:4]
        played = [play_out(environment, task, "expert", "expert", lambda: self.domain.expert(environment)) for task in shown]
        talks = [(episode.task_id, conversation(episode)) for episode in played if episode is not None]
        environment.close()
        user, agent = ({"role": role, "content": "take the key"} for role in ("user", "assistant"))
        self.records: list[dict[str, Any]] = []
        for task_id, talk in talks:
            self.records += [
                {"task_id": task_id, "domain": "search", "messages": talk},
                {
                    "task_id": task_id,
                    "prompt": talk[:1],
                    "chosen": talk[1:2],
                    "rejected": [agent],
                    "weight": 0.5,
                    "chosen_value": 0.9,
                },
            ]
        self.records += [
            {"messages": [user, agent, user, agent]},
            {"messages": [{"role": "system", "content": "be brief"}, user, agent], "score": 3, "label": True},
            {"prompt": "open the box", "completion": "take key"},
            {"prompt": [user], "completion": [agent], "domain": "search"},
            {"chosen": [user, agent], "rejected": [user, {"role": "assistant", "content": "go"}], "rejected_value": 0.1},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}, agent]},
        ]


@cache
def world() -> World:
    return World()


def check_import(name: str, content: bytes, good: int) -> Outcome:
    """Outcome of a file with these bytes, in which at least `good` records are unmodified."""
    here = world()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = root / name
        path.write_bytes(content)
        importer = Importer(here.domain, here.tasks, Path(here.folder.name), MAX_LENGTH)
        try:
            found = importer.read(root, [name])
        except ValueError as error:
            if not name.endswith(".parquet"):
                raise  # in JSON lines, only the line may be rejected
            return check_refusal(str(error), name)
        count = len(content.splitlines()) if name.endswith(".jsonl") else pq.read_table(path).num_rows
        counts = found.counts[name]
        if (
            counts["records"] != count
            or len(found.episodes) + len(found.pairs) + len(found.rejections) + counts["of_other_domains"] != count
        ):
            raise LostError(f"{count} records became {dict(counts)}")
        if len(found.episodes) + len(found.pairs) < good:
            raise LostError(f"valid records were rejected: {dict(counts)}")
        write_episodes(root / "episodes.parquet", found.episodes)
        write_table(root / "pairs.parquet", PREFERENCE_SCHEMA, found.pairs)
        write_json(root / "report.json", found.report())
        back = read_episodes(root / "episodes.parquet")
        if [one.messages for one in back] != [one.messages for one in sorted(found.episodes, key=lambda one: one.episode_id)]:
            raise LostError("an episode differs after writing and reading")
        if read_rows(root / "pairs.parquet") != found.pairs:
            raise LostError("a pair differs after writing and reading")
        for line in found.warnings():
            line.encode("utf-8")
            if "rejected" in line and (outcome := check_refusal(line, f"{name}:")).kind == LOST:
                return outcome
    return Outcome(REFUSED if found.rejections else ACCEPTED)


def as_lines(rng: random.Random, changed: bytes) -> tuple[str, bytes, int]:
    """The mutated line among valid ones."""
    lines = [json.dumps(record).encode() for record in rng.sample(world().records, 3)]
    where = rng.randrange(len(lines) + 1)
    return "a.jsonl", b"\n".join([*lines[:where], changed, *lines[where:]]) + b"\n", len(lines)


def table_bytes(rows: list[dict[str, Any]]) -> bytes:
    held = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), held)
    return held.getvalue()


def strange_column(rng: random.Random, rows: list[dict[str, Any]]) -> bytes:
    """A Parquet file with a column of an unexpected type."""
    columns: list[Callable[[int], Any]] = [
        lambda count: pa.array([b"\xff"] * count),
        lambda count: pa.array([1.5] * count),
        lambda count: pa.array([{"a": 1}] * count),
        lambda count: pa.array([[1, 2]] * count),
        lambda count: pa.array([None] * count, pa.null()),
        lambda count: pa.array([10**15] * count, pa.timestamp("us")),
        lambda count: pa.array(["a"] * count).dictionary_encode(),
        lambda count: pa.array([2**64 - 1] * count, pa.uint64()),
        lambda count: pa.array([[("k", "v")]] * count, pa.map_(pa.string(), pa.string())),
    ]
    table = pa.Table.from_pylist(rows)
    name = rng.choice((*table.column_names, "extra"))
    column = rng.choice(columns)(len(rows))
    at = table.column_names.index(name) if name in table.column_names else None
    table = table.append_column(name, column) if at is None else table.set_column(at, name, column)
    held = io.BytesIO()
    pq.write_table(table, held)
    return held.getvalue()


def case(seed: int, number: int) -> tuple[str, Outcome]:
    """(operators, outcome) of one file with a mutated record."""
    rng = random.Random(f"imports/{seed}/{number}")
    records = world().records
    kind = rng.choices(("record", "line", "parquet bytes", "parquet column"), (55, 30, 8, 7))[0]
    if kind == "record":
        value, names = mutation.mutated(rng, rng.choice(records), OPERATORS, most=2)
        file = as_lines(rng, json.dumps(value).encode())
    elif kind == "line":
        line, names = mutation.mutated(rng, json.dumps(rng.choice(records)).encode(), mutation.JSON_BYTES, most=2)
        file = as_lines(rng, line)
    else:
        rows = list(itertools.islice((record for record in records if "messages" in record and "task_id" in record), 3))
        if kind == "parquet bytes":
            content, names = mutation.mutated(rng, table_bytes(rows), mutation.BYTES[:5], most=2)
        else:
            content, names = strange_column(rng, rows), "strange_column"
        file = ("a.parquet", content, 0)
    return f"{kind}: {names}", run_case(lambda: check_import(*file))
