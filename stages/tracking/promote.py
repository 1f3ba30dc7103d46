"""`python -m stages.tracking.promote` compares the newest merged model with the champion and moves the alias if it is better.

The evaluate stage does the same when it registers a merged model in MLflow; this command repeats the paired test on the frozen
panels, for any version, and prints the reasons.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from stages.params import load_params
from stages.runtime.command import command
from stages.runtime.validation import ParamsError
from stages.tracking import REGISTERED_MODEL

if TYPE_CHECKING:
    from stages.tracking.server import Server


def promote(server: Server, settings: dict[str, float], wanted: int | None) -> int:
    """Exit code: 0 if the version is the champion afterwards, 1 if not, 2 if there is no such version."""
    from stages.tracking.registry import challenge, champion, number, versions

    found = {number(version): version for version in versions(server, REGISTERED_MODEL)}
    if not found or (wanted is not None and wanted not in found):
        what = f"version {wanted}" if found else "version"
        print(f"promote: there is no {what} of {REGISTERED_MODEL} in {server.uri}; 'dvc repro' registers one", file=sys.stderr)
        return 2
    version = found[wanted] if wanted is not None else list(found.values())[-1]
    print(f"{REGISTERED_MODEL} version {version.version}: {version.tags['dvc.path']}, DVC hash {version.tags['dvc.md5']}")
    decision = challenge(server, REGISTERED_MODEL, version, settings)
    for line in decision.lines:
        print(line)
    holder = champion(server, REGISTERED_MODEL)
    print(f"champion: {f'version {holder.version}' if holder is not None else 'none'}")
    return 0 if holder is not None and number(holder) == number(version) else 1


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.tracking.promote", description=__doc__)
    parser.add_argument("--version", type=int, help="the version that challenges the champion (default: the newest)")
    parser.add_argument(
        "--retire",
        action="store_true",
        help="remove the alias, e.g. after the panels changed and no version can be compared with the champion",
    )
    options = parser.parse_args()
    root = Path(os.environ.get("DVC_ROOT", ".")).absolute()
    try:
        params = load_params(root / "params.yaml")
        from stages.tracking.registry import retire
        from stages.tracking.server import Server

        server = Server(root)
        if options.retire:
            holder = retire(server, REGISTERED_MODEL)
            print(f"version {holder.version} is no longer the champion" if holder is not None else "there is no champion")
            return 0
        evaluate = params.evaluate
        settings = {"confidence": evaluate.confidence, "resamples": evaluate.resamples, "seed": params.seed}
        return promote(server, settings, options.version)
    except ParamsError as error:
        print(f"promote: {error}", file=sys.stderr)
    except Exception as error:
        if os.environ.get("BELLWETHER_DEBUG"):
            raise
        print(f"promote: {type(error).__name__}: {error}\n(BELLWETHER_DEBUG=1 shows the traceback)", file=sys.stderr)
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
