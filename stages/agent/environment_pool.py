"""Environments in this process or, while a GPU generates, in worker processes that step them in parallel.

On a CPU the workers share the episodes themselves (stages.runtime.team), each with its engine and environments.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from stages.environments.protocol import Environment, Most, Observation, Step, allow_conversations, tell_logprobs
from stages.records.task import Task
from stages.runtime.parent import die_with_parent
from stages.runtime.resources import Resources
from stages.runtime.spans import span


def processes_beside(resources: Resources) -> int:
    """Processes that hold the environments: resources.workers while a GPU generates, 0 on a CPU."""
    return 0 if resources.device == "cpu" else resources.workers


def result_of(future: Future) -> Any:
    """What a call in the environments' thread returned; waits for it."""
    with span("environment"):
        return future.result()


class EnvironmentPool:
    """Reuses environments: starting one may cost far more than resetting it.

    processes: where above 0, the environments live in so many processes, and as many calls run at a time; `make` must then be
    picklable.
    """

    def __init__(self, make: Callable[[], Environment], processes: int = 0) -> None:
        self._processes = [_EnvironmentProcess(make) for _ in range(processes)]
        self._make = make
        self.parallel = max(1, processes)
        self._all: list[Environment] = []
        self._free: list[Environment] = []

    def take(self) -> Environment:
        if not self._free:
            held = len(self._all)
            make = self._processes[held % len(self._processes)].environment if self._processes else self._make
            self._free.append(make())
            self._all.append(self._free[-1])
        return self._free.pop()

    def give_back(self, environment: Environment) -> None:
        self._free.append(environment)

    def close(self) -> None:
        for environment in self._all:
            environment.close()
        for process in self._processes:
            process.close()
        self._all, self._free, self._processes = [], [], []

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _EnvironmentProcess:
    """A process that holds environments. Calls from several threads take turns."""

    def __init__(self, make: Callable[[], Environment]) -> None:
        self._lock, self._count = Lock(), 0
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that threads of this process hold
        self._link, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, make), daemon=True)
        self._process.start()
        far.close()

    def environment(self) -> Environment:
        self._count += 1
        return _RemoteEnvironment(self, self._count)

    def call(self, number: int, method: str, *arguments: Any) -> Any:
        """What the method of environment `number` returns; what it raises is raised here. Raises OSError if the process has
        ended."""
        try:
            with self._lock:
                self._link.send((number, method, arguments))
                result, error = self._link.recv()
        except (EOFError, ConnectionError) as ended:
            self._process.join(1)
            raise OSError(f"a process of environments has ended (exit code {self._process.exitcode})") from ended
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        self._link.close()
        self._process.join()


def _serve(link: Connection, make: Callable[[], Environment]) -> None:
    """Answer calls until the other end is closed."""
    die_with_parent()
    environments: dict[int, Environment] = {}
    while True:
        try:
            number, method, arguments = link.recv()
        except EOFError:
            return
        try:
            if number not in environments:
                environments[number] = make()
            answer: tuple[Any, Exception | None] = _called(environments[number], method, arguments), None
        except Exception as error:
            answer = None, error
        link.send(answer)


def _called(environment: Environment, method: str, arguments: Any) -> Any:
    """`drawn` and `conversations` are methods that few environments have."""
    told = {"drawn": tell_logprobs, "conversations": allow_conversations}
    return told[method](environment, *arguments) if method in told else getattr(environment, method)(*arguments)


class _RemoteEnvironment:
    """An environment of another process. Its snapshots are pickled, and can be restored in any process."""

    def __init__(self, process: _EnvironmentProcess, number: int) -> None:
        self._process, self._number = process, number

    def reset(self, task: Task) -> Observation:
        return self._process.call(self._number, "reset", task)

    def step(self, action: str) -> Step:
        return self._process.call(self._number, "step", action)

    def drawn(self, logprobs: Sequence[float]) -> None:
        self._process.call(self._number, "drawn", logprobs)

    def conversations(self, most: Most) -> None:
        self._process.call(self._number, "conversations", most)

    def snapshot(self) -> Any:
        return self._process.call(self._number, "snapshot")

    def restore(self, state: Any) -> None:
        self._process.call(self._number, "restore", state)

    def state_key(self) -> str:
        return self._process.call(self._number, "state_key")

    def admissible(self) -> Sequence[str]:
        return self._process.call(self._number, "admissible")

    def close(self) -> None:
        self._process.call(self._number, "close")
