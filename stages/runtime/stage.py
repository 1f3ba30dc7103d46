"""Runs every stage: parameters, threads, progress, tracking, and errors with their remedies.

A stage is `def run(context: StageContext) -> None`; its module ends with
`raise SystemExit(stage_run("name", run, params, open_tracker))`.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from stages.runtime import spans
from stages.runtime.command import OUTPUT_CLOSED, OutputClosed, command
from stages.runtime.costs import measured, read_cost, uptime
from stages.runtime.gpu import own_gpu, uses_gpu
from stages.runtime.lineage import TRANSFER, identity, input_hashes, output_hashes
from stages.runtime.live import StoppedError
from stages.runtime.parent import die_with_parent
from stages.runtime.progress import FOLDER as PROGRESS
from stages.runtime.progress import Progress, progress
from stages.runtime.run_params import RunParams
from stages.runtime.shards import BESIDE, Shard, run_shards
from stages.runtime.speed import speed
from stages.runtime.team import Team, TeamError, started
from stages.runtime.tracker import Tracker
from stages.runtime.validation import ParamsError
from stages.runtime.workers import quiet_environment

FAILED, BAD_PARAMETERS, STOPPED = 1, 2, 3
"""Exit codes. FAILED: something outside the stage failed (a full disk, a lost device) or an unexpected exception occurred; a
retry, which resumes from the last checkpoint, may help. BAD_PARAMETERS: parameters or input are invalid, or need what this
machine lacks; a retry can't help. STOPPED: someone asked the stage to stop after a step (stages.runtime.live)."""
Chunk = TypeVar("Chunk")


@dataclass
class StageContext:
    """A stage's inputs and services. A stage writes only below `data` and `reports`, under its own name."""

    name: str
    domain: str | None
    params: RunParams
    root: Path
    tracker: Tracker
    main: bool = True
    """Whether this process writes outputs, checkpoints and metrics: the first of those that `accelerate launch` started."""
    team: Team | None = None
    """The processes that share the work of a stage on the CPU, where there are several."""
    shard: Shard | None = None
    """The share of the stage's chunks to compute and save as checkpoints; None for the complete stage."""
    edited: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the code and parameters that the stage started with, whatever the files hold by now."""
    collects: bool = False
    """Whether this run's shards or forks have computed all chunks, so that no earlier run's checkpoints are left to read."""

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
        """A section of params.yaml with the overrides of this stage's domain."""
        return self.params.section(name, self.domain) if self.domain else getattr(self.params, name)

    @contextmanager
    def progress(self, label: str, total: int, unit: str = "step") -> Iterator[Progress]:
        # Shards would overwrite each other's file.
        file = self.root / PROGRESS / f"{self.title}.json" if self.main and not self.shard else None
        origin = "" if self.collects else "from a checkpoint"
        with progress(f"{self.title}: {label}", total, unit, file, self.main, origin) as bar:
            yield bar

    def share(self, chunks: Sequence[Chunk]) -> Iterator[Chunk]:
        """The chunks that this process computes: all, or those of its shard, or, among forks, each time the first that is left,
        so that none of them waits long for another."""
        if self.team:
            return self.team.take(chunks)
        return (chunk for number, chunk in enumerate(chunks) if not self.shard or self.shard.owns(number))

    def log_params(self, values: dict[str, Any]) -> None:
        self.tracker.params(values)

    def metric(self, name: str, value: float, step: int | None = None) -> None:
        self.tracker.metric(name, value, step)

    def artifact(self, path: Path) -> None:
        self.tracker.artifact(path)


