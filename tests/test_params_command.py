"""`python -m stages.params`: checking a file, applying an overlay, and migrating a file of an earlier release."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from stages import params
from stages.params import load_params, parse_params
from stages.records.sections import deep_merge
from stages.runtime.overlay import SCHEMA, overlaid, write_params
from stages.runtime.validation import ParamsError

ROOT = Path(__file__).resolve().parents[1]


def test_overlay_changes_values_and_keeps_comments(tmp_path: Path) -> None:
    path, overlay = tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    path.write_text("# about the file\nseed: 0 # of everything\nrl:\n  steps: 20 # long\n  epochs: 1\n")
    overlay.write_text("rl: {steps: 2}\nresources: {device: cuda}\n")
    write_params(path, overlaid(path, overlay))
    text = path.read_text()
    assert "# about the file" in text
    assert "# of everything" in text
    assert "# long" in text
    assert yaml.safe_load(text) == {"seed": 0, "rl": {"steps": 2, "epochs": 1}, "resources": {"device": "cuda"}}


def test_overlay_adds_keys_within_their_section(tmp_path: Path) -> None:
    """Contract: a new key is above the blank line that ends its section; in a mapping on one line it is the last."""
    path, overlay = tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    path.write_text("rl:\n  steps: 20 # long\n  loss: {kind: own} # of tokens\n\nmerge:\n  method: ties\n")
    overlay.write_text("rl: {epochs: 2, seed: 1, loss: {clip_low: 0.1}}\nmerge: {lam: 0.5}\n")
    assert overlaid(path, overlay) == (
        "rl:\n  steps: 20 # long\n  epochs: 2\n  seed: 1\n  loss: {kind: own, clip_low: 0.1} # of tokens\n\n"
        "merge:\n  lam: 0.5\n  method: ties\n"
    )


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Path, Path], tuple[int, str]]:
    """`python -m stages.params --file FILE --apply OVERLAY`: exit code and standard error."""

    def run(path: Path, overlay: Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["params", "--file", str(path), "--apply", str(overlay)])
        return params.main(), capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("overlay", "message"),
    [
        (b"rl: {stepz: 3}\n", "unknown key 'rl.stepz'. Did you mean 'steps'?"),
        (b"rl: {steps: 0}\n", "greater than or equal to 1"),
        (b"per_domain: {search: {environment: {echo: 1}}}\n", "echo"),
        (b"rl: [\n", "overlay.yaml is not valid YAML"),
        (b"\xff\n", "overlay.yaml, line 1: byte 0xff is not UTF-8"),
        (b"- 1\n", "must hold a mapping"),
        (None, "overlay.yaml can't be read: No such file"),
    ],
)
def test_invalid_overlay_changes_nothing(
    tmp_path: Path, overlay: bytes | None, message: str, applied: Callable[[Path, Path], tuple[int, str]]
) -> None:
    """Contract: `--apply` checks before it writes."""
    path = tmp_path / "params.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    if overlay is not None:
        (tmp_path / "overlay.yaml").write_bytes(overlay)
    code, stderr = applied(path, tmp_path / "overlay.yaml")
    assert code == 2
    assert message in stderr
    assert "params.yaml is unchanged" in stderr
    assert path.read_bytes() == (ROOT / "params.yaml").read_bytes()


def test_overlay_keeps_symlink_and_permissions(tmp_path: Path, applied: Callable[[Path, Path], tuple[int, str]]) -> None:
    real, link, overlay = tmp_path / "real.yaml", tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    shutil.copy(ROOT / "params.yaml", real)
    real.chmod(0o600)
    link.symlink_to(real.name)
    overlay.write_text("rl: {steps: 3}\n")
    assert applied(link, overlay) == (0, "")
    assert link.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600
    assert load_params(link).rl.steps == 3
    assert sorted(item.name for item in tmp_path.iterdir()) == ["overlay.yaml", "params.yaml", "real.yaml"]


def test_empty_overlay_changes_nothing(tmp_path: Path) -> None:
    path, overlay = tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    path.write_text("seed: 0 # of everything\n")
    overlay.write_text("# nothing yet\n")
    write_params(path, overlaid(path, overlay))
    assert path.read_text() == "seed: 0 # of everything\n"


def test_overlay_changes_only_its_own_lines(tmp_path: Path) -> None:
    """Git's diff after `--apply` is minimal: quotes, nulls and long lines of the shipped file stay as they are."""
    path, overlay = tmp_path / "params.yaml", tmp_path / "overlay.yaml"
    shutil.copy(ROOT / "params.yaml", path)
    overlay.write_text("rl: {algorithm: ppo}\n")
    write_params(path, overlaid(path, overlay))
    before, after = (file.read_text().splitlines() for file in (ROOT / "params.yaml", path))
    assert [line for line in before if line not in after] == ["  algorithm: grpo"]
    assert [line for line in after if line not in before] == ["  algorithm: ppo"]


