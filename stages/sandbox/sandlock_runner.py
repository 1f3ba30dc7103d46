"""`python -m stages.sandbox.sandlock_runner JSON`: run a command under sandlock, then kill every process it left behind."""

from __future__ import annotations

import ctypes
import json
import sys
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    from sandlock import Sandbox

    request = json.loads(sys.argv[1])
    # Orphans of the command's processes become children of this process, which kills them.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with Sandbox(**request["options"]) as sandbox:
        code = sandbox.run_interactive(request["command"])
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
