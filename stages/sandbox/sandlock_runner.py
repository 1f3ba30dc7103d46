"""`python -m stages.sandbox.sandlock_runner JSON`: run a command under sandlock, and leave none of its processes behind."""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    from sandlock import Sandbox

    order = json.loads(sys.argv[1])
    # What the command's processes orphan becomes a child of this one, and is ended here.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with Sandbox(**order["options"]) as sandbox:
        code = sandbox.run_interactive(order["command"])
    end_children()
    return code


def end_children() -> None:
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1.0)


if __name__ == "__main__":
    sys.exit(main())
