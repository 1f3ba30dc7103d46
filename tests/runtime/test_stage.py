"""Running a stage: exit codes that say whether retrying can help, costs and exclusive GPUs."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from stages import evaluate, merge, params
from stages.params import parse_params
from stages.runtime import stage as runtime
from stages.runtime.checkpoints import Checkpoints
from stages.runtime.costs import read_cost
from stages.runtime.lineage import stage_entry
from stages.runtime.stage import BAD_PARAMETERS, FAILED, StageContext, own_gpu, stage_run, uses_gpu
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError
from stages.tracking import open_tracker

ROOT = Path(__file__).resolve().parents[2]


def raising(error: Exception) -> Callable[[StageContext], None]:
    def run(context: StageContext) -> None:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(28, "No space left on device"), FAILED),
        (ConnectionError("the engine's server is gone"), FAILED),
        (ParamsError("params.yaml: unknown key"), BAD_PARAMETERS),
        (ValueError("the panel was changed"), BAD_PARAMETERS),
        (FileNotFoundError("data/curated/search"), BAD_PARAMETERS),
    ],
)
def test_exit_code_says_whether_retrying_can_help(project: Path, error: Exception, code: int) -> None:
    assert stage_run("sft", raising(error), params, open_tracker) == code


@pytest.mark.parametrize("error", [FileNotFoundError, lambda path: FileNotFoundError(2, "No such file or directory", path)])
def test_missing_input_is_reported_with_the_command_that_makes_it(
    project: Path, capsys: pytest.CaptureFixture[str], error: Callable[[str], Exception]
) -> None:
    """Contract: pyarrow's message is the path alone. A file that no stage makes keeps its message."""
    path = project / "data/curated/search/tasks.parquet"
    stage_run("sft", raising(error(str(path))), params, open_tracker)
    printed = capsys.readouterr().err
    assert f"sft: {path} does not exist; 'dvc repro sft' first runs the stages that make it\n" in printed
    shipped = str(project / "data/raw/search.jsonl")
    for other in (error(shipped), error("/elsewhere"), FileNotFoundError(f"{path} does not exist")):
        stage_run("sft", raising(other), params, open_tracker)
        assert f"sft: {other}\n" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_of_forks_is_not_called_a_checkpoint(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    """Contract: "from a checkpoint" says that an earlier run computed it; what this run's forks did, it only collects."""
    (project / "params.yaml").write_text(f"domains: [search]\nper_domain: {{search: {{}}}}\nresources: {{workers: {workers}}}\n")
    monkeypatch.setattr(runtime, "LIBRARIES", ())

    def run(context: StageContext) -> None:
        if not context.shard:
            with context.progress("playing", 2, "episode") as bar:
                bar.restore(2)

    assert stage_run("rollout", run, params, lambda *where: Tracker(), sharded=True, forked=True) == 0
    assert capfd.readouterr().out == f"rollout: playing 2/2 episodes{'; from a checkpoint' if workers == 1 else ''}\n"


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "code"), [(OSError(28, "full"), FAILED), (ValueError("bad"), BAD_PARAMETERS), (KeyError("gone"), 1)]
)
def test_exit_code_is_independent_of_which_process_fails(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: int, error: Exception, code: int
) -> None:
    """Contract: forks take chunks as they become free, so timing alone decides in which one an error appears. Only the first
    process closes the tracker and writes the cost."""
    (project / "params.yaml").write_text("domains: [search]\nper_domain: {search: {}}\nresources: {workers: 3}\n")
    monkeypatch.setattr(runtime, "LIBRARIES", ())
    closed = project / "closed"

    class Recording(Tracker):
        def close(self, status: str = "FINISHED") -> None:
            with closed.open("a") as file:
                file.write(f"{status}\n")

    def run(context: StageContext) -> None:
        if context.team and context.team.index == failing:
            raise error

    def result() -> int:
        return stage_run("rollout", run, params, lambda *where: Recording(), sharded=True, forked=True)

    if isinstance(error, KeyError) and not failing:
        with pytest.raises(KeyError):
            result()
    else:
        assert result() == code
        assert str(error) in capfd.readouterr().err
    assert closed.read_text() == "FAILED\n"
    cost = read_cost(project, "rollout")
    assert cost is not None
    assert (cost.runs, cost.done) == (1, False)


def test_bad_params_file_gives_its_own_exit_code(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "params.yaml").write_text("domains: [search]\nper_domain: {search: {}}\nrl: {step: 3}\n")
    assert stage_run("sft", raising(AssertionError("must not run")), params, open_tracker) == BAD_PARAMETERS
    assert "Did you mean 'steps'?" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["curate", "sft", "report"])
