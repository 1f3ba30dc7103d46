"""Processes of one training stage that share its work on the CPU, each with one thread.

They are forks of the stage's process, made before torch has computed anything and has threads. All run the same program on the
same data with the same weights, and divide among them the episodes of a step, a batch's log-probabilities and an update's
gradients. Gathered values have the same order for any number of processes, so that their number changes no bit of any output.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from stages.runtime.parent import die_with_parent
from stages.runtime.spans import span
from stages.runtime.workers import import_for_good

SHARED_MEMORY = Path("/dev/shm")
DIGEST = 32
"""Bytes of a message's hash."""
Item = TypeVar("Item")


class TeamError(OSError):
    """Another process of the stage has ended early. `code`: its exit code; 0 if this process did not start it, or a signal ended
    it."""

    def __init__(self, code: int = 0) -> None:
        super().__init__("a process of this stage has ended early; its message is above")
        self.code = code


class Team:
    """This process's view of `count` processes, of which it is number `index`. The first starts the others and ends last."""

    def __init__(self, index: int, count: int, links: list[Connection], memory: int, said: int, children: list[int]) -> None:
        self.index, self.count, self._said = index, count, said
        self._links, self._memory, self._children = links, memory, children
        self._size = 0

    @span("waiting")
    def gather(self, own: Any) -> list[Any]:
        """The values passed by all processes, in process order, in every process. All processes must make this call."""
        # Plain pickle: torch's reducers for multiprocessing would send handles of tensors instead of their values.
        message = pickle.dumps(own, pickle.HIGHEST_PROTOCOL)
        try:
            if self.index:
                self._links[0].send_bytes(message)
                messages = pickle.loads(self._links[0].recv_bytes())
            else:
                messages = [message, *(self._received(number) for number in range(len(self._links)))]
                together = pickle.dumps(messages, pickle.HIGHEST_PROTOCOL)
                for link in self._links:
                    link.send_bytes(together)
        except (EOFError, ConnectionError) as error:
            raise TeamError from error
        return [pickle.loads(item) for item in messages]

    def _received(self, number: int) -> bytes:
        """The message of this process's child `number`. Raises TeamError with its exit code if it has ended instead."""
        try:
            return self._links[number].recv_bytes()
        except (EOFError, ConnectionError) as error:
            _, status = os.waitpid(self._children.pop(number), 0)
            raise TeamError(max(os.waitstatus_to_exitcode(status), 0)) from error

    def say(self, message: str) -> None:
        """Print to stderr what ends this process, unless another one has just said the same."""
        digest = hashlib.blake2b(message.encode("utf-8", "replace"), digest_size=DIGEST).digest()
        with self._locked():  # the first process ends the others, but not while one of them prints
            if os.pread(self._said, DIGEST, 0) != digest:
                print(message, file=sys.stderr, flush=True)
            os.pwrite(self._said, digest, 0)

    def wait(self) -> None:
        """Wait until every process has made this call."""
        self.gather(None)

    def take(self, items: Sequence[Item]) -> Iterator[Item]:
        """The share of `items` that this process gets: whenever it asks, the first that no process has taken. All processes must
        make this call, with equal items and in the same order as calls of `shared`."""
        taken = self.shared(8)
        while True:
            with self._locked():
                number = int.from_bytes(taken[:8], "big")
                taken[:8] = (number + 1).to_bytes(8, "big")
            if number >= len(items):
                return
            yield items[number]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.lockf(self._memory, fcntl.LOCK_EX)  # a process that ends gives the lock back
        try:
            yield
        finally:
            fcntl.lockf(self._memory, fcntl.LOCK_UN)

    def shared(self, size: int) -> mmap.mmap:
        """`size` bytes of shared memory, initialised to zero. All processes must make these calls in the same order. Raises
        OSError if there is not so much."""
        start = self._size
        self._size += -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        try:
            with self._locked():
                if os.fstat(self._memory).st_size < self._size:  # else a faster process has done it, and may have written
                    if hasattr(os, "posix_fallocate"):  # else a full file system ends the process by SIGBUS, without a message
                        os.posix_fallocate(self._memory, start, self._size - start)
                    else:
                        os.ftruncate(self._memory, self._size)
        except OSError as error:
            raise OSError(
                error.errno,
                f"no room for {size / 1e6:.0f} MB of memory shared by the stage's processes ({error.strerror}): enlarge "
                f"{SHARED_MEMORY} (docker run --shm-size 2g), or set resources.workers to 1",
            ) from error
        return mmap.mmap(self._memory, size, offset=start)


@contextmanager
def started(count: int, libraries: Sequence[str] = ()) -> Iterator[Team]:
    """`count - 1` forks of this process; the block runs in all of them. A fork ends with the block.

    `libraries` are imported once, before the forks, which share their memory.
    """
    if libraries:
        import_for_good(libraries)
    folder = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryFile(dir=folder) as file, tempfile.TemporaryFile(dir=folder) as said:
        links: list[Connection] = []
        children: list[int] = []
        sys.stdout.flush()
        for index in range(1, count):
            near, far = Pipe()
            child = os.fork()
            if not child:
                near.close()
                for link in links:  # only the first process may hold its ends; otherwise no one would notice that it ended
                    link.close()
                die_with_parent()
                yield Team(index, count, [far], file.fileno(), said.fileno(), [])
                return
            far.close()
            links.append(near)
            children.append(child)
        try:
            yield Team(0, count, links, file.fileno(), said.fileno(), children)
        finally:
            for link in links:
                link.close()
            for child in children:
                os.kill(child, signal.SIGTERM) if sys.exc_info()[0] else None
                os.waitpid(child, 0)
