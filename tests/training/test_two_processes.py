"""Training in two processes, started by `accelerate launch` with the shipped configurations on gloo, compared with one."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from stages import params, sft
from stages.runtime import stage as runtime
from stages.runtime.stage import StageContext, stage_run
from stages.tracking import open_tracker
from training.toys import store_pairs

MakeContext = Callable[..., StageContext]
pytestmark = pytest.mark.long(110)
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = f"""
import os, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "training")!r}]
from importlib import import_module
from types import SimpleNamespace
from stages import params, rl, sft
from stages.runtime.stage import LIBRARIES, stage_run
from stages.tracking import open_tracker
from toys import FirstLetterEnvironment

toy = SimpleNamespace(make=FirstLetterEnvironment.in_folder, settings=SimpleNamespace(max_turns=2))
rl.load_domain = rl.open_domain = lambda name, settings: toy


def train():
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
    return code


folders = sys.argv[1:]
if not folders:
    sys.exit(train())
for library in LIBRARIES:
    import_module(library)
for folder in folders:  # one after another, each in a fork, which needs no time to import
    if not (child := os.fork()):
        os.chdir(folder)
        code = train()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
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
AGENTS = {
    "resources": RESOURCES,
    "rl": {"algorithm": "marft", "steps": 2, "tasks_per_step": 3, "group_size": 2, "sampling": {"max_tokens": 4}},
}


def curve(path: Path) -> list[dict[str, float]]:
    with path.open() as handle:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(handle)]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, make_contexts: Callable[[Path], MakeContext]) -> Training:
    return Training(tmp_path_factory.mktemp("training"), make_contexts)


class Training:
    """Processes that run sft, then rl, in a folder, and rl from pairs in its subfolder `pairs`."""

    def __init__(self, folder: Path, make_contexts: Callable[[Path], MakeContext]) -> None:
        self.folder, self.make_context = folder, make_contexts(folder)
        self.script = folder / "train.py"
        self.script.write_text(SCRIPT)

    def prepare(self, name: str, **changes: Any) -> Path:
        root = self.make_context("sft", name, **{**SECTIONS, **changes}).root
        store_pairs(self.make_context("rl", f"{name}/pairs", **{**PAIRS, "resources": changes.get("resources", RESOURCES)}))
        return root

    def run(self, folder: Path, *launcher: str, folders: Sequence[Path] = ()) -> tuple[int, str]:
        """Train in `folder`, or in each of `folders`; the exit code and what was printed."""
        dropped = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        environment = {key: value for key, value in os.environ.items() if key not in dropped}
        environment |= {"BELLWETHER_TRACKING": "off", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *launcher, str(self.script), *map(str, folders)]
        done = subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        return done.returncode, done.stdout[-4000:]

    def launch(self, name: str, config: str, **changes: Any) -> Path:
        """The folder `name`, trained by `accelerate launch` with a shipped configuration."""
        root = self.prepare(name, **changes)
        path = str(ROOT / "profiles" / "accelerate" / f"{config}.yaml")
        code, printed = self.run(root, "-m", "accelerate.commands.launch", "--config_file", path)
        assert code == 0, printed
        return root


@pytest.fixture(scope="module")
def teams(training: Training) -> dict[int, Path]:
    """The folders trained by 1, 2 and 3 workers, each with rl of a team of agents in its subfolder `agents`."""
    roots = {}
    for count in (1, 2, 3):
        resources = {**RESOURCES, "workers": count}
        roots[count] = training.prepare(f"team{count}", resources=resources)
        training.make_context("rl", f"team{count}/agents", **{**AGENTS, "resources": resources})
    code, printed = training.run(training.folder, folders=list(roots.values()))
    assert code == 0, printed
    return roots