def test_unsupported_model_stops_every_stage(project: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Contract: no stage runs with a model that rl could not use."""
    (project / "params.yaml").write_text("domains: [search]\nper_domain: {search: {}}\nmodel: {path: t5}\n")
    (project / "t5").mkdir()
    (project / "t5/config.json").write_text('{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}')
    assert stage_run(name, raising(AssertionError("must not run")), params, open_tracker) == BAD_PARAMETERS
    message = capsys.readouterr().err
    assert "params.yaml: model.path:" in message
    assert "T5ForConditionalGeneration (model_type t5) is not supported: it has an encoder" in message


PIPELINE = """
stages:
  rollout: {cmd: "-", deps: [stages/engine, data/curated, data/models/rl], params: [seed, rollout]}
"""


@pytest.fixture
def pipeline(project: Path) -> Path:
    (project / "dvc.yaml").write_text(PIPELINE)
    for name in ("stages/engine/engine.py", "data/curated/search/tasks", "data/curated/gone/tasks"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("1")
    return project


@pytest.mark.parametrize(
    ("file", "line", "named"),
    [
        ("params.yaml", "rollout: {attempts: 3}\n", "rollout"),
        ("stages/engine/engine.py", "# other\n", "stages/engine"),
        ("params.yaml", "rl: {steps: 3}\n", None),
        ("data/curated/search/tasks", "2", None),
    ],
)
def test_results_from_before_an_edit_are_not_recorded(
    pipeline: Path, capsys: pytest.CaptureFixture[str], file: str, line: str, named: str | None
) -> None:
    """Contract: DVC, which hashes parameters and code after a stage, records no results of earlier ones. Edits of what the stage
    does not read are no failure."""

    def run(context: StageContext) -> None:
        with (pipeline / file).open("a") as handle:
            handle.write(line)

    assert stage_run("rollout", run, params, open_tracker) == (FAILED if named else 0)
    expected = f"rollout: edited in params.yaml or the code while the stage ran: {named}. Its results are from before the edit"
    assert (expected in capsys.readouterr().err) == bool(named)
    cost = read_cost(pipeline, "rollout")
    assert cost is not None
    assert cost.done != bool(named)
    assert stage_run("rollout", lambda context: None, params, open_tracker) == 0


def test_checkpoints_belong_to_the_parameters_that_the_stage_started_with(pipeline: Path) -> None:
    """Contract: state computed with earlier parameters is never resumed with those of an edit."""
    folders = []

    def run(context: StageContext) -> None:
        if not folders:
            (pipeline / "params.yaml").write_text("domains: [search]\nper_domain: {search: {}}\nseed: 7\n")
        folders.append(Checkpoints(context).folder)

    assert [stage_run("rollout", run, params, open_tracker) for _ in range(2)] == [FAILED, 0]
    assert folders[0] != folders[1]


@pytest.mark.parametrize("line", ["resources: {workers: 2, device: cpu}\n", "resources: {shards: {count: 2}}\n"])
def test_unlisted_domains_are_removed_before_work_is_divided(pipeline: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Contract: forks, shards and the process that collects their work have the same inputs, and so share their checkpoints."""
    with (pipeline / "params.yaml").open("a") as handle:
        handle.write(line)
    monkeypatch.setattr(runtime, "LIBRARIES", ())
    seen = pipeline / "seen"

    def run(context: StageContext) -> None:
        with seen.open("a") as handle:
            handle.write(f"{Checkpoints(context).folder.name}\n")

    def shards(root: Path, stage: str, domain: str | None, settings: object) -> None:
        monkeypatch.setattr(sys, "argv", ["stage", "--shard", "1/2"])
        assert stage_run(stage, run, params, open_tracker, sharded=True) == 0

    monkeypatch.setattr(runtime, "run_shards", shards)
    assert stage_run("rollout", run, params, open_tracker, sharded=True, forked=True, prune=merge.prune) == 0
    found = seen.read_text().split()
    assert len(found) > 1
    assert len(set(found)) == 1


@pytest.mark.parametrize("stage", [merge, evaluate])
def test_joining_stages_remove_unlisted_domains_from_all_their_inputs(project: Path, stage: ModuleType) -> None:
    """Contract: after `domains` is shortened, no stage removes inputs of an earlier one, which DVC would then run again."""
    name = stage.__name__.rpartition(".")[2]
    folders = {"data/curated", "data/transfer", "data/models/q", "data/models/rl"}
    joined = folders & set(stage_entry(ROOT, name, None)["deps"])
    assert len(joined) >= 2
    for folder in joined:
        (project / folder / "gone").mkdir(parents=True)
        (project / folder / "gone.json").write_text("[]")
        (project / folder / "search").mkdir()
    values = parse_params({"domains": ["search"], "per_domain": {"search": {}}})
    stage.prune(StageContext(name, None, values, project, Tracker()))
    assert not [folder for folder in joined if (project / folder / "gone.json").exists()]


HOLD = """
import sys, time
from stages.runtime.gpu import own_gpu

with own_gpu(sys.argv[1], "rl@search"):
    print("holds", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that holds GPU 0."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    process = subprocess.Popen([sys.executable, "-c", HOLD, "cuda"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()


def test_gpu_runs_one_stage_at_a_time(holder: subprocess.Popen, capsys: pytest.CaptureFixture[str]) -> None:
    """However stages are started (Prefect, dvc repro, in another checkout), a GPU runs one; a killed stage releases it."""
    with own_gpu("cuda:1", "sft") as waited:  # another GPU is free
        assert waited == 0.0
    assert capsys.readouterr().out == ""
    subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({holder.pid}, 9)"])
    started = time.monotonic()
    with own_gpu("cuda:0", "sft") as waited:
        assert time.monotonic() - started >= waited > 0.2
    assert capsys.readouterr().out.startswith("sft: GPU 0 is in use by another stage; waiting until it is free (")


def test_waiting_for_a_gpu_is_no_start(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that waits 7 of its first 10 seconds for another's GPU started in 3."""
    monkeypatch.setattr(runtime, "uptime", lambda: 10.0)
    monkeypatch.setattr(runtime, "uses_gpu", lambda *_: True)
    monkeypatch.setattr(runtime, "own_gpu", lambda *_: nullcontext(7.0))
    assert stage_run("sft", lambda context: None, params, open_tracker) == 0
    cost = read_cost(project, "sft")
    assert cost is not None
    assert cost.spans["start"] == pytest.approx(3.0, abs=0.5)
    assert 3.0 <= cost.seconds < 6.0


def test_gpu_lock_is_on_the_physical_device(
    holder: subprocess.Popen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0")
    with own_gpu("cuda:0", "sft"):  # the machine's GPU 3
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")  # the launcher's first process holds the GPU for all
    with own_gpu("cuda:1", "sft"):
        pass
    assert capsys.readouterr().out == ""


def lock_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with own_gpu("cuda:0", "sft"):
        pass


def test_gpu_locks_are_in_a_private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: nobody else can create, hold or replace a lock, although all users may write to TMPDIR."""
    tmp_path.chmod(0o1777)
    lock_gpu(tmp_path, monkeypatch)
    (folder,) = tmp_path.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["gpu-0.lock"]
    lock_gpu(tmp_path, monkeypatch)


@pytest.mark.parametrize("trap", ["link", "file", "open", "owner"])
def test_lock_folder_prepared_by_another_user_is_rejected(trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: what another user puts in the folder's place is neither followed nor trusted; the message says what to do."""
    user = os.getuid() + (trap == "owner")
    monkeypatch.setattr(os, "getuid", lambda: user)
    victim, name = tmp_path / "victim", tmp_path / f"bellwether-{user}"
    victim.mkdir(mode=0o700)
    if trap == "link":
        name.symlink_to(victim)
    elif trap == "file":
        name.write_text("")
    else:
        name.mkdir()
        name.chmod(0o777 if trap == "open" else 0o700)
    with pytest.raises(PermissionError, match=r"is not a private folder of yours .*; remove it, or set TMPDIR"):
        lock_gpu(tmp_path, monkeypatch)
    assert not list(victim.iterdir())


def test_symlinked_lock_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_gpu(tmp_path, monkeypatch)
    lock = tmp_path / f"bellwether-{os.getuid()}" / "gpu-0.lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        lock_gpu(tmp_path, monkeypatch)
    assert not (tmp_path / "elsewhere").exists()


def test_gpu_stages_are_those_that_depend_on_the_device() -> None:
    values = {"domains": ["search"], "per_domain": {"search": {}}}
    on_gpu = parse_params({**values, "resources": {"device": "cuda"}})
    names = ("curate", "sft", "rollout", "annotate", "rl", "merge", "evaluate", "report")
    assert [name for name in names if uses_gpu(ROOT, name, on_gpu)] == ["sft", "rollout", "annotate", "rl", "merge", "evaluate"]
    assert not any(uses_gpu(ROOT, name, parse_params(values)) for name in names)
