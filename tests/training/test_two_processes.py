"""Training in two processes, started by `accelerate launch` with the shipped configurations on gloo, compared with one."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from stages import params, sft
from stages.runtime import stage as runtime
from stages.runtime.stage import stage_run
from stages.tracking import open_tracker
from training.toys import store_pairs

pytestmark = pytest.mark.long(110)
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "training")!r}]
from types import SimpleNamespace
from stages import params, rl, sft
from stages.runtime.stage import stage_run
from stages.tracking import open_tracker
from toys import FirstLetterEnvironment

toy = SimpleNamespace(make=lambda folder: FirstLetterEnvironment(), settings=SimpleNamespace(max_turns=2))
rl.load_domain = rl.open_domain = lambda name, settings: toy
sys.argv = ["sft"]
code = stage_run("sft", sft.run, params, open_tracker, launched=True)
if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    import torch
    torch.distributed.barrier()
sys.argv = ["rl", "--domain", "toy"]
for folder in (".", "pairs", "../agents"):
    if not os.path.isdir(folder):
        continue
    os.chdir(folder)
    code = code or stage_run("rl", rl.run, params, open_tracker, per_domain=True, launched=True)
sys.exit(code)
"""
# Micro-batches so small that the processes get different numbers of them.
RESOURCES = {"slots": 16, "threads": 1, "workers": 1, "tokens_per_batch": 256}
SECTIONS = {
    "resources": RESOURCES,
    "sft": {"epochs": 3.0, "batch_tokens": 512, "eval_every": 2, "checkpoint_every": 2},
    "rl": {
        "algorithm": "ppo",
        "steps": 3,
        "tasks_per_step": 5,
        "group_size": 3,
        "epochs": 2,
        "checkpoint_every": 2,
        "critic": {"warmup_steps": 1},
        "loss": {"kl_coef": 0.01},
        "sampling": {"max_tokens": 6},
    },
}
PAIRS = {
    "resources": RESOURCES,
    # Before each update KTO scores other pairs with policy and reference.
    "rl": {"algorithm": "kto", "steps": 4, "warmup_steps": 0, "checkpoint_every": 2, "preference": {"pairs_per_step": 5}},
}
TEAM = {
    "resources": RESOURCES,
    "rl": {
        "algorithm": "marft",
        "steps": 2,
        "tasks_per_step": 3,
        "group_size": 2,
        "warmup_steps": 0,
        "sampling": {"max_tokens": 4},
    },
}


def curve(path: Path) -> list[dict[str, float]]:
    with path.open() as handle:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(handle)]


