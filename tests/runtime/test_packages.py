"""A change in an outside package (an environment or an RL method) re-runs the stages that use it, and no others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import yaml
from outside import install_editable, python_path, write_package
from source_imports import ROOT

from stages.runtime import packages

pytestmark = [pytest.mark.long(40)]

DVC_YAML = """
stages:
  play:
    matrix: {domain: "${domains}"}
    cmd: echo ${item.domain} > play-${item.domain}
    deps: ["data/packages/environments/${item.domain}.json"]
    outs: ["play-${item.domain}"]
  learn:
    matrix: {domain: "${domains}"}
    cmd: cat play-${item.domain} > learn-${item.domain}
    deps:
      - play-${item.domain}
      - data/packages/environments/${item.domain}.json
      - data/packages/algorithms/${item.domain}.json
    outs: ["learn-${item.domain}"]
"""
PARAMS = """domains: [maze, search]
evaluate: {transfer: []}
rl: {algorithm: grpo}
per_domain: {maze: {rl: {algorithm: gpgx}}, search: {rl: {}}}
"""
RAN = re.compile(r"^Running stage '([^':]+)'", re.M)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with three editable installs: an environment, what that requires, and a method."""
    root = tmp_path_factory.mktemp("packages")
    write_package(root, "maze-rules", {})
    write_package(root, "maze-game", {"bellwether.domains": 'maze = "maze_game:MazeDomain"'}, '"maze-rules", "numpy"')
    write_package(root, "gpg-method", {"bellwether.algorithms": 'gpgx = "gpg_method"'})
    install_editable(root, "maze-rules", "maze-game", "gpg-method")
    return root


@pytest.fixture
def project(tmp_path: Path, site: Path) -> Path:
    """A DVC project in git, whose stages depend on packages as the lifecycle's do."""
    (tmp_path / "data/packages").mkdir(parents=True)
    (tmp_path / "data/packages/dvc.yaml").write_text((ROOT / "data/packages/dvc.yaml").read_text())
    (tmp_path / "dvc.yaml").write_text(DVC_YAML)
    (tmp_path / "params.yaml").write_text(PARAMS)
    (tmp_path / ".gitignore").write_text("/play-*\n/learn-*\n/data/packages/environments/\n/data/packages/algorithms/\n")
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text("[core]\n    analytics = false\n    check_update = false\n")
    (tmp_path / ".dvc/.gitignore").write_text("/tmp\n/cache\n/config.local\n")
    for command in (["init", "--quiet"], ["add", "-A"], ["commit", "-q", "-m", "Start"]):
        git(tmp_path, *command)
    return tmp_path


def git(project: Path, *arguments: str) -> None:
    command = ["git", "-c", "user.name=Test", "-c", "user.email=test@example.org", *arguments]
    subprocess.run(command, cwd=project, check=True, capture_output=True)


