"""All inputs of the report. Only reports/evaluation.json is required; the page has a note for each other missing file."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.evaluation.stored_episodes import FILE as STORED
from stages.evaluation.stored_episodes import stored_groups
from stages.records.episode import read_json, read_rows
from stages.reporting.control_summary import FILE as CONTROL
from stages.reporting.hidden import Chats, load_chat, no_chat
from stages.reporting.kept import EPISODES as KEPT
from stages.reporting.kept import Run, read_kept
from stages.reporting.results import check_evaluation
from stages.runtime.deps import EXEMPT
from stages.runtime.lineage import dvc_hash

if TYPE_CHECKING:
    from stages.params import Params

History = Mapping[str, list[float]]
"""Column -> values, one per logged step; NaN where a cell is empty."""

ROLLOUTS = "sft rollout"
"""Source name of the episodes of the stage rollout."""

NO_EFFECT = {"__pycache__", "report.py", "reporting", "plugins.py"}
"""Parts of stages/ that do not affect results, besides EXEMPT."""
OUTCOME_COLUMNS = ("model", "domain", "task_id", "cluster", "panel", "success")


@dataclass(frozen=True)
class DomainInputs:
    """The files of one domain; None or [] if they do not exist."""

    curate: Mapping[str, Any] | None = None
    rollout: Mapping[str, Any] | None = None
    annotate: Mapping[str, Any] | None = None
    rl: Mapping[str, Any] | None = None
    rl_history: History | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    labels: list[dict[str, Any]] = field(default_factory=list)
    pairs: list[dict[str, Any]] = field(default_factory=list)
    episodes: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Source ("sft rollout", "rl step 1", ...) -> rows of EPISODE_SCHEMA and further columns of the source."""
    judgments: list[dict[str, Any]] = field(default_factory=list)
    """Rows of JUDGMENT_SCHEMA, while rl trained."""


@dataclass(frozen=True)
class Inputs:
    params: Params
    evaluation: Mapping[str, Any]
    sft: Mapping[str, Any] | None
    sft_history: History | None
    merge: Mapping[str, Any] | None
    domains: Mapping[str, DomainInputs]
    """In the order of params.yaml."""
    tokenizer: Any | None
    """A `tokenizers.Tokenizer`, or None without data/models/sft."""
    chat: Chats = no_chat
    """Loads the chat format of data/models/sft."""
    outcomes: Sequence[Mapping[str, Any]] = ()
    """OUTCOME_COLUMNS of data/evaluation/rows.parquet, of the evaluated models."""
    coalitions: Sequence[Mapping[str, Any]] = ()
    """The same of teams with members replaced (evaluate.attribution)."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Path below stages/ -> its hash."""
    kept: Sequence[Run] = ()
    """reports/runs.jsonl, oldest first."""
    designs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Method -> reports/design/<method>.json."""
    uses: Mapping[str, Any] | None = None
    """reports/annotation_uses.json: the board's verdicts on uses of annotations."""
    control: Mapping[str, Any] | None = None
    """reports/control.json: a summary of lane control's results."""
    stored: frozenset[tuple[str, str]] = frozenset()
    """(model, domain) of the evaluation whose episodes are in data/evaluation/episodes.parquet."""
    kept_episodes: frozenset[str] = frozenset()
    """Names of the files of kept runs' episodes in data/kept."""
    spread: Mapping[str, Any] | None = None
    """reports/spread.json: results of the lifecycle over seeds."""


def optional_json(path: Path) -> Mapping[str, Any] | None:
    """The JSON object in `path`; None if the file does not exist. Raises ValueError if it is not valid JSON."""
    if not path.exists():
        return None
    try:
        value = read_json(path)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); run the stage that writes it again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_history(path: Path) -> History | None:
    """Columns of a training history; None without the file or rows. Empty cells become NaN.

    Raises ValueError naming file, line and column for a cell that is not a number.
    """
    if not path.exists():
        return None
    columns: dict[str, list[float]] = {}
    with path.open(encoding="utf-8", newline="") as handle:
        for line, row in enumerate(csv.DictReader(handle), start=2):
            for name, cell in row.items():
                try:
                    value = float(cell) if cell not in (None, "") else math.nan
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{path}, line {line}, column '{name}': '{cell}' is not a number") from error
                columns.setdefault(name, []).append(value)
    return columns or None


