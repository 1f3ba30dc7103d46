"""System calls denied to programs: those that allocate memory outside every per-process limit, and those of other architectures,
which would provide another way to make them."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Mapping

DENIED: Mapping[str, tuple[int, Mapping[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {"shmget": 29, "semget": 64, "msgget": 68, "memfd_create": 319, "io_uring_setup": 425, "memfd_secret": 447},
    ),
    "aarch64": (
        0xC00000B7,
        {"shmget": 194, "semget": 190, "msgget": 186, "memfd_create": 279, "io_uring_setup": 425, "memfd_secret": 447},
    ),
}
"""Machine -> the kernel's name for it (AUDIT_ARCH_*) and the call numbers. All six create objects outside the process's address
space (a detached segment, an unnamed file, a queue), which RLIMIT_AS does not cover."""
X32 = 0x40000000
"""Bit that is set in the numbers of x86_64's x32 calls."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of the kernel's filter machine: BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K."""
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EPERM
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """The BPF filter for a machine in DENIED: (opcode, jump if true, jump if false, operand). In the kernel's data, the
    architecture is at offset 4 and the number of the call at offset 0."""
    architecture, calls = DENIED[machine]
    tests = [(AT_LEAST, X32), *((EQUAL, number) for number in sorted(calls.values()))]
    jumps = [(what, len(tests) - place, 0, operand) for place, (what, operand) in enumerate(tests)]
    start = [(LOAD, 0, 0, 4), (EQUAL, 0, len(tests) + 2, architecture), (LOAD, 0, 0, 0)]
    return [*start, *jumps, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]


def deny() -> None:
    """Install the filter in this process, irrevocably; all its forks inherit it. Raises OSError with the reason if it can't be
    installed."""
    machine = os.uname().machine
    if machine not in DENIED or sys.maxsize < 1 << 32:
        raise OSError(f"there is no system call filter for this Python on {machine}; only 64-bit {' and '.join(DENIED)} have one")
    rules = instructions(machine)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *rule) for rule in rules))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(rules), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    for option, value, pointer in (
        (PR_SET_NO_NEW_PRIVS, 1, 0),
        (PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(program)),
    ):
        if prctl(option, value, pointer, 0, 0):
            raise OSError(f"the system call filter can't be installed: prctl {option}: {os.strerror(ctypes.get_errno())}")
