"""What every stage is started by: parameters, threads, progress, tracking, errors that tell what to do.

A stage is `def run(context: StageContext) -> None`; its module ends with `raise SystemExit(stage_run("name", run))`.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stages.costs import measured
from stages.params import Params, load_params
from stages.progress import FOLDER as PROGRESS
from stages.progress import Progress, progress
from stages.shards import BESIDE, Shard, run_shards
from stages.tracking import Tracker, open_tracker
from stages.tracking.spool import locked
from stages.validation import ParamsError

FAILED, BAD_PARAMETERS = 1, 2
"""Exit codes: something outside the stage failed (a full disk, a lost device), and trying again, which goes on from the last
checkpoint, may help; parameters or input are wrong, and it cannot. An exception nobody foresaw counts as the first."""


@dataclass
class StageContext:
    """What a stage gets. All paths it writes are below `data` and `reports`, under its own name."""

    name: str
    domain: str | None
    params: Params
    root: Path
    tracker: Tracker
    main: bool = True
    """Whether this process writes outputs, checkpoints and metrics: the first of those that `accelerate launch` started."""
    shard: Shard | None = None
    """The share of the stage's chunks to leave as checkpoints, where it is not the whole stage that runs."""

    @property
    def title(self) -> str:
        """The stage as DVC calls it, e.g. `rl@search`."""
        return f"{self.name}@{self.domain}" if self.domain else self.name

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def reports(self) -> Path:
        return self.root / "reports"

    def section(self, name: str) -> Any:
        """A section of params.yaml with this stage's domain's overrides in it."""
        return self.params.section(name, self.domain) if self.domain else getattr(self.params, name)

    @contextmanager
    def progress(self, label: str, total: int, unit: str = "step") -> Iterator[Progress]:
        # The shards' files would be one.
        file = self.root / PROGRESS / f"{self.title}.json" if self.main and not self.shard else None
        with progress(f"{self.title}: {label}", total, unit, file, self.main) as bar:
            yield bar

    def log_params(self, values: dict[str, Any]) -> None:
        self.tracker.params(values)

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.tracker.metric(name, value, step)

    def artifact(self, path: Path) -> None:
        self.tracker.artifact(path)


@contextmanager
def own_gpu(device: str, title: str) -> Iterator[None]:
    """Hold the GPU that `device` (`cuda`, `cuda:1`) is on this machine, against other stages of this user, in whatever checkout
    and however started. While another holds it, wait, after saying so. Of a launcher's processes (LOCAL_RANK) the first holds it
    for all."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = int(device.partition(":")[2] or 0)
    name = visible[number] if number < len(visible) else str(number)
    path = Path(tempfile.gettempdir()) / f"bellwether-{os.getuid()}-gpu-{name.replace('/', '_')}.lock"
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    with locked(path, wait=False) as mine:
        if mine:
            yield
            return
    print(f"{title}: GPU {name} is in use by another stage; waiting until it is free ({path})", flush=True)
    with locked(path, wait=True):
        yield


def uses_gpu(root: Path, name: str, params: Params) -> bool:
    """Whether the stage computes on a GPU: params.yaml names one, and dvc.yaml lists resources.device for the stage."""
    return params.resources.device.startswith("cuda") and "resources.device" in stage_entry(root, name, None).get("params", [])


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent goes (Linux), so that a killed `dvc repro` leaves no stage behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)


def quiet_environment(threads: int, local_model: bool = True) -> None:
    """Thread counts and offline switches; must come before torch or transformers are imported."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads cost six times the CPU where cores are shared
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if local_model:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


