"""`python -m stages.tracking --replay` sends what a server missed; `--follow FILE` is what a stage starts beside itself."""

import argparse
import os
import sys
from pathlib import Path

from stages.tracking.follower import follow, replay_all


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.tracking", description=__doc__)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--replay", action="store_true", help="send all runs that were not sent completely")
    choice.add_argument("--follow", type=Path, metavar="FILE", help="send FILE while the calling stage writes it")
    options = parser.parse_args()
    if options.replay:
        return replay_all(Path(os.environ.get("DVC_ROOT", ".")).absolute())
    return follow(options.follow)


if __name__ == "__main__":
    sys.exit(main())