def optional_rows(path: Path, columns: tuple[str, ...] | None = None) -> list[dict[str, Any]]:
    """Rows of a Parquet file; [] if the file does not exist."""
    return read_rows(path, columns) if path.exists() else []


def by_episode(judgments: Sequence[Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Episode -> its judgments: its place among the answers shown, from 0, beside the row's own columns."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in judgments:
        for place, name in enumerate(row["candidates"]):
            found.setdefault(name, []).append({**row, "place": place})
    return found


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer of a `save_pretrained` folder, without transformers; None without tokenizer.json."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def load_domain_inputs(root: Path, domain: str) -> DomainInputs:
    reports, data = root / "reports", root / "data"
    sources = {ROLLOUTS: optional_rows(data / "rollouts" / domain / "episodes.parquet")}
    judgments = optional_rows(data / "rl" / domain / "judgments.parquet")
    judged = by_episode(judgments)
    for row in sorted(optional_rows(data / "rl" / domain / "samples.parquet"), key=lambda row: row["step"]):
        row["judgments"] = judged.get(row["episode_id"], [])
        sources.setdefault(f"rl step {row['step']}", []).append(row)
    return DomainInputs(
        curate=optional_json(reports / "curate" / f"{domain}.json"),
        rollout=optional_json(reports / "rollout" / f"{domain}.json"),
        annotate=optional_json(reports / "annotate" / f"{domain}.json"),
        rl=optional_json(reports / "rl" / f"{domain}.json"),
        rl_history=read_history(reports / "rl" / f"{domain}_history.csv"),
        nodes=optional_rows(data / "annotated" / domain / "nodes.parquet"),
        labels=optional_rows(data / "annotated" / domain / "labels.parquet"),
        pairs=optional_rows(data / "annotated" / domain / "pairs.parquet"),
        episodes={name: rows for name, rows in sources.items() if rows},
        judgments=judgments,
    )


def code_hashes(root: Path) -> dict[str, str]:
    """The entries of stages/ that affect results -> their hashes, sorted; {} without stages/."""
    parts = sorted((root / "stages").glob("*"))
    return {
        f"stages/{part.name}": dvc_hash(part)
        for part in parts
        if part.name not in NO_EFFECT and f"stages/{part.name}" not in EXEMPT
    }


def load_inputs(root: Path, params: Params) -> Inputs:
    """Read the inputs below `root`. Raises FileNotFoundError without reports/evaluation.json, ValueError for a malformed file."""
    path = root / "reports" / "evaluation.json"
    evaluation = optional_json(path)
    if evaluation is None:
        raise FileNotFoundError(
            "reports/evaluation.json does not exist; run 'dvc repro evaluate' (or 'python -m stages.evaluate') first"
        )
    check_evaluation(evaluation, "reports/evaluation.json")
    listed = [*params.domains, *params.evaluate.transfer]
    played = {domain for by_domain in evaluation["models"].values() for domain in by_domain}
    if not played & set(listed):
        raise ValueError(
            f"reports/evaluation.json has results of {', '.join(sorted(played))}, and none of {', '.join(listed)}, which "
            f"params.yaml lists; run 'dvc repro evaluate' first"
        )
    rows = optional_rows(root / "data" / "evaluation" / "rows.parquet", OUTCOME_COLUMNS)
    return Inputs(
        params=params,
        evaluation=evaluation,
        sft=optional_json(root / "reports" / "sft.json"),
        sft_history=read_history(root / "reports" / "sft" / "history.csv"),
        merge=optional_json(root / "reports" / "merge.json"),
        domains={domain: load_domain_inputs(root, domain) for domain in params.domains},
        tokenizer=load_tokenizer(root / "data" / "models" / "sft"),
        chat=partial(load_chat, root / "data" / "models" / "sft", params.model.thinking),
        outcomes=[row for row in rows if row["model"] in evaluation["models"]],
        coalitions=[row for row in rows if row["model"] not in evaluation["models"]],
        code=code_hashes(root),
        kept=read_kept(root),
        designs={path.stem: optional_json(path) or {} for path in sorted((root / "reports" / "design").glob("*.json"))},
        uses=optional_json(root / "reports" / "annotation_uses.json"),
        control=optional_json(root / CONTROL),
        stored=stored_groups(root / STORED),
        kept_episodes=frozenset(path.name for path in (root / KEPT).glob("*.parquet")),
        spread=optional_json(root / "reports" / "spread.json"),
    )
