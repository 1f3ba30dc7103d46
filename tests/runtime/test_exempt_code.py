"""Code that dvc.yaml exempts from the stages' dependencies computes no value that an output depends on."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from source_imports import ROOT, exempt, module_path, type_checking_lines
from test_pipeline_contracts import STAGES

from stages.params import Params
from stages.runtime import deps

SETTINGS = [Path("stages/params.py"), Path("stages/runtime/resources.py")]
"""Exempt files that hold the shape of params.yaml."""
RETURNS_PARAMS = {"parse_params", "parse_as", "load_params", "main"}
"""Functions of stages/params.py that return the checked file, or print it."""
DELEGATE = "return section_of(self, name, domain)"
"""Body of Params.section, which delegates to a listed part."""
LISTED_BY_KEY = {"PerDomain", "Resources", "ShardParams", "EngineParams", "Report", "OwnPattern"}
"""Sections whose keys dvc.yaml lists one by one, which params.yaml must then have; report depends on all of stages/."""
MOVE = (
    "no stage depends on this file (head of dvc.yaml): move it into a part that dvc.yaml lists (as stages/annotation/derived.py)"
)
WHOLE = "writes a complete file or none, whatever its content"
ALLOWED_IMPORTS = {
    "stages.runtime.checkpoints.Checkpoints": "an output is the same with and without them",
    "stages.runtime.cores.processor": "last bits differ between processors, whatever they are called",
    "stages.runtime.unlisted_domains.keep_only": "stages read the domains that params.yaml lists, whatever else there is",
    **{f"stages.runtime.unshardable.{name}": "words of a refusal" for name in ("LORA", "SPARSE", "WARM_START")},
    "stages.runtime.files.atomic_bytes": WHOLE,
    "stages.runtime.files.atomic_file": WHOLE,
    "stages.runtime.files.atomic_files": WHOLE,
    "stages.runtime.files.atomic_folder": WHOLE,
    "stages.runtime.files.atomic_text": WHOLE,
    "stages.runtime.files.locked": "which process asks first; all read the same reply",
    "stages.runtime.entry_points.Group": "finds modules by name; changes of plugins are tracked separately (docs/dvc.md)",
    "stages.runtime.entry_points.place": "a message",
    "stages.runtime.lineage.dvc_hash": "from which checkpoint a run resumes: one made with the same files",
    "stages.runtime.live.Live": "tells viewers of a run, and when to pause it or stop it after a step, from which it resumes",
    "stages.runtime.live.PAUSE": "a request to a run",
    "stages.runtime.live.POLL_S": "how often a paused run looks for requests",
    "stages.runtime.live.STOP": "a request to a run",
    "stages.runtime.tracker.Tracker": "logs what is computed, or nothing",
    "stages.runtime.live.StoppedError": "ends a stage, which resumes from its checkpoint",
    "stages.runtime.parent.die_with_parent": "ends a process",
    "stages.runtime.progress.Progress": "shows progress",
    "stages.runtime.shards.Shard": "which chunks a process computes; the bytes are the same without shards",
    "stages.runtime.spans": "measures time",
    "stages.runtime.spans.PAUSED": "measures time",
    "stages.runtime.spans.span": "measures time",
    "stages.runtime.stage.StageContext": "paths and logging",
    "stages.runtime.stage.stage_run": "starts a stage",
    "stages.tracking.open_tracker": "logging",
    "stages.tracking.flatten": "names of metrics in MLflow",
    "stages.runtime.validation.brief": "a message",
    "stages.runtime.validation.Checked": "the base of settings",
    "stages.runtime.validation.Count": "a range",
    "stages.runtime.validation.NonNegative": "a range",
    "stages.runtime.validation.ParamsError": "a message",
    "stages.runtime.validation.Positive": "a range",
    "stages.runtime.validation.Section": "the base of settings",
    "stages.runtime.validation.Share": "a range",
    "stages.runtime.validation.explain": "a message",
    "stages.runtime.validation.nearest": "a message",
    "stages.runtime.validation.refuse_idle": "a check",
    "stages.runtime.validation.shortened": "a message",
    "stages.runtime.validation.watched": "a check",
    "stages.runtime.workers.worker_pool": "distributes work; the caller orders the results",
}
"""What listed code imports from exempt code besides settings, and why no output depends on it."""


def _returned(function: ast.FunctionDef) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def _is_check(function: ast.FunctionDef) -> bool:
    """Whether `function` is a validator that returns its argument unchanged."""
    decorators = {ast.unparse(item).partition("(")[0] for item in function.decorator_list}
    names = {argument.arg for argument in function.args.args} - {"cls"}
    assigned = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return (
        function.name.startswith("_")
        and bool(decorators & {"model_validator", "field_validator"})
        and all(isinstance(value, ast.Name) and value.id in names - assigned for value in _returned(function))
    )


def _defaults(node: ast.stmt) -> Iterator[str]:
    """Parts of a field or constant other than literals, settings and ranges."""
    value = getattr(node, "value", None)
    for part in ast.walk(value) if value is not None else ():
        if isinstance(part, (ast.Lambda, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.BinOp, ast.IfExp)):
            yield f"computes {ast.unparse(part)}"
        elif isinstance(part, ast.Call) and not ast.unparse(part.func).rpartition(".")[2][0].isupper():
            yield f"calls {ast.unparse(part.func)}"


def faults(source: str, allowed: frozenset[str] = frozenset()) -> list[str]:
    """Line and name of all that a settings file defines besides fields, ranges and messages."""
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name not in allowed:
            if not (isinstance(node.returns, ast.Constant) and node.returns.value is None) or any(_returned(node)):
                found.append(f"{node.lineno}: {node.name}() returns a value")
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    if not _is_check(item) and ast.unparse(item.body[-1]) != DELEGATE:  # type: ignore[arg-type]
                        found.append(f"{item.lineno}: {node.name}.{item.name} is more than a check")
                elif isinstance(item, (ast.Assign, ast.AnnAssign)):
                    found += [f"{item.lineno}: {node.name} {what}" for what in _defaults(item)]
                elif not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant)) and not isinstance(item, ast.Pass):
                    found.append(f"{item.lineno}: {node.name} holds {ast.unparse(item)}")
    return found


@pytest.mark.parametrize("path", SETTINGS, ids=str)
def test_settings_files_compute_no_values(path: Path) -> None:
    """Contract: DVC says up to date only if it is: code that computes values from settings is listed by a stage."""
    assert exempt(path)
    allowed = frozenset(RETURNS_PARAMS if path == Path("stages/params.py") else ())
    found = faults((ROOT / path).read_text(encoding="utf-8"), allowed)
    assert not found, "\n".join(f"{path}:{fault}; {MOVE}" for fault in found)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("    @property\n    def low(self) -> float:\n        return self.a", "Some.low is more than a check"),
        ("    def worth(self, total: float) -> float:\n        return total", "Some.worth is more than a check"),
        (
            '    @model_validator(mode="after")\n    def _all(self) -> Some:\n        return self.model_copy(update={"a": 1.0})',
            "Some._all is more than a check",
        ),
        (
            '    @field_validator("a")\n    @classmethod\n    def _a(cls, a: float) -> float:\n        a += 1\n        return a',
            "Some._a is more than a check",
        ),
        ("    b: float = other()", "Some calls other"),
        ("    b: float = Field(default_factory=lambda: 1.0)", "Some computes lambda: 1.0"),
        ("def judged() -> list[str]:\n    return []", "judged() returns a value"),
    ],
)
def test_check_detects_computed_values(line: str, says: str) -> None:
    source = f"class Some(Section):\n    a: float = 0.5\n    c: Other = Other(b=[1])\n{line}\n"
    assert [fault.partition(": ")[2] for fault in faults(source)] == [says]


def _sections(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in _sections(part)]


def _inner_sections(section: type[BaseModel], place: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """(place, section) of all sections below `section`."""
    for name, info in section.model_fields.items():
        for inner in _sections(info.annotation):
            yield f"{place}{name}", inner
            yield from _inner_sections(inner, f"{place}{name}.")


def test_defaults_are_in_listed_code() -> None:
    """Contract: editing a default re-runs the stages it affects: it applies where params.yaml lacks the key."""
    found = dict(_inner_sections(Params))
    assert {"rl.reward.prs", "rl.critic.head", "annotate.selection"} <= found.keys()
    for place, section in found.items():
        path = Path(inspect.getfile(section)).relative_to(ROOT)
        if section.__name__ not in LISTED_BY_KEY:
            assert not exempt(path), f"{place}: the defaults of {section.__name__} apply, and {path} is exempt; {MOVE}"


def test_listed_code_imports_no_values_from_exempt_code() -> None:
    """Contract: of exempt code, stages import settings, checks and what runs a stage, nothing that computes values."""
    imported: dict[str, Path] = {}
    for path in {path for stage in STAGES if stage != "report" for path in deps.code(stage)}:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        skipped = type_checking_lines(tree)
        for node in ast.walk(tree):
            source = module_path(node.module or "") if isinstance(node, ast.ImportFrom) else None
            if source and exempt(source) and source != Path("stages/__init__.py") and node.lineno not in skipped:
                imported |= {f"{node.module}.{alias.name}": path for alias in node.names}
    for name, path in sorted(imported.items()):
        module, _, attribute = name.rpartition(".")
        value = getattr(importlib.import_module(module), attribute)
        settings = module_path(module) in SETTINGS and isinstance(value, type) and issubclass(value, BaseModel)
        assert settings or name in ALLOWED_IMPORTS, (
            f"{path} imports {name}: {MOVE}; or say in ALLOWED_IMPORTS why no output depends on it"
        )
    assert ALLOWED_IMPORTS.keys() <= imported.keys(), (
        f"nothing imports {sorted(ALLOWED_IMPORTS.keys() - imported.keys())}; remove it from ALLOWED_IMPORTS"
    )
