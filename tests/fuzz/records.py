"""Raw records, game records and problems of code_folder with mutated values, keys and bytes. The curate stage reads a small raw
file with a mutated line: each line becomes a task or a rejection that names it, and valid lines are kept."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import stages.curate as stage
from stages.curation.__main__ import configured_domain
from stages.curation.demonstrations import play_out
from stages.curation.raw import parse_line
from stages.environments.code import CodeFolderDomain, FolderSettings
from stages.environments.code.folder import folder_records
from stages.environments.protocol import Domain
from stages.params import ROOT, Params, load_params, parse_params
from stages.records.episode import read_episodes, read_json, read_tasks
from stages.runtime.stage import StageContext
from stages.runtime.tracker import Tracker

from . import mutation
from .outcomes import ACCEPTED, LOST, REFUSED, LostError, Outcome, check_refusal, run_case

DOMAINS = {
    "calculator": 20,
    "factbook": 6,
    "keydoor": 15,
    "search": 15,
    "shop": 15,
    "wordle": 15,
    "wordle.games": 8,
    "code_folder": 8,
    "textworld": 2,
    "code": 2,
}
"""Input -> its share of the cases; tasks of the last two are slow to build."""
GOOD = {"train": 4, "valid": 2, "test": 4}
SIMILARITY_REASONS = ("duplicate", "near_duplicate", "split_overlap")
"""Reasons for which a valid line may be rejected, if the mutated one became a valid record like it."""
OPERATORS = (*mutation.VALUES, *mutation.KEYS)


@cache
def settings() -> Params:
    return load_params(ROOT / "params.yaml")


def domain_of(name: str) -> Domain:
    return configured_domain(name, settings())


@cache
def good_lines(name: str) -> tuple[bytes, ...]:
    """The first lines of each split of the shipped raw file."""
    lines = (ROOT / f"data/raw/{name}.jsonl").read_bytes().splitlines()
    chosen = []
    for split, count in GOOD.items():
        chosen += list(itertools.islice((line for line in lines if json.loads(line)["split"] == split), count))
    return tuple(chosen)


def write_json(value: Any) -> bytes:
    """A record as JSON, whatever values it has."""
    return json.dumps(value, ensure_ascii=True).encode()


def mutated_line(rng: random.Random, line: bytes) -> tuple[bytes, str]:
    if rng.random() < 0.35:
        return mutation.mutated(rng, line, mutation.JSON_BYTES, most=2)
    value, names = mutation.mutated(rng, json.loads(line), OPERATORS, most=2)
    return write_json(value), names


def curated(root: Path, name: str) -> str:
    """Run the curate stage in `root`; its output. Raises what the stage raises."""
    entry = settings().per_domain.get(name)
    values = {
        "domains": [name],
        "curate": {"train": 50, "valid": 50, "test": 50},
        "resources": {"workers": 1, "threads": 1},
        "per_domain": {name: {"environment": entry.environment if entry else {}}},
    }
    output = io.StringIO()
    with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
        stage.run(StageContext("curate", name, parse_params(values), root, Tracker()))
    return output.getvalue()


def check_lines(name: str, lines: Sequence[bytes], good: Sequence[bytes]) -> Outcome:
    """Outcome of the stage for a raw file of these lines, of which `good` are unmodified."""
    domain = domain_of(name)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        path = root / "data" / "raw" / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\n".join(lines) + b"\n")
        try:
            output = curated(root, name)
        except ValueError as error:
            return Outcome(LOST, f"one line stops the stage: {type(error).__name__}: {str(error)[:200]}")
        tasks = read_tasks(root / "data/curated" / name / "tasks.parquet")
        report = read_json(root / "reports/curate" / f"{name}.json")
        count = len(path.read_bytes().splitlines())
        if len(tasks) + sum(report["rejected"].values()) + report["source"]["unused"] != count:
            raise LostError(f"{count} lines became {len(tasks)} tasks and {report['rejected']}")
        rejected = {int(item["where"].rsplit(":", 1)[1]): item["reason"] for item in report["rejections"]}
        kept = {task.task_id for task in tasks}
        for line in good:
            task_id = json.loads(line)["task_id"]
            reasons = [
                rejected.get(number) or "" for number, held in enumerate(path.read_bytes().splitlines(), 1) if held == line
            ]
            if task_id not in kept and not any(reason.startswith(SIMILARITY_REASONS) for reason in reasons):
                raise LostError(f"the valid line {task_id} was rejected: {reasons}")
        environment = domain.make(root / "data/curated" / name / "worlds")
        for task in tasks:
            if task.split == "test" and task.task_id not in {json.loads(line)["task_id"] for line in good} and name != "code":
                play_out(environment, task, "fuzz", "expert", lambda: domain.expert(environment), complete=False)
        environment.close()
    for line in output.splitlines():
        if "rejected" in line and (outcome := check_refusal(line, f"data/raw/{name}.jsonl:")).kind == LOST:
            return outcome
    return Outcome(REFUSED if count > len(good) and report["rejected"] else ACCEPTED)


# ---- game records ----------------------------------------------------------------------------------------------------


@cache
def good_games() -> tuple[bytes, ...]:
    tasks = {json.loads(line)["task_id"] for line in good_lines("wordle")}
    lines = (ROOT / "data/raw/wordle.games.jsonl").read_bytes().splitlines()
    return tuple(itertools.islice((line for line in lines if json.loads(line)["task_id"] in tasks), 6))


def check_games(line: bytes, place: int) -> Outcome:
    """A mutated game among valid ones."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data/raw").mkdir(parents=True)
        (root / "data/raw/wordle.jsonl").write_bytes(b"\n".join(good_lines("wordle")) + b"\n")
        path = root / "data/raw/wordle.games.jsonl"
        path.write_bytes(b"\n".join([*good_games()[:place], line, *good_games()[place:]]) + b"\n")
        try:
            curated(root, "wordle")
        except ValueError as error:
            return Outcome(LOST, f"one line stops the stage: {type(error).__name__}: {str(error)[:200]}")
        report = read_json(root / "reports/curate/wordle.json")["games"]
        count = len(path.read_bytes().splitlines())
        if report["kept"] + report["unused"] + sum(report["rejected"].values()) != count:
            raise LostError(f"{count} games became {report}")
        if report["kept"] < len(good_games()) or len(read_episodes(root / "data/curated/wordle/games.parquet")) != report["kept"]:
            raise LostError(f"valid games were rejected: {report}")
    return Outcome(REFUSED if report["rejected"] else ACCEPTED)