@pytest.fixture
def start(make_context, tmp_path):
    """start(name, *launcher, **sections): a process that runs sft, then rl, in its own folder, rl from pairs in the subfolder
    `pairs` and, with agents=True, rl of a team in the subfolder `agents`."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)

    def go(name: str, *launcher: str, agents: bool = False, **changes: Any) -> tuple[Path, subprocess.Popen]:
        root = make_context("sft", name, **{**SECTIONS, **changes}).root
        store_pairs(make_context("rl", f"{name}/pairs", **{**PAIRS, "resources": changes.get("resources", RESOURCES)}))
        if agents:
            make_context("rl", f"{name}/agents", **{**TEAM, "resources": changes["resources"]})
        dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {key: value for key, value in os.environ.items() if key not in dropped}
        environment |= {"BELLWETHER_TRACKING": "off", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        log = (tmp_path / f"{name}.log").open("wb")
        command = [sys.executable, *launcher, str(script)]
        return root, subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log)

    return go


@pytest.mark.timeout(900)
def test_two_processes_train_like_one(start, tmp_path: Path) -> None:
    """Contract: under DDP and FSDP, sft, rl with policy and critic, and rl from preference pairs have one process's loss curve to
    1e-5, and its weights; only the first process writes, the same files."""
    launch = ("-m", "accelerate.commands.launch", "--config_file")
    running = {"one": start("one")}
    for name in ("ddp", "fsdp"):
        running[name] = start(name, *launch, str(ROOT / "profiles" / "accelerate" / f"{name}.yaml"))
    for name, (_, process) in running.items():
        assert process.wait(timeout=900) == 0, (tmp_path / f"{name}.log").read_text()[-4000:]
    one = running["one"][0]
    folders = ("data/models", "data/rl", "reports", "pairs/data/models/rl", "pairs/reports")
    files = sorted(path.relative_to(one) for folder in folders for path in (one / folder).rglob("*"))
    assert Path("reports/rl/toy.json") in files
    for name in ("ddp", "fsdp"):
        root = running[name][0]
        for file in ("reports/sft/history.csv", "reports/rl/toy_history.csv", "pairs/reports/rl/toy_history.csv"):
            ours, theirs = curve(root / file), curve(one / file)
            assert len(ours) == len(theirs) > 2
            for row, expected in zip(ours, theirs, strict=True):
                assert row == pytest.approx(expected, rel=1e-5, abs=1e-5), f"{name} {file}"
        for model in ("data/models/sft", "data/models/rl/toy", "pairs/data/models/rl/toy"):
            ours, theirs = (load_file(folder / model / "model.safetensors") for folder in (root, one))
            assert sorted(ours) == sorted(theirs)
            for key, value in theirs.items():
                assert float((ours[key] - value).abs().max()) < 2e-5, f"{name} {model} {key}"
        for file in files:
            assert (root / file).is_dir() == (one / file).is_dir(), file
        ledger = {key: value for key, value in yaml.safe_load((root / "reports/sft.json").read_text()).items() if "ledger" in key}
        expected = yaml.safe_load((one / "reports/sft.json").read_text())
        assert ledger
        assert ledger == {key: expected[key] for key in ledger}
        assert not list((root / ".bellwether").rglob("*.pt"))


@pytest.mark.timeout(900)
def test_trained_bytes_are_independent_of_the_number_of_workers(start, tmp_path: Path) -> None:
    """Contract: with 1, 2 and 3 workers, sft, rl with policy and critic, rl from preference pairs and rl of a team
    of agents write the same bytes."""
    running = {count: start(f"team{count}", agents=True, resources={**RESOURCES, "workers": count}) for count in (1, 2, 3)}
    for count, (_, process) in running.items():
        assert process.wait(timeout=900) == 0, (tmp_path / f"team{count}.log").read_text()[-4000:]
    one = running[1][0]
    folders = ("data/models", "data/rl", "reports", "pairs/data/models/rl", "pairs/reports", "agents/data", "agents/reports")
    files = sorted(path.relative_to(one) for folder in folders for path in (one / folder).rglob("*") if path.is_file())
    planner = Path("agents/data/models/rl/toy/agents/planner/model.safetensors")
    assert {Path("data/models/rl/toy/model.safetensors"), Path("reports/sft/history.csv"), planner} <= set(files)
    for count in (2, 3):
        for file in files:
            assert (running[count][0] / file).read_bytes() == (one / file).read_bytes(), f"{count} workers: {file}"


@pytest.mark.timeout(300)
def test_failing_worker_ends_the_stage(start, tmp_path: Path) -> None:
    """The stage ends with the cause; no other worker waits."""
    sections = {"resources": {**RESOURCES, "workers": 3}, "rl": {**SECTIONS["rl"], "learning_rate": 1e30}}
    _, process = start("failing", **sections)
    assert process.wait(timeout=240) != 0
    assert "not finite" in (tmp_path / "failing.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bfloat16_ratios_start_at_one_in_two_processes(start, tmp_path: Path) -> None:
    """Contract: under DDP and FSDP, too, old and new log-probabilities of a ratio come from the same kind of pass."""
    section = {**SECTIONS["rl"], "algorithm": "gspo", "epochs": 1}
    del section["critic"]
    changes = {"resources": {**RESOURCES, "precision": "bfloat16"}, "rl": section}
    for name in ("ddp", "fsdp"):
        config = str(ROOT / "profiles" / "accelerate" / f"{name}.yaml")
        root, process = start(name, "-m", "accelerate.commands.launch", "--config_file", config, **changes)
        assert process.wait(timeout=900) == 0, (tmp_path / f"{name}.log").read_text()[-4000:]
        for row in curve(root / "reports/rl/toy_history.csv"):
            assert row["clip_fraction"] == 0.0
            assert row["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        report = yaml.safe_load((root / "reports/rl/toy.json").read_text())
        assert report["max_rescored_difference"] <= 1e-4
        assert report["mean_logprob_difference"] > 1e-5


def test_resources_launch_starts_a_training_stage_under_accelerate(make_context, monkeypatch, capsys) -> None:
    root = make_context("sft", resources={"launch": "ddp.yaml"}).root
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "argv", ["sft"])
    monkeypatch.setattr(runtime, "die_with_parent", lambda: None)
    assert stage_run("sft", sft.run, params, open_tracker, launched=True) == 2
    assert "resources.launch: ddp.yaml does not exist" in capsys.readouterr().err

    (root / "ddp.yaml").write_text("num_processes: 2\n")
    started: list[list[str]] = []

    def execv(program: str, arguments: list[str]) -> None:
        started.append(arguments)
        raise SystemExit

    monkeypatch.setattr(os, "execv", execv)
    for name, module in (("sft", None), ("pretrain", "stages.pretraining.__main__")):
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None) if module else None)
        with pytest.raises(SystemExit):
            stage_run(name, sft.run, params, open_tracker, launched=True)
    command = ["-m", "accelerate.commands.launch", "--config_file", str(root / "ddp.yaml"), "-m"]
    assert [arguments[1:] for arguments in started] == [[*command, "stages.sft"], [*command, "stages.pretraining"]]
