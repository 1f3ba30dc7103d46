"""A comparison checks all settings before its first run, and leaves nothing behind when it is ended."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil
import pytest

import flows  # noqa: F401  (configures Prefect, so it comes before Prefect's import)
from flows import compare, experiments
from flows.compare import Comparison, Setting
from flows.experiments import RUN_FOLDERS, RUN_INFOS, clean_up_on_error, remove_leftovers, run_folders
from flows.overrides import check_files, check_overrides
from flows.pipeline import run_items
from flows.process import ChildProcesses, StageFailedError, python_environment

pytestmark = [pytest.mark.timeout(300), pytest.mark.long(30)]
ROOT = Path(__file__).resolve().parents[2]
DVC_YAML = """
stages:
  evaluate:
    cmd: python evaluate.py
    deps: [evaluate.py, parts]
    params: [rl, evaluate, resources]
    metrics:
      - reports/evaluation.json: {cache: false}
  report:
    cmd: "true"
    deps: [reports/evaluation.json, reports/design]
"""
PARAMS = """
domains: [a]
resources: {device: cpu, threads: 2, workers: 2}
rl: {algorithm: grpo, seed: null, steps: 3}
evaluate: {models: null}
per_domain: {a: {}}
"""
EVALUATE = """
import os, pathlib, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("caf\\u00e9".encode("latin-1"), flush=True)
os.write(1, b"caf\\xe9\\n")
pathlib.Path(STARTED).write_text(f"{os.getpid()} {os.getcwd()}")
time.sleep(600)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "parts").mkdir(parents=True)
    started = f"STARTED = {str(tmp_path / 'started')!r}\n"
    for name, text in (("dvc.yaml", DVC_YAML), ("params.yaml", PARAMS), ("evaluate.py", started + EVALUATE), ("parts/a.py", "")):
        (root / name).write_text(text)
    (root / ".gitignore").write_text("*.log\n")
    git(root, "init", "--quiet")
    for key, value in (("user.name", "a"), ("user.email", "a@b.c")):
        git(root, "config", key, value)
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "start")
    return root


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=root, check=True)


def settings(*overrides: str) -> Comparison:
    return Comparison(settings={f"s{number}": Setting(overrides=[one]) for number, one in enumerate(overrides)}, seeds=[0, 1])


CHECK_PARAMS = """
import sys, yaml
keys = {"algorithm", "seed", "steps"}
unknown = yaml.safe_load(open(sys.argv[2]))["rl"].keys() - keys
sys.exit(f"params.yaml: unknown key 'rl.{unknown.pop()}'" if unknown else 0)
"""