# ---- problems of code_folder -----------------------------------------------------------------------------------------


@cache
def problems() -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    paths = sorted((ROOT / "data/raw/code_folder").glob("*.jsonl"))
    return tuple((path.name, tuple(path.read_bytes().splitlines())) for path in paths)


def check_problems(files: Sequence[tuple[str, Sequence[bytes]]], mutated: str) -> Outcome:
    """Outcome of a folder of problems in which file `mutated` was changed; no program is run."""
    domain = CodeFolderDomain(FolderSettings())
    with tempfile.TemporaryDirectory() as folder:
        for name, lines in files:
            (Path(folder) / name).write_bytes(b"\n".join(lines) + b"\n")
        try:
            records = folder_records(Path(folder), 1)
        except ValueError as error:
            return check_refusal(str(error), mutated)
    refused = False
    for record in records:
        try:
            parse_line(json.dumps(record, ensure_ascii=False, allow_nan=False).encode(), domain)
        except ValueError as error:
            refused = True
            if (outcome := check_refusal(str(error))).kind == LOST:
                return outcome
            continue
        try:
            json.dumps(domain.task(record, {}).spec, allow_nan=False).encode()
        except ValueError as error:  # curation reports these as records that cannot be built
            refused = True
            if (outcome := check_refusal(str(error), record["task_id"])).kind == LOST:
                return outcome
    return Outcome(REFUSED if refused else ACCEPTED)


def case(seed: int, number: int) -> tuple[str, Outcome]:
    """(operators, outcome) of one file with a mutated line."""
    rng = random.Random(f"records/{seed}/{number}")
    (name,) = rng.choices(list(DOMAINS), list(DOMAINS.values()))
    if name == "wordle.games":
        line, names = mutated_line(rng, rng.choice(good_games()))
        place = rng.randrange(len(good_games()) + 1)
        return f"{name}: {names}", run_case(lambda: check_games(line, place))
    if name == "code_folder":
        files = [[file, list(lines)] for file, lines in problems()]
        file, lines = rng.choice(files)
        where = rng.randrange(len(lines))
        lines[where], names = mutated_line(rng, lines[where])
        return f"{name}: {names}", run_case(lambda: check_problems([(file, lines) for file, lines in files], file))
    good = list(good_lines(name))
    # The mutated line replaces its original, or is added to it.
    line, names = mutated_line(rng, good.pop(rng.randrange(len(good))) if rng.random() < 0.8 else rng.choice(good))
    if name in ("textworld", "code"):
        try:  # a record that does not parse is refused at once
            parse_line(line, domain_of(name))
        except ValueError as error:
            return f"{name}: {names}", check_refusal(str(error))
        except Exception as error:
            return f"{name}: {names}", Outcome(LOST, f"{type(error).__name__}: {str(error)[:200]}")
    place = rng.randrange(len(good) + 1)
    return f"{name}: {names}", run_case(lambda: check_lines(name, [*good[:place], line, *good[place:]], good))
