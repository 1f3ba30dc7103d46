"""`python -m benchmarks`: measure every scenario (or those of `--only`) and write reports/benchmarks."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Options
from benchmarks.suite import SCENARIOS, child, run
from stages.params import load_params


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SCENARIOS,
        default=list(SCENARIOS),
        metavar="SCENARIO",
        help=f"default: all of {', '.join(SCENARIOS)}",
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one repeat: a smoke test")
    parser.add_argument("--fresh", action="store_true", help="measure again what is measured with the same code and settings")
    parser.add_argument("--repeats", type=int, default=5, help="at most; slow scenarios have fewer")
    parser.add_argument("--out", type=Path, help="folder of the results (default: reports/benchmarks; with --quick none)")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=None,
        help="folder for about 6 GB of temporary files, on disk rather than tmpfs (default: .bellwether)",
    )
    parser.add_argument("--scenario", choices=SCENARIOS, help=argparse.SUPPRESS)
    parser.add_argument("--outcome", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    root = Path.cwd()
    resources = load_params(root / "params.yaml").resources
    settings = (arguments.quick, arguments.repeats, resources.threads, resources.workers)
    if arguments.scenario:
        options = Options(root, arguments.scratch, *settings)
        return child(arguments.scenario, options, arguments.outcome)
    place = arguments.scratch or root / ".bellwether"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=place) as scratch:
        out = arguments.out or (Path(scratch) / "results" if arguments.quick else Path("reports/benchmarks"))
        failures = run(arguments.only, Options(root, Path(scratch), *settings), out, arguments.fresh)
    for failure in failures:
        print(f"benchmarks: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