@pytest.mark.slow
def test_missing_model_folder_is_reported_by_the_check(tmp_path: Path) -> None:
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(deep_merge(values, {"model": {"path": "data/nope"}})))
    command = [sys.executable, "-m", "stages.params", "--file", str(tmp_path / "params.yaml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "model.path" in done.stderr
    assert "data/nope does not exist" in done.stderr


def test_overlay_with_values_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    """ruamel's reader reaches Python's limit before the other reader does."""
    path, overlay = ROOT / "params.yaml", tmp_path / "deep.yaml"
    overlay.write_text(f"rl: {{learning_rate: {'[' * 300}{']' * 300}}}\n")
    with pytest.raises(ParamsError, match=r"deep\.yaml can't be applied to .*: values are nested too deeply"):
        overlaid(path, overlay)


def test_command_line_checks_and_prints(tmp_path: Path) -> None:
    def check(file: Path) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stages.params", "--file", str(file)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    good = check(ROOT / "params.yaml")
    assert good.returncode == 0, good.stderr
    assert "per_domain.search:" in good.stdout
    values = yaml.safe_load((ROOT / "params.yaml").read_text())
    values["per_domain"]["search"]["environment"] = {"max_turn": 3}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    bad = check(tmp_path / "bad.yaml")
    assert bad.returncode == 2
    assert "max_turn" in bad.stderr
    assert "Traceback" not in bad.stderr
    values["domains"], values["per_domain"]["serch"] = ["serch"], {}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(values))
    unknown = check(tmp_path / "bad.yaml")
    assert unknown.returncode == 2
    assert "unknown domain 'serch'; did you mean 'search'?" in unknown.stderr


def test_file_of_an_earlier_release_is_migrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: the error for an old file gives the new names and the command, which renames keys, moves sections, removes
    nested defaults, keeps what the user set and the keys that DVC needs, and reports it; a second run changes nothing."""
    path = tmp_path / "params.yaml"
    old = load_params().model_dump()
    old["rl"]["filling"] = {**old["rl"].pop("group_resampling"), "kind": "resample"}
    old["per_domain"]["search"]["rl"]["filling"] = {"kind": "exclude"}
    old["sft"]["warmup"], old["design"] = 0.25, {"budget": 9}
    path.write_text("# mine\n" + yaml.safe_dump(old, sort_keys=False))
    lines = len(path.read_text().splitlines())
    with pytest.raises(ParamsError) as error:
        load_params(path)
    assert "'rl.filling'. It is now 'rl.group_resampling'" in str(error.value)
    assert "'design'. It is now the file reports/design/design.yaml" in str(error.value)
    assert "python -m stages.params --migrate" in str(error.value)
    monkeypatch.setattr(sys, "argv", ["params", "--file", str(path), "--migrate"])
    assert params.main() == 0
    message = capsys.readouterr().out
    assert "renamed rl.filling to rl.group_resampling" in message
    assert "renamed per_domain.search.rl.filling" in message
    assert "removed annotate.selection.rule: uct, the default" in message
    text, made = path.read_text(), load_params(path)
    assert text.startswith(f"{SCHEMA}# mine\n")
    assert len(text.splitlines()) < lines / 2
    assert (made.sft.warmup, made.rl.group_resampling.kind) == (0.25, "resample")
    assert made.section("rl", "search").group_resampling.kind == "exclude"
    changed = deep_merge(load_params().model_dump(), {"sft": {"warmup": 0.25}, "rl": {"group_resampling": {"kind": "resample"}}})
    changed = deep_merge(changed, {"per_domain": {"search": {"rl": {"group_resampling": {"kind": "exclude"}}}}})
    assert made == parse_params(changed)
    assert yaml.safe_load((tmp_path / "reports/design/design.yaml").read_text()) == {"budget": 9}
    written = yaml.safe_load(text)
    assert written["model"].keys() >= {"path", "max_length", "lora", "thinking"}
    assert written["resources"].keys() >= {"device", "launch", "engine"}
    assert params.main() == 0
    assert path.read_text() == text
    assert "is up to date" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        (
            "model.thinking",
            "add `thinking: null`, its default, below model: dvc.yaml lists model.thinking, and DVC knows no defaults",
        ),
        ("resources.launch", "add `launch: null`, its default, below resources: "),
        ("annotate", "add `annotate: {}`, its default, at the top level: "),
        ("evaluate.transfer", "add `transfer: []`, its default, below evaluate: "),
        ("per_domain.search.rl", "add `rl: {}`, its default, below per_domain.search: "),
        ("per_domain.keydoor.rl", None),
        ("rl.seed", None),
    ],
)
def test_keys_that_dvc_needs_must_be_in_the_file(
    tmp_path: Path, applied: Callable[[Path, Path], tuple[int, str]], absent: str, line: str | None
) -> None:
    """Contract: a file that the check accepts does not fail in DVC, which knows no defaults."""
    values = section = yaml.safe_load((ROOT / "params.yaml").read_text())
    *outer, name = absent.split(".")
    for part in outer:
        section = section[part]
    del section[name]
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "overlay.yaml").write_text("seed: 1\n")
    code, stderr = applied(tmp_path / "params.yaml", tmp_path / "overlay.yaml")
    assert code == (2 if line else 0)
    assert stderr.startswith(f"params.yaml: {line}" if line else "")
    assert stderr.count("its default") == bool(line)