def stage_entry(root: Path, name: str, domain: str | None) -> dict[str, Any]:
    """This stage's entry in dvc.yaml with `${item.domain}` filled in; {} where there is none (a stage run by hand)."""
    path = root / "dvc.yaml"
    if not path.exists():
        return {}
    entry = yaml.safe_load(path.read_text(encoding="utf-8")).get("stages", {}).get(name, {})

    def fill(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("${item.domain}", domain or "")
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            return {fill(key): fill(item) for key, item in value.items()}
        return value

    return fill(entry)


def hash_path(path: Path) -> str:
    """16 hex digits over a file's bytes, or over the sorted names and bytes of all files below a folder."""
    digest = hashlib.sha256()
    files = sorted(item for item in path.rglob("*") if item.is_file()) if path.is_dir() else [path]
    for item in files:
        if "__pycache__" in item.parts:
            continue
        digest.update(str(item.relative_to(path)).encode() + b"\0")
        with item.open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()[:16]


def input_hashes(root: Path, name: str, domain: str | None) -> dict[str, str]:
    """Hash of every dependency that dvc.yaml lists for the stage and of its parameters; the stage's identity for resuming."""
    entry = stage_entry(root, name, domain)
    hashes = {dep: hash_path(root / dep) for dep in entry.get("deps", []) if (root / dep).exists()}
    values = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    for key in entry.get("params", []):
        if isinstance(key, dict):  # a whole file
            hashes.update({f"params:{file}": hash_path(root / file) for file in key})
            continue
        node: Any = values
        for part in key.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        hashes[f"params:{key}"] = hashlib.sha256(repr(node).encode()).hexdigest()[:16]
    return hashes


def identity(hashes: dict[str, str]) -> str:
    """16 hex digits over `input_hashes`: what a stage was run on."""
    return hashlib.sha256(repr(sorted(hashes.items())).encode()).hexdigest()[:16]


def output_hashes(root: Path, name: str, domain: str | None) -> dict[str, str]:
    """Hash of every output the stage has written."""
    outputs: list[str] = []
    entry = stage_entry(root, name, domain)
    for kind in ("outs", "metrics", "plots"):
        for item in entry.get(kind, []):
            outputs.extend([item] if isinstance(item, str) else item.keys())
    return {out: hash_path(root / out) for out in outputs if (root / out).exists()}


def share_machine(params: Params, beside: int) -> Params:
    """Parameters of one of `beside` processes that share this machine's threads and workers."""
    own = {name: max(1, getattr(params.resources, name) // beside) for name in ("threads", "workers")}
    return params.model_copy(update={"resources": params.resources.model_copy(update=own)})


LAUNCHED = "LOCAL_RANK"
"""In the environment of the processes that `accelerate launch` starts."""


def launch(root: Path, name: str, config: str) -> None:
    """Start this stage again under `accelerate launch`, in place of this process. Raises ParamsError without the file."""
    if not (root / config).is_file():
        raise ParamsError(
            f"params.yaml: resources.launch: {config} does not exist; name a file of `accelerate config`, such as "
            "profiles/accelerate/ddp.yaml, or null for one process"
        )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(root / config)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", f"stages.{name}", *sys.argv[1:]])


def stage_run(
    name: str, run: Callable[[StageContext], None], per_domain: bool = False, *, launched: bool = False, sharded: bool = False
) -> int:
    """Run one stage from the command line; returns the exit code (0 done; FAILED; BAD_PARAMETERS).

    launched: the stage trains, and starts under `accelerate launch` if resources.launch says so; sharded: it can be divided
    (--shard, resources.shards).
    """
    parser = argparse.ArgumentParser(prog=f"python -m stages.{name}", description=(sys.modules["__main__"].__doc__ or "").strip())
    if per_domain:
        parser.add_argument("--domain", required=True, help="one of `domains` in params.yaml")
    if sharded:
        parser.add_argument("--shard", metavar="I/N", help="do the I-th of N shares alone and leave it for the whole stage's run")
    options = parser.parse_args()
    domain: str | None = getattr(options, "domain", None)
    die_with_parent()
    root = Path.cwd()
    try:
        params = load_params(root / "params.yaml")
        if domain is not None and domain not in params.domains:
            raise ParamsError(f"--domain {domain} is not among `domains` in params.yaml: {', '.join(params.domains)}")
        shard = Shard.parse(options.shard) if sharded and options.shard else None
        if launched and params.resources.launch and LAUNCHED not in os.environ:
            launch(root, name, params.resources.launch)
    except ParamsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_PARAMETERS
    if shard or (launched and LAUNCHED in os.environ):
        params = share_machine(params, int(os.environ.get(BESIDE, "1")))
    quiet_environment(params.resources.threads, not params.model.path.startswith("hub:"))
    main = not launched or os.environ.get("RANK", "0") == "0"
    tracker = open_tracker(root, name, domain, params) if main and not shard else Tracker()
    context = StageContext(name, domain, params, root, tracker, main, shard)
    status = "FAILED"
    try:
        hashes = input_hashes(root, name, domain)
        tracker.inputs(hashes)
        whole = main and not shard
        alone = own_gpu(params.resources.device, context.title) if uses_gpu(root, name, params) else nullcontext()
        with measured(root, context.title, identity(hashes)) if whole else nullcontext():
            if sharded and whole and params.resources.shards.count > 1:
                run_shards(root, name, domain, params.resources.shards)
            with alone:
                run(context)
        if whole:
            tracker.outputs(output_hashes(root, name, domain))
        status = "FINISHED"
        return 0
    except (ParamsError, ValueError, FileNotFoundError, OSError) as error:
        if os.environ.get("BELLWETHER_DEBUG"):
            raise
        print(f"{context.title}: {error}\n(BELLWETHER_DEBUG=1 shows where this came from)", file=sys.stderr)
        return FAILED if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else BAD_PARAMETERS
    except KeyboardInterrupt:
        status = "KILLED"
        return 130
    finally:
        tracker.close(status)
