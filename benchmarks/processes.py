"""A side of a comparison in processes of its own.

Ours has `resources.workers` processes with one thread each, forks that form a team (stages.runtime.team), as in the stages. The
other side has as many threads in one process, or as many processes as `accelerate launch` would start. The scenario's own
process computes nothing, so it has no threads when it forks.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from benchmarks.measure import Options, Side
from screenshots.servers import HOST, free_port
from stages.runtime.parent import die_with_parent
from stages.runtime.team import Team, started
from stages.runtime.workers import quiet_environment

Build = Callable[[Team], Side]
"""Makes the side's part in each of its processes."""
Item = TypeVar("Item")
END = b"end"
Answer = tuple[bool, Any]
"""Whether it worked; the value, or the error's text."""


@dataclass(frozen=True)
class Layout:
    """Number of processes, threads of each, and whether torch.distributed (gloo) connects them."""

    processes: int
    threads: int
    distributed: bool = False

    def __str__(self) -> str:
        return f"{self.processes} x {self.threads} thread{'s' * (self.threads > 1)}"


def own_layout(options: Options) -> Layout:
    """As the stages use the machine."""
    return Layout(options.workers, options.threads)


def candidates(builds: Sequence[Build], options: Options, distributed: bool = True) -> list[Callable[[], Side]]:
    """For `measure.fastest`: each setting of the other side on the same cores, as threads and as processes."""
    cores = options.cores
    layouts = [Layout(1, cores)] + ([Layout(cores, 1, distributed)] if cores > 1 else [])
    return [partial(apart, build, layout) for layout in layouts for build in builds]


class SideProcesses:
    """The processes of one side, which build it and then carry out what this process asks for."""

    def __init__(self, build: Build, layout: Layout) -> None:
        """Raises RuntimeError if the side cannot be built."""
        self._pipe, far = Pipe()
        sys.stdout.flush()
        self._leader = os.fork()
        if not self._leader:
            self._pipe.close()
            _lead(build, layout, far)
        far.close()
        self.label = self._receive()[0]

    def call(self, name: str) -> list[Any]:
        """What the sides' function `name` returns in each process. Raises RuntimeError if it fails in one."""
        self._pipe.send_bytes(name.encode())
        return self._receive()

    def _receive(self) -> list[Any]:
        try:
            answers: list[Answer] = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            raise RuntimeError("a process of the benchmark ended early; its message is above") from error
        if errors := [str(value) for worked, value in answers if not worked]:
            raise RuntimeError(errors[0])
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        self._pipe.send_bytes(END)  # sides that were forked later hold this end of the pipe, too
        self._pipe.close()
        os.waitpid(self._leader, 0)


def apart(build: Build, layout: Layout) -> Side:
    """The side in processes of its own. Each run's amount is the sum over the processes, which `run` in parallel."""
    processes = SideProcesses(build, layout)
    return Side(
        f"{processes.label}, {layout}",
        run=lambda: sum(processes.call("run")),
        before=lambda: processes.call("before") and None,
        facts=lambda: processes.call("facts"),
        cpu=lambda: sum(processes.call("cpu")),
        close=processes.close,
    )


def _lead(build: Build, layout: Layout, pipe: Connection) -> None:
    """The first process of a side: start the others; never returns."""
    code = 1
    try:
        die_with_parent()
        quiet_environment(layout.threads)
        port = free_port()
        with started(layout.processes) as team:
            _connect(team, layout, port)
            _serve(team, build, pipe if team.index == 0 else None)
        code = 0
    except (OSError, EOFError):
        pass  # the scenario's process, or another one of the side, has ended
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _connect(team: Team, layout: Layout, port: int) -> None:
    """Threads, and the environment variables that `accelerate launch --cpu` sets."""
    import torch

    torch.set_num_threads(layout.threads)
    if layout.distributed:
        numbers = {"RANK": team.index, "LOCAL_RANK": team.index, "WORLD_SIZE": team.count, "LOCAL_WORLD_SIZE": team.count}
        os.environ.update({name: str(value) for name, value in numbers.items()})
        os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")


def _serve(team: Team, build: Build, pipe: Connection | None) -> None:
    """Build the side and answer requests until the scenario's process ends it."""
    made: list[Side] = []

    def made_label() -> str:
        made.append(build(team))
        return made[0].label

    _answer(team, made_label, pipe)
    while (name := team.gather(_next(pipe) if pipe else None)[0]) is not None:
        _answer(team, lambda: getattr(made[0], name)(), pipe)


def _next(pipe: Connection) -> str | None:
    request = pipe.recv_bytes()
    return None if request == END else request.decode()


def _answer(team: Team, function: Callable[[], Any], pipe: Connection | None) -> None:
    answer: Answer
    try:
        answer = True, function()
    except Exception as error:
        answer = False, f"{type(error).__name__}: {error}"
    answers = team.gather(answer)
    if pipe:  # plain pickle: torch would send handles of tensors instead of their values
        pipe.send_bytes(pickle.dumps(answers))


def share(items: Sequence[Item], team: Team) -> list[Item]:
    """This process's share: every n-th item, as the stages divide work."""
    return list(items[team.index :: team.count])


def consecutive(items: Sequence[Item], team: Team) -> list[Item]:
    """This process's share of a batch as accelerate divides it: consecutive items."""
    return list(items[len(items) * team.index // team.count : len(items) * (team.index + 1) // team.count])


ALONE = Team(0, 1, [], -1, -1, [])
"""This process alone."""