def dvc(project: Path, site: Path, *arguments: str) -> list[str]:
    """The stages that a DVC command ran, except those of data/packages."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DVC_", "LIFECYCLE_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}"
    environment = {**kept, "PATH": path, "PYTHONPATH": python_path(site, ROOT)}
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=project, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return RAN.findall(done.stdout)


@pytest.mark.slow
def test_editing_an_outside_package_reruns_stages_that_use_it(project: Path, site: Path) -> None:
    """Contract: plain `dvc repro` detects edits of an editable install, of its data and of its requirements."""
    everything = ["play@maze", "learn@maze", "play@search", "learn@search"]
    assert sorted(dvc(project, site, "repro")) == sorted(everything)
    (site / "maze-game/maze_game/__init__.py").write_text("SIZE = 4\n")
    assert dvc(project, site, "repro", "learn@maze") == ["play@maze", "learn@maze"]
    (site / "gpg-method/gpg_method/__init__.py").write_text("SCALE = 2\n")
    assert dvc(project, site, "repro") == ["learn@maze"]
    assert dvc(project, site, "repro") == []
    (site / "maze-rules/maze_rules/words.txt").write_text("east west\n")
    git(project, "add", "-A")
    git(project, "commit", "-q", "-m", "Done")
    assert dvc(project, site, "exp", "run") == ["play@maze", "learn@maze"]
    assert yaml.safe_load((project / "dvc.lock").read_text())["stages"].keys() == set(everything)


@pytest.mark.slow
def test_editing_a_file_that_settings_name_reruns_the_stages_that_use_it(project: Path, site: Path) -> None:
    """Contract: a specification, schema, grammar or recording below data/raw that params.yaml names is an input of the stages
    that read it: plain `dvc repro` runs these after an edit, and no others."""
    spec, recorded = project / "data/raw/specs/mine.sexp", project / "data/raw/recorded/a.parquet"
    for path in (spec, recorded):
        path.parent.mkdir(parents=True)
        path.write_text("first")
    maze = {"environment": {"constraint": {"spec": "data/raw/specs/mine.sexp"}}, "rl": {"algorithm": "gpgx"}}
    search = {"rl": {"tasks": {"settings": {"files": ["data/raw/recorded/a.parquet"]}}}}
    params = {**yaml.safe_load(PARAMS), "per_domain": {"maze": maze, "search": search}}
    (project / "params.yaml").write_text(yaml.safe_dump(params))
    dvc(project, site, "repro")
    assert dvc(project, site, "repro") == []
    spec.write_text("second")
    assert dvc(project, site, "repro") == ["play@maze", "learn@maze"]
    recorded.write_text("second")
    assert dvc(project, site, "repro") == ["learn@search"]


def test_named_files_are_those_below_data_raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data/raw/prompts").mkdir(parents=True)
    (tmp_path / "data/raw/prompts/a.txt").write_text("x")
    environment = {"pool": [{"folder": "data/raw/prompts"}, {"folder": "data/raw/none"}], "command": "python data/raw/a.py"}
    own = {"environment": environment, "rl": {"prompt": "data/raw/prompts/../../../etc"}}
    found = packages.named_files({"rl": {"prompt": "data/raw/prompts/a.txt"}, "per_domain": {"maze": own}}, "maze")
    digest = packages.dvc_hash(tmp_path / "data/raw/prompts")
    assert found["environments"] == [{"file": "data/raw/prompts", "md5": digest}]
    assert [one["file"] for one in found["algorithms"]] == ["data/raw/prompts/a.txt"]
    assert packages.named_files({"per_domain": {"maze": None}}, "maze") == {"environments": [], "algorithms": []}


def test_default_run_uses_no_outside_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: without outside packages the files are the same bytes on every machine, so that no stage re-runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text((ROOT / "params.yaml").read_text())
    domains = yaml.safe_load((ROOT / "params.yaml").read_text())["domains"]
    locked = yaml.safe_load((ROOT / "data/packages/dvc.lock").read_text())["stages"]["packages"]
    monkeypatch.setattr(sys, "argv", ["packages"])
    assert packages.main() == 0
    paths = [tmp_path / packages.FOLDER / folder / f"{domain}.json" for folder in packages.GROUPS for domain in domains]
    assert {path.read_text() for path in paths} == {"[]\n"}
    before = [path.stat().st_mtime_ns for path in paths]
    assert packages.main() == 0
    assert [path.stat().st_mtime_ns for path in paths] == before, "an unchanged file is not rewritten"
    assert {out["path"]: out["md5"] for out in locked["outs"]} == {
        str(packages.FOLDER / folder): packages.dvc_hash(tmp_path / packages.FOLDER / folder) for folder in packages.GROUPS
    }


def test_files_of_domains_that_are_not_listed_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: so that the stages that join domains, which depend on the folder, do not depend on what is not listed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["packages"])
    (tmp_path / "params.yaml").write_text("domains: [search, shop]\nevaluate: {transfer: [bank, shop]}\nper_domain: {search: }\n")
    assert packages.main() == 0
    folder = tmp_path / packages.FOLDER
    assert sorted(path.stem for path in folder.glob("*/*")) == sorted(["bank", "search", "shop"] * 2)
    (tmp_path / "params.yaml").write_text("domains: [search]\nper_domain: {search: }\n")
    assert packages.main() == 0
    assert sorted(path.relative_to(folder).as_posix() for path in folder.glob("*/*")) == [
        "algorithms/search.json",
        "environments/search.json",
    ]


def installed(folder: Path, direct_url: object = None, record: bool = True) -> Distribution:
    """A distribution as installed in a folder of sys.path."""
    info = folder / "guess_game-0.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Guess.Game\nVersion: 0.2\n")
    (info / "entry_points.txt").write_text("[bellwether.domains]\nguess = guess_game.inner:GuessDomain\n")
    (folder / "guess_game").mkdir()
    (folder / "guess_game/__init__.py").write_text("")
    if record:
        (info / "RECORD").write_text("guess_game/__init__.py,,\n")
    if direct_url is not None:
        (info / "direct_url.json").write_text(json.dumps(direct_url))
    return Distribution.at(info)


def test_package_from_an_index_is_identified_by_version(tmp_path: Path) -> None:
    assert packages.described(installed(tmp_path)) == {"package": "guess-game", "version": "0.2"}


def test_package_from_a_commit_is_identified_by_commit(tmp_path: Path) -> None:
    commit = {"vcs": "git", "commit_id": "0123abc"}
    found = packages.described(installed(tmp_path, {"url": "https://example.org/guess.git", "vcs_info": commit}))
    assert found == {"package": "guess-game", "version": "0.2", "vcs_info": commit}


@pytest.mark.parametrize("how", [{"direct_url": {"url": "file:///guess", "dir_info": {}}}, {"record": False}])
def test_other_packages_are_identified_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, object]
) -> None:
    """Contract: the hash covers every file of the package except bytecode, and no local path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    dist = installed(tmp_path, **how)  # type: ignore[arg-type]
    first = packages.described(dist)
    assert [name for name, _ in first["files"]] == ["guess_game"]
    assert str(tmp_path) not in json.dumps(first)
    (tmp_path / "guess_game/__pycache__").mkdir()
    (tmp_path / "guess_game/__pycache__/a.pyc").write_bytes(b"1")
    assert packages.described(dist) == first
    (tmp_path / "guess_game/levels.json").write_text("[]")
    assert packages.described(dist) != first
    assert "guess_game" not in sys.modules


def test_entry_of_a_package_not_installed_here_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """Contract: on a machine without the package, results made with it stay up to date."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text("domains: [nowhere]\nper_domain: {nowhere: {}}\n")
    known = tmp_path / packages.FOLDER / "environments/nowhere.json"
    known.parent.mkdir(parents=True)
    known.write_text('[{"package": "nowhere"}]\n')
    monkeypatch.setattr(sys, "argv", ["packages"])
    assert packages.main() == 0
    assert known.read_text() == '[{"package": "nowhere"}]\n'
    assert "no installed package provides nowhere" in capsys.readouterr().err


def test_methods_of_this_repository_have_no_package() -> None:
    assert packages.names({"rl": {"algorithm": "dapo"}}, "search") == {"environments": "search", "algorithms": None}
    assert packages.names({"rl": {"algorithm": "rank_pg"}}, "maze") == {"environments": "maze", "algorithms": "rank_pg"}
