"""Processes that share a stage's work."""

from __future__ import annotations

import errno
import mmap
import os
import time
from copy import copy
from itertools import chain

import pytest

from stages.runtime.team import started


def test_items_go_to_the_next_free_process() -> None:
    """Contract: each item is taken once, in order, and a slow process takes fewer than its equal share."""
    with started(3) as team:
        own = []
        for item in team.take(range(39)):
            own.append(item)
            time.sleep(0.005 if team.index else 0.5)
        again = list(team.take("ab"))
        shares, letters = team.gather(own), team.gather(again)
        if team.index:
            os._exit(0)
    assert sorted(chain.from_iterable(shares)) == list(range(39))
    assert all(share == sorted(share) for share in shares)
    assert len(shares[0]) < 13
    assert sorted(chain.from_iterable(letters)) == ["a", "b"]


def test_slow_process_does_not_cut_off_shared_memory() -> None:
    """Contract: a process that is behind the others in their calls of `shared` leaves what these have."""
    with started(2) as team:
        if team.index:
            team.shared(8)
            memory = team.shared(8)
            memory[:2] = b"me"
            team.wait()
            team.wait()
            found = bytes(memory[:2])  # SIGBUS if its page is gone
            team.gather(found)
            os._exit(0)
        team.wait()
        team.shared(8)
        team.wait()
        assert team.gather(None)[1] == b"me"
        assert bytes(team.shared(8)[:2]) == b"me"


def test_shared_memory_is_there_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: where /dev/shm is too small, as in a container, an error names the remedy; writing would end in SIGBUS."""
    with started(1) as team:
        before = os.fstat(team._memory).st_blocks
        team.shared(1 << 20)
        assert (os.fstat(team._memory).st_blocks - before) * 512 >= 1 << 20

        def full(handle: int, start: int, size: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            OSError, match=r"no room for 8 MB of memory.*No space left.*--shm-size.*resources\.workers to 1"
        ) as raised:
            team.shared(8_000_000)
        assert raised.value.errno == errno.ENOSPC


def test_only_the_first_process_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract: where the file system cannot allocate, the C library writes zeros, over what a faster process has written."""
    calls: list[tuple[int, int]] = []
    allocate = os.posix_fallocate

    def recorded(handle: int, start: int, size: int) -> None:
        calls.append((start, size))
        allocate(handle, start, size)

    monkeypatch.setattr(os, "posix_fallocate", recorded)
    with started(1) as team:
        slower = copy(team)
        team.shared(100)[:2] = b"me"
        team.shared(100)
        assert bytes(slower.shared(100)[:2]) == b"me"
        slower.shared(100)
    size = mmap.ALLOCATIONGRANULARITY
    assert calls == [(0, size), (size, size)]


def test_what_ends_all_processes_alike_is_said_once(capfd: pytest.CaptureFixture[str]) -> None:
    with started(3) as team:
        team.say("no such file")
        team.wait()
        team.say(f"process {team.index}")
        team.wait()
        if team.index:
            os._exit(0)
    assert sorted(capfd.readouterr().err.splitlines()) == ["no such file", "process 0", "process 1", "process 2"]
