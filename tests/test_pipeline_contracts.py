"""dvc.yaml matches the code: dependencies cover imports, params what is read; and parts import only lower parts."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from source_imports import ROOT, closure, direct_imports, imports, module_path, source_files

from stages.curation.settings import Curate
from stages.params import Params, PerDomain
from stages.runtime import deps
from tests.code_metrics import part_of

STAGES = ("curate", "transfer", "sft", "rollout", "annotate", "rl", "merge", "evaluate", "report")
SPEED_ONLY = {"slots", "workers", "shards"}


@cache
def pipeline() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]


def packages() -> dict[str, Any]:
    """The stage that records versions of outside packages."""
    return yaml.safe_load((ROOT / "data/packages/dvc.yaml").read_text(encoding="utf-8"))["stages"]["packages"]


def paths(entry: dict[str, Any], *kinds: str) -> list[str]:
    return [path for kind in kinds for item in entry.get(kind, []) for path in ([item] if isinstance(item, str) else item)]


def parameters(stage: str) -> list[str]:
    """Parameters that the stage lists, with * for the domain; a whole file means all keys."""
    listed = pipeline()[stage]["params"]
    if {"params.yaml": None} in listed:
        return sorted(Params.model_fields)
    return [key.replace("${item.domain}", "*") for key in listed]


def test_pipeline_has_the_eight_stages() -> None:
    assert tuple(pipeline()) == STAGES


@pytest.mark.parametrize("stage", STAGES)
def test_listed_dependencies_match_the_imports(stage: str) -> None:
    """DVC does not follow imports: a change in a module that affects a stage must re-run it, and one in another must not."""
    _, listed = deps.listed(pipeline(), stage)
    assert listed == deps.wanted(stage), "run 'python -m stages.runtime.deps --write'"


def test_dependencies_follow_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: a part of which one subfolder is used, settings imported for type checking, exempt code that is not followed."""
    files = {
        "stages/go.py": "from stages.runtime.stage import run\nfrom stages.a.one import x\n",
        "stages/runtime/stage.py": "from stages.hidden.h import y\n",
        "stages/hidden/h.py": "y = 1\n",
        "stages/a/one.py": "if TYPE_CHECKING:\n    from stages.b.settings import S\n    from stages.b.other import T\nx = 1\n",
        "stages/a/sub/two.py": "z = 1\n",
        "stages/b/settings.py": "S = 1\n",
        "stages/b/other.py": "T = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(deps, "ROOT", tmp_path)
    deps._imports.cache_clear()
    assert deps.wanted("go") == ["stages/a/one.py", "stages/b", "stages/go.py"]
    (tmp_path / "stages/a/one.py").write_text("import stages.a.sub.two\n")
    deps._imports.cache_clear()
    assert deps.wanted("go") == ["stages/a", "stages/go.py"]
    deps._imports.cache_clear()


@pytest.mark.parametrize("stage", STAGES)
def test_every_dependency_exists_or_is_an_output(stage: str) -> None:
    made = [out for entry in (*pipeline().values(), packages()) for out in paths(entry, "outs", "metrics", "plots")]
    for dep in paths(pipeline()[stage], "deps"):
        if not (ROOT / dep).exists() or dep.startswith(("data/", "reports/")):
            inside = [out for out in made if out == dep or out.startswith(f"{dep}/") or dep.startswith(f"{out}/")]
            assert inside or (ROOT / dep).exists(), f"{stage}: no stage writes {dep}"


@cache
def read_in(path: Path) -> frozenset[str]:
    """Keys of params.yaml that a file reads from an object called `params`, as far as syntax shows."""
    found: set[str] = set()
    sections = set(Params.model_fields)
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "section" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and first.value in sections:
                found.add(first.value)
                if first.value in PerDomain.model_fields:
                    found.add(f"per_domain.*.{first.value}")
        elif isinstance(node, ast.Attribute) and node.attr in sections and is_params(node.value):
            found.add(node.attr)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and is_params(node.value.value):
            found.add(f"{node.value.attr}.{node.attr}")
    return frozenset(found)


def read_keys(stage: str) -> set[str]:
    """Keys of params.yaml that the stage's file and its parts read."""
    found = {key for path in deps.code(stage) for key in read_in(path)}
    keys = {key for key in found if not any(other.startswith(f"{key}.") for other in found)}
    keys = {key for key in keys if not key.startswith("resources.") or key.removeprefix("resources.") not in SPEED_ONLY}
    keys -= {"resources", "per_domain"}
    if any(isinstance(node, ast.Attribute) and node.attr == "per_domain" for node in ast.walk(tree(stage))):
        keys.add("per_domain.*.environment")
    return keys


def tree(stage: str) -> ast.Module:
    return ast.parse((ROOT / "stages" / f"{stage}.py").read_text(encoding="utf-8"))


def is_params(node: ast.AST) -> bool:
    """`params`, `context.params`, `self.params`: params.yaml or a section; which of them, the attribute read from it shows."""
    return (isinstance(node, ast.Name) and node.id == "params") or (isinstance(node, ast.Attribute) and node.attr == "params")


AS_RL = {"merge": {"rl", "per_domain.*.rl", "per_domain.*.environment"}}
"""Keys that merge.method joint_rl reads as the stage rl does. Where they change what it computes, they change data/models/rl, on
which merge depends."""


@pytest.mark.parametrize("stage", STAGES)
def test_listed_parameters_cover_what_is_read(stage: str) -> None:
    """Editing a value re-runs exactly the stages that depend on it; one that is read but not listed would re-run nothing."""
    listed = {*parameters(stage), *AS_RL.get(stage, ())}
    lacking = sorted(
        key
        for key in read_keys(stage)
        if not any(key == item or key.startswith(f"{item}.") for item in listed) and key in known_keys()
    )
    assert not lacking, f"add to the params of {stage} in dvc.yaml: {lacking}"


@cache
def known_keys() -> frozenset[str]:
    """Sections, their keys, and per-domain sections: what a list of params may name."""
    keys = set(Params.model_fields)
    for name, info in Params.model_fields.items():
        keys.update(f"{name}.{key}" for key in getattr(info.annotation, "model_fields", {}))
    return frozenset(keys | {f"per_domain.*.{key}" for key in PerDomain.model_fields})


@pytest.mark.parametrize("stage", STAGES)
def test_every_listed_parameter_exists(stage: str) -> None:
    """A key that params.yaml lacks is an error in DVC."""
    values = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    domains = values["domains"] if "matrix" in pipeline()[stage] else [""]
    for key in parameters(stage):
        for domain in domains:
            node = values
            for part in key.replace("*", domain).split("."):
                assert part in node, f"{stage} lists {key}, which params.yaml lacks"
                node = node[part]


@pytest.mark.parametrize(
    ("key", "stages"),
    [
        ("merge", {"merge", "evaluate", "report"}),
        ("report", {"report"}),
        ("evaluate", {"evaluate", "report"}),
        ("rl", {"rl", "merge", "evaluate", "report"}),
        ("annotate", {"annotate", "rl", "merge", "evaluate", "report"}),
        ("model.lora", {"sft", "rollout", "annotate", "rl", "merge", "evaluate", "report"}),
        ("resources.slots", {"report"}),
        ("resources.engine.kind", {"rollout", "annotate", "rl", "merge", "evaluate", "report"}),
        ("resources.engine.base_url", {"report"}),
        ("resources.workers", {"report"}),
        ("resources.threads", {"sft", "rollout", "annotate", "rl", "merge", "evaluate", "report"}),
    ],
)
def test_edit_of_a_key_reruns_only_dependent_stages(key: str, stages: set[str]) -> None:
    """Editing merge.method, for example, re-runs only merge, evaluate and report."""
    from flows.pipeline import stage_graph

    reached: set[str] = set()
    for name, needs in stage_graph(ROOT).items():
        if any(key == item or key.startswith(f"{item}.") for item in parameters(name)) or reached & set(needs):
            reached.add(name)
    assert reached == stages


def test_joining_stages_list_domains_and_remove_unlisted_ones() -> None:
    """After shortening `domains`, stages that join domains use the listed ones only, not files that others left behind."""
    joined = {"data/curated", "data/models/rl", "data/rollouts", "data/annotated", "data/rl", "reports/curate", "reports/rl"}
    for stage, entry in pipeline().items():
        if joined & set(paths(entry, "deps")):
            assert "domains" in parameters(stage), stage
            assert module_path("stages.runtime.unlisted_domains") in imports(Path("stages") / f"{stage}.py"), (
                f"{stage} must call domains.keep_only"
            )


def test_files_for_curate_imports_are_a_dependency_of_curate() -> None:
    """Contract: `curate.imports` accepts only files below data/raw, so that a change in one re-runs curate."""
    assert "data/raw" in paths(pipeline()["curate"], "deps")
    assert Curate(imports=["data/raw/a.jsonl", "data/raw/more/b.parquet"]).imports
    with pytest.raises(ValueError, match="below data/raw"):
        Curate(imports=["data/a.jsonl"])


def test_outputs_are_ignored_by_git_unless_uncached() -> None:
    """DVC would write its own .gitignore files for outputs that are not ignored yet."""
    patterns = [line.strip("/") for line in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()]
    for entry in (*pipeline().values(), packages()):
        for kind in ("outs", "metrics", "plots"):
            for item in entry.get(kind, []):
                path, options = (item, {}) if isinstance(item, str) else next(iter(item.items()))
                ignored = any(path == pattern or path.startswith(f"{pattern}/") for pattern in patterns)
                assert ignored == options.get("cache", True), path


def modules(*folders: str) -> list[Path]:
    return [path for folder in folders for path in source_files(folder)]


ORDER = (
    {"runtime", "seeding"},
    {"records", "sandbox"},
    {"constraints"},
    {"engine", "environments"},
    {"agent"},
    {"values", "merging"},
    {"judging"},
    {"annotation", "algorithms"},
    {"exchange"},
    {"curation"},
    {"evaluation"},
    {"training"},
    {"conversion", "params", "pretraining"},
    {"control"},
    {"designs", "serving", "tracking"},
    {"claims"},
    {"reporting"},
    {"live"},
    {"curate", "transfer", "sft", "rollout", "annotate", "rl", "merge", "evaluate", "report", "plugins"},
)
"""Parts of stages/ from the lowest to the highest; a part's command (__main__.py) is above all of them."""


def test_parts_import_only_lower_parts() -> None:
    """Thus there is no import cycle between folders, either; imports for type checking count, too."""
    place = {name: number for number, names in enumerate(ORDER) for name in names}
    assert place.keys() == {path.stem for path in (ROOT / "stages").iterdir() if path.name[0] not in "_."}
    for path in modules("stages"):
        start = part_of(path).removeprefix("stages/")
        for item in direct_imports(path, for_types=True):
            end = part_of(item).removeprefix("stages/")
            if (item.name == "__init__.py" and item.parent.name == "stages") or item.parts[0] != "stages" or start == end:
                continue
            assert not end.endswith("__main__.py"), f"{path} imports the command {item}"
            if not start.endswith("__main__.py"):
                assert place[end] < place[start], f"{path} imports {item}, which is not below it in ORDER"


def test_environments_and_values_do_not_import_algorithms() -> None:
    """Except through settings: stages/params.py checks the names and combinations of all parts."""
    for path in modules("stages/environments", "stages/values"):
        inner = [str(item) for item in closure(path) if item.parts[:2] == ("stages", "algorithms")]
        assert not inner, f"{path} imports {inner}"


SHARED = {
    Path("stages") / f"{name}.py"
    for name in (
        "__init__",
        *(f"runtime/{name}" for name in ("__init__", "command", "cores", "files", "git", "process", "yaml_files")),
    )
}
"""Ending commands, writing files, reading YAML, telling processes apart, counting cores and calling git, which are independent of
the stages."""


def test_flows_import_only_shared_modules_of_stages() -> None:
    for path in modules("flows"):
        assert not [item for item in imports(path) if item.parts[0] == "stages" and item not in SHARED], path
    for path in SHARED:
        assert not imports(path) - SHARED, f"{path} imports more than {SHARED}"


def top_level_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_only_one_module_imports_mlflow() -> None:
    for path in modules("stages"):
        if path != Path("stages/tracking/server.py"):
            found = re.search(r"^\s*(import|from) mlflow\b", (ROOT / path).read_text(encoding="utf-8"), re.M)
            assert found is None, f"{path} imports mlflow"


def test_stages_import_heavy_packages_only_where_used() -> None:
    """Contract: a stage starts quickly."""
    heavy = {"torch", "transformers", "mlflow", "datasets", "accelerate", "matplotlib", "peft", "prefect"}
    light = [Path("stages") / f"{stage}.py" for stage in STAGES] + modules(
        "stages/environments", "stages/curation", "stages/tracking"
    )
    for path in light:
        if (ROOT / path).exists():
            assert not top_level_imports(path) & heavy, f"{path} imports {top_level_imports(path) & heavy} at its top"
