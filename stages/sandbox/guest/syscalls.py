"""System calls that programs are denied: those that make memory which no limit of a process counts, and those of another
architecture, which would be another way to each of them."""

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
"""Machine -> what the kernel calls it (AUDIT_ARCH_*), and the numbers of the calls. All six make something that has no address in
the process (a detached segment, a file without a name, a queue), and so is not part of RLIMIT_AS."""
X32 = 0x40000000
"""Set in numbers of calls of x86_64's other, 32-bit kind."""
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of the kernel's filter machine: BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_JMP|JGE|K, BPF_RET|K."""
ALLOW, DENY = 0x7FFF0000, 0x00050000 | errno.EPERM
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    """The filter for one of DENIED: (what, how many to skip if so, how many if not, operand). Architecture is at offset 4 of what
    the kernel hands over, the number of the call at 0."""
    architecture, calls = DENIED[machine]
    tests = [(AT_LEAST, X32), *((EQUAL, number) for number in sorted(calls.values()))]
    jumps = [(what, len(tests) - place, 0, operand) for place, (what, operand) in enumerate(tests)]
    start = [(LOAD, 0, 0, 4), (EQUAL, 0, len(tests) + 2, architecture), (LOAD, 0, 0, 0)]
    return [*start, *jumps, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]


def deny() -> None:
    """Of this process and of all that it forks, for ever: no filter is ever taken back. Raises OSError, saying why, where
    there is none to be had."""
    machine = os.uname().machine
    if machine not in DENIED or sys.maxsize < 1 << 32:
        raise OSError(f"no filter of system calls is known for this Python on {machine}, only for 64 bits of {', '.join(DENIED)}")
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
            raise OSError(f"the filter of system calls can't be installed: prctl {option}: {os.strerror(ctypes.get_errno())}")