def test_invalid_setting_is_rejected_before_the_first_run(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: all settings are checked before the first run; the message names the setting and the key."""

    def no_run(*given: object) -> None:
        raise AssertionError("a run was started")

    (checkout / "stages").mkdir()
    (checkout / "stages" / "params.py").write_text(CHECK_PARAMS)
    git(checkout, "add", ".")
    flow = compare.compare
    monkeypatch.setattr(compare, "ROOT", checkout)
    monkeypatch.setattr(compare, "compare", no_run)
    line = "compare --setting one rl.algorithm=rloo --setting two ++rl.algoritm=rloo --seeds 0 1"
    monkeypatch.setattr(sys, "argv", line.split())
    assert compare.main() == 64
    assert capsys.readouterr().err == "compare: setting two: params.yaml: unknown key 'rl.algoritm'\n"
    monkeypatch.setattr(compare, "run_experiment", no_run)
    with pytest.raises(StageFailedError, match=r"setting s1: .*unknown key 'rl\.algoritm'"):
        flow.fn(settings("rl.algorithm=rloo", "rl.algoritm=rloo"), str(checkout))


def test_every_seed_reaches_every_domain() -> None:
    """Contract: runs with different seeds differ. A domain's own rl.seed varies with rl.seed, and none stays fixed where `seed`
    varies; one that the setting itself fixes does."""
    params = {"domains": ["a", "b"], "rl": {"seed": 5}, "per_domain": {"a": {"rl": {"seed": 7}}, "b": {"rl": {"seed": None}}}}

    def overrides(vary: Literal["rl.seed", "seed"], *own: str) -> list[str]:
        setting = Setting(overrides=list(own))
        comparison = Comparison(settings={"one": setting, "two": Setting()}, vary=vary)
        return [change for change in compare.overrides_of(comparison, setting, 3, params, True) if "seed" in change]

    assert overrides("rl.seed") == ["rl.seed=3", "per_domain.a.rl.seed=3", "per_domain.b.rl.seed=3"]
    assert overrides("seed") == ["rl.seed=null", "per_domain.a.rl.seed=null", "seed=3"]
    assert overrides("seed", "per_domain.a.rl.seed=9") == [
        *("rl.seed=null", "per_domain.a.rl.seed=null"),
        *("per_domain.a.rl.seed=9", "seed=3"),
    ]
    assert compare.fixed_rl_seeds({"domains": ["a"], "rl": {"seed": None}, "per_domain": {"a": None}}) == []


def test_only_undecided_settings_get_further_seeds(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: after each look, the settings that are decided against the first drop out; the first plays on with the others."""
    ran: list[str] = []
    decided = {2: {"s1": "reproduced", "s2": "undecided"}, 4: {"s1": "reproduced", "s2": "not reproduced"}}

    def write(comparison: Comparison, root: Path, scores: object, plan: dict[tuple[str, int], object]) -> Path:
        path = root / "c.md"
        path.write_text(str(max(seed for _, seed in plan) + 1))
        return path

    monkeypatch.setattr(compare, "run_experiments", lambda root, runs, jobs, alone: ran.extend([*runs, str(alone)]))
    monkeypatch.setattr(compare, "gather_scores", lambda *given: {})
    monkeypatch.setattr(compare, "write", write)
    monkeypatch.setattr(compare, "verdicts", lambda path: decided[int(path.read_text())])
    monkeypatch.setattr(compare, "check", lambda *given: None)
    monkeypatch.setattr(compare, "logger", lambda: print)
    three = {f"s{number}": Setting(overrides=[f"rl.steps={number + 1}"]) for number in range(3)}
    comparison = Comparison(settings=three, seeds=list(range(6)), looks=[2, 4, 6])
    compare.compare.fn(comparison, str(checkout))
    first = [f"s{number} {seed}" for seed in (0, 1) for number in range(3)]
    assert ran == [*first, "1", "s0 2", "s2 2", "s0 3", "s2 3", "0"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--looks", "8", "4"], "growing numbers"),
        (["--looks", "8", "--seeds", "0", "1"], "the last of all 2"),
        (["--metric", "turns"], "too small to matter"),
        (["--setting", "c", "--claim", "superiority"], "about two settings"),
        (["--margin", "0"], "margin"),
        (["--seeds", "0", "3", "0"], "seeds: 0 given twice"),
        (["--claim", "better"], "invalid choice"),
    ],
)
def test_wrong_usage_is_not_mistaken_for_an_answer(
    extra: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contract: 0, 1 and 2 are answers, so wrong usage exits with 64."""
    monkeypatch.setattr(sys, "argv", ["compare", "--setting", "a", "--setting", "b", *extra])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == 64
    assert message in capsys.readouterr().err


def test_exit_code_is_the_verdict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """0 yes, 1 no, 2 undecided; 70 if a run fails; 0 without a claim."""
    path = tmp_path / "c.json"
    monkeypatch.setattr(compare, "check", lambda *given: None)
    monkeypatch.setattr(compare, "compare", lambda given: str(path.with_suffix(".md")))
    line = ["compare", "--setting", "a", "--setting", "b"]
    for verdict, code in (("reproduced", 0), ("not reproduced", 1), ("undecided", 2)):
        path.write_text(json.dumps({"verdicts": {"b": {"verdict": verdict}}}))
        monkeypatch.setattr(sys, "argv", [*line, "--claim", "non_inferiority", "--looks", "8", "12"])
        assert compare.main() == code
        monkeypatch.setattr(sys, "argv", line)
        assert compare.main() == 0

    for error in (StageFailedError("out of disk space"), OSError("no server")):

        def failing(given: Comparison, error: Exception = error) -> str:
            raise error

        monkeypatch.setattr(compare, "compare", failing)
        assert compare.main() == 70


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lr=3", "unknown key 'lr'"),
        ("++rl.loss.clip_hi=3", r"unknown key 'rl.loss.clip_hi'. Did you mean 'clip_high'"),
        ("rl.steps.more=3", "rl.steps"),
        ("rl.steps=[3", r"rl.steps=\[3: "),
    ],
)
def test_invalid_override_is_rejected(override: str, message: str) -> None:
    """Contract: the schema decides, so that keys absent from params.yaml can be set if they exist."""
    with pytest.raises(StageFailedError, match=message) as error:
        check_overrides(ROOT, [override])
    assert error.value.bad_parameters


@pytest.mark.slow
def test_keys_absent_from_params_yaml_can_be_set() -> None:
    check_overrides(ROOT, ["rl.algorithm=ppo", "rl.loss.clip_high=0.3", "++rl.loss.clip_low=0.1", "++sft.warmup=0.2"])


def test_values_are_checked_by_the_checkouts_code(checkout: Path) -> None:
    (checkout / "stages").mkdir()
    (checkout / "stages" / "params.py").write_text("import sys; sys.exit('params.yaml: no such algorithm')")
    with pytest.raises(StageFailedError, match=r"params\.yaml: no such algorithm"):
        check_overrides(checkout, ["rl.algorithm=nothing"])
    (checkout / "stages" / "params.py").write_text(
        "import sys, yaml; assert yaml.safe_load(open(sys.argv[2]))['rl'] == {'algorithm': 'a', 'seed': [1, None], 'steps': 3}"
    )
    check_overrides(checkout, ["rl.algorithm=a", "rl.seed=[1,null]"])


def test_untracked_module_is_rejected(checkout: Path) -> None:
    """DVC would run a copy without it, and fail when it is imported."""
    for name in ("notes.txt", "parts/b.log", "reports/design/a.json"):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text("")
    check_files(checkout)
    (checkout / "parts" / "b.py").write_text("")
    with pytest.raises(StageFailedError, match=r"parts/b\.py is untracked: git add parts/b\.py, and commit"):
        compare.check(settings("rl.steps=1", "rl.steps=2"), checkout)
    git(checkout, "add", ".")
    check_files(checkout)


def test_unreadable_params_file_is_rejected(checkout: Path) -> None:
    for content in (b"\xff", b"a: [", b"- 1"):
        (checkout / "params.yaml").write_bytes(content)
        with pytest.raises(StageFailedError, match=r"params\.yaml"):
            compare.check(settings("rl.steps=1", "rl.steps=2"), checkout)


def write_run_info(root: Path, name: str, folder: Path) -> Path:
    path = root / RUN_INFOS / f"rev-{name}" / f"rev-{name}.run"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"name": name, "root_dir": str(folder.absolute())}))
    return path


def test_only_folders_of_killed_runs_are_removed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, theirs, killed, nameless = (checkout / RUN_FOLDERS / f"tmp{name}" for name in ("before", "theirs", "killed", "new"))
    for folder in (before, theirs, killed):
        folder.mkdir(parents=True)
    kept, gone = write_run_info(checkout, "theirs", theirs), write_run_info(checkout, "killed", killed)
    outside = write_run_info(checkout, "outside", checkout)
    remove_leftovers(checkout, "killed")
    remove_leftovers(checkout, "outside")
    assert run_folders(checkout) == {before, theirs}
    assert kept.exists()
    assert not gone.exists()
    assert not outside.exists()
    assert (checkout / "params.yaml").exists(), "files outside DVC's folder are kept"

    def ended() -> None:
        with clean_up_on_error(checkout, ChildProcesses()):
            nameless.mkdir(exist_ok=True)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(experiments, "other_experiments_run", lambda root: True)
        with pytest.raises(KeyboardInterrupt):
            ended()
        assert nameless.exists(), "another experiment may use it"
    shutil.rmtree(nameless)
    with pytest.raises(KeyboardInterrupt):
        ended()
    assert run_folders(checkout) == {before, theirs}


COMPARE = """
import pathlib, sys
import flows.compare as compare
compare.ROOT = pathlib.Path.cwd()
sys.argv += "--setting one rl.steps=1 --setting two rl.steps=2 --seeds 0 1 --jobs 1".split()
sys.exit(compare.main())
"""
WITHOUT_PREFECT = """
import pathlib, signal, sys
from concurrent.futures import ThreadPoolExecutor
from flows.experiments import clean_up_on_error, run_experiment
from flows.process import ChildProcesses

def on_sigterm(number, frame):
    raise SystemExit(number)

signal.signal(signal.SIGTERM, on_sigterm)
root, children = pathlib.Path.cwd(), ChildProcesses()
with ThreadPoolExecutor() as pool, clean_up_on_error(root, children):
    pool.submit(run_experiment, root, "one", ["rl.steps=1"], lambda line: print(line, flush=True), children).result()
"""
SLOW_TOO = pytest.mark.slow  # with all cores busy, Prefect's server takes half a minute to start


@pytest.mark.parametrize(("script", "code"), [(WITHOUT_PREFECT, 15), pytest.param(COMPARE, -15, marks=SLOW_TOO)])
def test_sigterm_ends_all_processes_and_removes_run_folders(checkout: Path, tmp_path: Path, script: str, code: int) -> None:
    """Contract: it ends within ten seconds, even if a stage ignores SIGTERM, and .dvc/tmp holds no copy."""
    assert experiments.GRACE_S < experiments.TIMEOUT_S < 10
    subprocess.run([sys.executable, "-m", "dvc", "init", "--quiet"], cwd=checkout, check=True)
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "dvc")
    started, log = tmp_path / "started", tmp_path / "log"
    environment = {**python_environment(), "PYTHONPATH": str(ROOT)}
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", script], cwd=checkout, env=environment, stdout=out, stderr=out)
    try:
        while not started.exists() or not started.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        stage, folder = started.read_text().split()
        assert Path(folder).exists()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == code, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert not psutil.pid_exists(int(stage))
    assert run_folders(checkout) == set()
    assert not list((checkout / RUN_INFOS).glob("*"))
    assert "caf\N{REPLACEMENT CHARACTER}" in log.read_text(), "a stage may print invalid UTF-8"


SLOW = """
stages:
  say:
    cmd: "printf 'caf\\\\351\\\\n'; echo done > out.txt"
    outs: [out.txt]
  wait:
    cmd: sleep 600
    always_changed: true
"""


def test_closed_output_of_one_item_ends_all(tmp_path: Path) -> None:
    """`python -m flows.lifecycle | head` does not keep running for as long as a silent stage."""
    (tmp_path / "dvc.yaml").write_text(SLOW)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=tmp_path, check=True)

    def closed(line: str) -> None:
        if "caf" in line:
            raise SystemExit(141)

    with pytest.raises(SystemExit):
        run_items({"say": [], "wait": []}, tmp_path, {}, closed, jobs=2)


def test_invalid_utf8_output_does_not_stop_a_flow(tmp_path: Path) -> None:
    (tmp_path / "dvc.yaml").write_text(SLOW)
    subprocess.run([sys.executable, "-m", "dvc", "init", "--no-scm", "--quiet"], cwd=tmp_path, check=True)
    lines: list[str] = []
    assert run_items({"say": []}, tmp_path, {}, lines.append)["say"].ran == ("say",)
    assert "caf\N{REPLACEMENT CHARACTER}" in lines