FOLDERS = ("data/models", "data/rl", "reports", "pairs/data/models/rl", "pairs/reports")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_trained_bytes_are_independent_of_the_number_of_workers(teams: dict[int, Path]) -> None:
    """Contract: with 1, 2 and 3 workers, sft, rl with policy and critic, rl from preference pairs and rl of a team of
    agents write the same bytes."""
    one = teams[1]
    folders = (*FOLDERS, "agents/data/models/rl", "agents/data/rl", "agents/reports")
    files = sorted(path.relative_to(one) for folder in folders for path in (one / folder).rglob("*") if path.is_file())
    planner = Path("agents/data/models/rl/toy/agents/planner/model.safetensors")
    assert {Path("data/models/rl/toy/model.safetensors"), Path("reports/sft/history.csv"), planner} <= set(files)
    for count in (2, 3):
        for file in files:
            assert (teams[count] / file).read_bytes() == (one / file).read_bytes(), f"{count} workers: {file}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["ddp", "fsdp"])
def test_two_processes_train_like_one(training: Training, teams: dict[int, Path], config: str) -> None:
    """Contract: under DDP and FSDP, sft, rl with policy and critic, and rl from preference pairs have one process's loss curve to
    1e-5, and its weights; only the first process writes, the same files."""
    one, root = teams[1], training.launch(config, config)
    files = sorted(path.relative_to(one) for folder in FOLDERS for path in (one / folder).rglob("*"))
    assert Path("reports/rl/toy.json") in files
    for file in ("reports/sft/history.csv", "reports/rl/toy_history.csv", "pairs/reports/rl/toy_history.csv"):
        ours, theirs = curve(root / file), curve(one / file)
        assert len(ours) == len(theirs) > 2
        for row, expected in zip(ours, theirs, strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-5), file
    for model in ("data/models/sft", "data/models/rl/toy", "pairs/data/models/rl/toy"):
        ours, theirs = (load_file(folder / model / "model.safetensors") for folder in (root, one))
        assert sorted(ours) == sorted(theirs)
        for key, value in theirs.items():
            assert float((ours[key] - value).abs().max()) < 2e-5, f"{model} {key}"
    for file in files:
        assert (root / file).is_dir() == (one / file).is_dir(), file
    ledger = {key: value for key, value in yaml.safe_load((root / "reports/sft.json").read_text()).items() if "ledger" in key}
    expected = yaml.safe_load((one / "reports/sft.json").read_text())
    assert ledger
    assert ledger == {key: expected[key] for key in ledger}
    assert not list((root / ".bellwether").rglob("*.pt"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["ddp", "fsdp"])
def test_recomputed_layers_train_like_kept_ones_in_two_processes(
    training: Training, teams: dict[int, Path], tiny_policy: Path, config: str
) -> None:
    """Contract: gradient checkpointing with shared prefixes changes no loss under DDP and FSDP either."""
    model = {"path": str(tiny_policy), "gradient_checkpointing": True}
    root = training.launch(f"recomputed-{config}", config, model=model)
    for file in ("reports/sft/history.csv", "reports/rl/toy_history.csv"):
        for row, expected in zip(curve(root / file), curve(teams[1] / file), strict=True):
            assert row == pytest.approx(expected, rel=1e-5, abs=1e-5), file


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_failing_worker_ends_the_stage(training: Training) -> None:
    """The stage ends with the cause; no other worker waits."""
    sections = {"resources": {**RESOURCES, "workers": 3}, "sft": {**SECTIONS["sft"], "learning_rate": 1e30}}
    code, printed = training.run(training.prepare("failing", **sections))
    assert code != 0
    assert "not finite" in printed


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["ddp", "fsdp"])
def test_bfloat16_ratios_start_at_one_in_two_processes(training: Training, config: str) -> None:
    """Contract: under DDP and FSDP, too, old and new log-probabilities of a ratio come from the same kind of pass."""
    section = {**SECTIONS["rl"], "algorithm": "gspo", "epochs": 1, "minibatches": 2, "learning_rate": 1e-12}
    del section["critic"]
    root = training.launch(f"bfloat16-{config}", config, resources={**RESOURCES, "precision": "bfloat16"}, rl=section)
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
