"""Hashes equal DVC's, and dvc.lock gives a stage's upstream stages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from stages.runtime.lineage import came_before, dvc_hash, locked_stages

LOCK = """
schema: '2.0'
stages:
  curate@a: {cmd: x, deps: [{path: raw, md5: '1'}], outs: [{path: data/curated/a, md5: '2'}]}
  curate@b: {cmd: x, deps: [{path: raw, md5: '1'}], outs: [{path: data/curated/b, md5: '3'}]}
  sft: {cmd: x, deps: [{path: data/curated, md5: '4'}], outs: [{path: data/models/sft, md5: '5'}]}
  rl@a: {cmd: x, deps: [{path: data/models/sft, md5: '5'}], outs: [{path: data/models/rl/a, md5: '6'}]}
  rl@b: {cmd: x, deps: [{path: data/models/sft, md5: '5'}], outs: [{path: data/models/rl/b, md5: '7'}]}
  merge: {cmd: x, deps: [{path: data/models/rl, md5: '8'}], outs: [{path: data/models/merged, md5: '9'}]}
"""


def titles(root: Path, dependencies: list[str], domains: tuple[str, ...] = ("a", "b")) -> list[str]:
    return [stage.title for stage in came_before(locked_stages(root, domains), dependencies)]


def test_upstream_stages_are_found_through_folders(tmp_path: Path) -> None:
    """Upstream are the stages whose outputs contain a dependency or lie in one; domains no longer listed do not count."""
    (tmp_path / "dvc.lock").write_text(LOCK)
    assert titles(tmp_path, ["raw"]) == []
    assert titles(tmp_path, ["data/models/sft/config.json"]) == ["curate@a", "curate@b", "sft"]
    assert titles(tmp_path, ["data/models/rl"]) == ["curate@a", "curate@b", "sft", "rl@a", "rl@b"]
    assert titles(tmp_path, ["data/models/rl"], domains=("b",)) == ["curate@b", "sft", "rl@b"]
    stage = locked_stages(tmp_path, ["a"])["rl@a"]
    assert (stage.name, stage.domain, stage.outputs) == ("rl", "a", {"data/models/rl/a": "6"})


def test_missing_or_unreadable_lock_gives_no_stages(tmp_path: Path) -> None:
    assert locked_stages(tmp_path, ["a"]) == {}
    (tmp_path / "dvc.lock").write_text("stages: {curate")
    assert locked_stages(tmp_path, ["a"]) == {}


def test_hashes_equal_those_of_dvc(tmp_path: Path) -> None:
    """A hash in MLflow identifies the same bytes in dvc.lock, in DVC's cache and on a remote."""
    folder = tmp_path / "model"
    (folder / "deep" / "__pycache__").mkdir(parents=True)
    for name in ("b.txt", "a b.txt", "é.bin", "deep/c.txt", "deep.txt"):
        (folder / name).write_text(name)
    for name in ("deep/__pycache__/x.pyc", "half.partial"):
        (folder / name).write_text("not counted")
    (tmp_path / "table.csv").write_text("a\n1\n")
    (tmp_path / ".dvcignore").write_bytes((Path(__file__).parents[2] / ".dvcignore").read_bytes())
    for command in (["init", "--no-scm", "--quiet"], ["add", "--quiet", "model", "table.csv"]):
        subprocess.run([sys.executable, "-m", "dvc", *command], cwd=tmp_path, check=True)
    for name in ("model", "table.csv"):
        entry = yaml.safe_load((tmp_path / f"{name}.dvc").read_text())["outs"][0]
        assert dvc_hash(tmp_path / name) == entry["md5"], name


def test_changed_file_is_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("one")
    first = dvc_hash(path)
    path.write_text("other")
    assert dvc_hash(path) != first


def test_lock_that_dvc_is_writing_gives_no_error(tmp_path: Path) -> None:
    """DVC writes dvc.lock in place when a stage ends, while a stage beside it may start and read it."""
    text = yaml.safe_dump(yaml.safe_load(LOCK), sort_keys=False)
    for size in range(len(text)):
        (tmp_path / "dvc.lock").write_text(text[:size])
        assert len(locked_stages(tmp_path, ["a", "b"])) <= 6
    (tmp_path / "dvc.lock").write_text(text)
    assert len(locked_stages(tmp_path, ["a", "b"])) == 6