def share_machine(params: RunParams, beside: int) -> RunParams:
    """Parameters of one of `beside` processes that share this machine's workers."""
    own = {"workers": max(1, params.resources.workers // beside)}
    return params.model_copy(update={"resources": params.resources.model_copy(update=own)})


LIBRARIES = ("pandas", "torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")
"""What every process of a team imports, in seconds: done once, before the forks. pyarrow imports pandas."""
LAUNCHED = "LOCAL_RANK"
"""Environment variable set in processes started by `accelerate launch`."""


def module_of(name: str) -> str:
    """The module that `python -m` runs, or `stages.<name>` where another program, such as a test, calls the stage."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name.removesuffix(".__main__") if spec else ""
    return module if module.startswith("stages.") else f"stages.{name}"


def launch(root: Path, name: str, config: str) -> None:
    """Start this stage again under `accelerate launch`, in place of this process."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(root / config)]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, "-m", module_of(name), *sys.argv[1:]])


class Settings(Protocol):
    """The functions of stages.params needed to start a stage; passed in, since that module imports every part's settings."""

    def load_params(self, path: Path) -> RunParams: ...

    def check_launch(self, params: Any, root: Path) -> None: ...

    def check_architecture(self, params: Any, root: Path) -> None: ...


OpenTracker = Callable[[Path, str, "str | None", Any], Tracker]
"""stages.tracking.open_tracker: root, stage, domain, params."""


@dataclass(frozen=True)
class Kind:
    """per_domain: the stage takes --domain; launched: it trains, and starts under `accelerate launch` if resources.launch says
    so; sharded: it can be divided (--shard, resources.shards); forked: resources.workers divide it on a CPU; a
    function: where it returns True; prune: removes unlisted domains from its inputs (stages.runtime.unlisted_domains)."""

    per_domain: bool = False
    launched: bool = False
    sharded: bool = False
    forked: bool | Callable[[StageContext], bool] = False
    prune: Callable[[StageContext], object] | None = None

    def divides(self, context: StageContext) -> bool:
        """Whether forks share the work."""
        resources = context.params.resources
        if context.shard or resources.device != "cpu" or resources.workers < 2:
            return False
        return self.forked(context) if callable(self.forked) else self.forked


def _options(name: str, kind: Kind) -> tuple[str | None, str | None]:
    """The command line's --domain and --shard."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module_of(name)}",
        description=(sys.modules["__main__"].__doc__ or "").strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if kind.per_domain:
        listed = "evaluate.transfer" if name == TRANSFER else "domains"
        parser.add_argument("--domain", required=True, help=f"one of `{listed}` in params.yaml")
    if kind.sharded:
        parser.add_argument("--shard", metavar="I/N", help="compute only the I-th of N shares, for a later run of the stage")
    options = parser.parse_args()
    return getattr(options, "domain", None), getattr(options, "shard", None)


def _prepare(name: str, kind: Kind, settings: Settings, open_tracker: OpenTracker, around: ExitStack) -> StageContext:
    """Check the parameters and prepare this process, or its team of processes, which ends with `around`. Raises ParamsError."""
    domain, share = _options(name, kind)
    die_with_parent()
    atexit.register(gc.freeze)  # what is left ends with the process: looking for garbage in it takes a second
    root = Path.cwd()
    params = settings.load_params(root / "params.yaml")
    if name == TRANSFER and domain not in params.evaluate.transfer:
        raise ParamsError(f"--domain {domain} is not among `evaluate.transfer` in params.yaml")
    if name != TRANSFER and domain is not None and domain not in params.domains:
        raise ParamsError(f"--domain {domain} is not among `domains` in params.yaml: {', '.join(params.domains)}")
    shard = Shard.parse(share) if share else None
    if kind.launched and params.resources.launch and LAUNCHED not in os.environ:
        settings.check_launch(params, root)
        launch(root, name, params.resources.launch)
    edited = input_hashes(root, name, domain, only_edited=True)
    if shard or (kind.launched and LAUNCHED in os.environ):
        params = share_machine(params, int(os.environ.get(BESIDE, "1")))
    quiet_environment(params.resources.threads, not params.model.path.startswith("hub:"))
    settings.check_architecture(params, root)
    resources, team = params.resources, None
    if kind.launched and LAUNCHED not in os.environ and resources.device == "cpu" and resources.workers > 1:
        team = around.enter_context(started(resources.workers, LIBRARIES))
    main = team.index == 0 if team else not kind.launched or os.environ.get("RANK", "0") == "0"
    tracker = open_tracker(root, name, domain, params) if main and not shard else Tracker()
    return StageContext(name, domain, params, root, tracker, main, team, shard, edited)


class EditedError(Exception):
    """Code or parameters changed while the stage ran."""


def _refuse_edits(context: StageContext) -> None:
    """Raise EditedError if the stage's code or parameters are not those it started with. DVC reads them when the stage has ended,
    so it would record the outputs as made from the new ones and not make them again."""
    now = input_hashes(context.root, context.name, context.domain, only_edited=True)
    changed = sorted(key for key in {*now, *context.edited} if now.get(key) != context.edited.get(key))
    if changed:
        named = ", ".join(key.removeprefix("params:") for key in changed)
        raise EditedError(
            f"edited in params.yaml or the code while the stage ran: {named}. Its results are from before the edit, so DVC must "
            f"not record them: run the stage again"
        )


def _run(context: StageContext, run: Callable[[StageContext], None], kind: Kind) -> None:
    """Run the stage's shards, if any, then the stage, with its GPU locked, its cost measured, and inputs and outputs tracked."""
    root, name, domain, params = context.root, context.name, context.domain, context.params
    whole = context.main and not context.shard
    if whole and kind.prune:
        kind.prune(context)  # before inputs are hashed: shards and forks find their checkpoints by the same hash as this process
    hashes = {**input_hashes(root, name, domain), **context.edited}
    waited = 0.0
    with ExitStack() as around:
        # The GPU of a shard is locked by the stage that started it.
        if not context.shard and uses_gpu(root, name, params):
            waited = around.enter_context(own_gpu(params.resources.device, context.title))
        if whole:
            context.tracker.inputs(hashes)
            around.enter_context(measured(root, context.title, identity(hashes), uptime() - waited))
        if kind.sharded and not context.shard and params.resources.shards.count > 1:
            run_shards(root, name, domain, params.resources.shards)
            context = replace(context, collects=True)
        elif kind.divides(context):
            _run_in_forks(context, run)
            context = replace(context, collects=True)
        run(context)
        if context.team:
            _add_spans(context.team)
        if whole:
            _refuse_edits(context)
    if whole:
        cost = read_cost(root, context.title)
        for figure, value in speed(cost).items() if cost else ():
            context.metric(f"speed/{figure}", value)
        context.tracker.outputs(output_hashes(root, name, domain))


def _add_spans(team: Team) -> None:
    """Add the other processes' times and counts to those of the first, which measures the stage."""
    team.wait()  # so that the totals hold the wait for the last one
    for index, found in enumerate(team.gather(spans.totals())):
        if index and not team.index:
            spans.add(found)


def _run_in_forks(context: StageContext, run: Callable[[StageContext], None]) -> None:
    """Compute all chunks as checkpoints, divided among resources.workers processes including this one."""
    count = context.params.resources.workers
    with started(count, LIBRARIES) as team:
        own = replace(context, tracker=Tracker(), team=team, shard=Shard(team.index + 1, count))

        def work() -> None:
            run(own)
            _add_spans(team)

        if team.index:
            _end_after(own, work)
        work()


def _end_after(own: StageContext, work: Callable[[], None]) -> NoReturn:
    """End a fork with the exit code of `work`. Its errors must not reach the caller, which closes the first process's tracker and
    writes the stage's cost."""
    code = FAILED
    try:
        code = _tracked(own, work)
    except OutputClosed:
        code = OUTPUT_CLOSED
    except Exception:
        traceback.print_exc()
    finally:
        _end(code)


@command
def stage_run(
    name: str,
    run: Callable[[StageContext], None],
    settings: Settings,
    open_tracker: OpenTracker,
    *,
    per_domain: bool = False,
    launched: bool = False,
    sharded: bool = False,
    forked: bool | Callable[[StageContext], bool] = False,
    prune: Callable[[StageContext], object] | None = None,
) -> int:
    """Run one stage from the command line; returns the exit code (0 done; FAILED; BAD_PARAMETERS). See Kind."""
    kind = Kind(per_domain, launched, sharded, forked, prune)
    with ExitStack() as around:
        try:
            context = _prepare(name, kind, settings, open_tracker, around)
        except ParamsError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return BAD_PARAMETERS
        code = _tracked(context, lambda: _run(context, run, kind))
        if context.team and context.team.index:
            _end(code)
    return code


def _end(code: int) -> NoReturn:
    """End a fork, which shares no exit handlers with the process that made it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _missing_input(context: StageContext, error: Exception) -> str | None:
    """What makes the missing file of an error that says no more than its path; None for other errors."""
    if not isinstance(error, FileNotFoundError):
        return None
    path = str(error.filename or error)  # pyarrow's message is the path
    made = any(folder in Path(path).parents for folder in (context.data, context.reports))
    shipped = any(context.data / name in Path(path).parents for name in ("base", "raw"))
    if " does not exist" in path or shipped or not made:
        return None
    return f"{path} does not exist; 'dvc repro {context.title}' first runs the stages that make it"


def _tracked(context: StageContext, work: Callable[[], None]) -> int:
    """Call `work`, reporting its status to the tracker; returns the exit code."""
    status = "FAILED"
    try:
        work()
        status = "FINISHED"
        return 0
    except (ParamsError, ValueError, FileNotFoundError, OSError) as error:
        if os.environ.get("BELLWETHER_DEBUG"):
            raise
        message = f"{context.title}: {_missing_input(context, error) or error}\n(BELLWETHER_DEBUG=1 shows where this came from)"
        context.team.say(message) if context.team else print(message, file=sys.stderr)
        if isinstance(error, TeamError) and error.code:
            return error.code  # so that the process in which a cause appears does not decide whether a retry may help
        return FAILED if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else BAD_PARAMETERS
    except EditedError as error:
        print(f"{context.title}: {error}", file=sys.stderr)
        return FAILED
    except StoppedError as error:
        status = "KILLED"
        if context.main:
            print(f"{context.title}: {error}", file=sys.stderr)
        return STOPPED
    except OutputClosed:
        status = "KILLED"
        raise
    except KeyboardInterrupt:
        status = "KILLED"
        return 130
    finally:
        context.tracker.close(status)
