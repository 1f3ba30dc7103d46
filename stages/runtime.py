"""What every stage is started by: parameters, threads, progress, tracking, errors that tell what to do.

A stage is `def run(context: StageContext) -> None`; its module ends with `raise SystemExit(stage_run("name", run))`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.command import OutputClosed, command
from stages.costs import measured
from stages.files import locked
from stages.lineage import identity, input_hashes, output_hashes, stage_entry
from stages.parameters.across import check_launch
from stages.params import Params, check_architecture, load_params
from stages.parent import die_with_parent
from stages.progress import FOLDER as PROGRESS
from stages.progress import Progress, progress
from stages.shards import BESIDE, Shard, run_shards
from stages.tracking import Tracker, open_tracker
from stages.validation import ParamsError
from stages.workers import quiet_environment

FAILED, BAD_PARAMETERS = 1, 2
"""Exit codes: something outside the stage failed (a full disk, a lost device), and trying again, which goes on from the last
checkpoint, may help; parameters or input are wrong, or ask for what this machine lacks, and it cannot. An exception nobody
foresaw counts as the first."""


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


def user_folder() -> Path:
    """The folder of this user for what all checkouts on this machine share; made if need be, for the user alone.

    Raises PermissionError, saying what to do, where the name is taken by something that others may write to or read.
    """
    folder = Path(tempfile.gettempdir()) / f"bellwether-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()  # a link that somebody else has put there is not followed
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder of yours alone (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}), so its locks "
            f"can't be trusted; remove it, or set TMPDIR to a folder of your own"
        )
    return folder


@contextmanager
def own_gpu(device: str, title: str) -> Iterator[None]:
    """Hold the GPU that `device` (`cuda`, `cuda:1`) is on this machine, against other stages of this user, in whatever checkout
    and however started. While another holds it, wait, after saying so. Of a launcher's processes (LOCAL_RANK) the first holds it
    for all."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    number = int(device.partition(":")[2] or 0)
    name = visible[number] if number < len(visible) else str(number)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    path = user_folder() / f"gpu-{name.replace('/', '_')}.lock"
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


def share_machine(params: Params, beside: int) -> Params:
    """Parameters of one of `beside` processes that share this machine's threads and workers."""
    own = {name: max(1, getattr(params.resources, name) // beside) for name in ("threads", "workers")}
    return params.model_copy(update={"resources": params.resources.model_copy(update=own)})


LAUNCHED = "LOCAL_RANK"
"""In the environment of the processes that `accelerate launch` starts."""


def launch(root: Path, name: str, config: str) -> None:
    """Start this stage again under `accelerate launch`, in place of this process."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(root / config)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", f"stages.{name}", *sys.argv[1:]])


@command
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
            check_launch(params, root)
            launch(root, name, params.resources.launch)
    except ParamsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_PARAMETERS
    if shard or (launched and LAUNCHED in os.environ):
        params = share_machine(params, int(os.environ.get(BESIDE, "1")))
    quiet_environment(params.resources.threads, not params.model.path.startswith("hub:"))
    try:
        check_architecture(params, root)
    except ParamsError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return BAD_PARAMETERS
    main = not launched or os.environ.get("RANK", "0") == "0"
    tracker = open_tracker(root, name, domain, params) if main and not shard else Tracker()
    context = StageContext(name, domain, params, root, tracker, main, shard)
    status = "FAILED"
    try:
        hashes = input_hashes(root, name, domain)
        with ExitStack() as around:
            # A share's GPU is held by the run that it is a share of.
            if not shard and uses_gpu(root, name, params):
                around.enter_context(own_gpu(params.resources.device, context.title))
            if main and not shard:
                tracker.inputs(hashes)
                around.enter_context(measured(root, context.title, identity(hashes)))
            if sharded and not shard and params.resources.shards.count > 1:
                run_shards(root, name, domain, params.resources.shards)
            run(context)
        if main and not shard:
            tracker.outputs(output_hashes(root, name, domain))
        status = "FINISHED"
        return 0
    except (ParamsError, ValueError, FileNotFoundError, OSError) as error:
        if os.environ.get("BELLWETHER_DEBUG"):
            raise
        print(f"{context.title}: {error}\n(BELLWETHER_DEBUG=1 shows where this came from)", file=sys.stderr)
        return FAILED if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else BAD_PARAMETERS
    except OutputClosed:
        status = "KILLED"
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        return 130
    finally:
        tracker.close(status)
