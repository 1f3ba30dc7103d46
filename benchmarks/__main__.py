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
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("reports/benchmarks"))
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
    threads = load_params(root / "params.yaml").resources.threads
    if arguments.scenario:
        options = Options(root, arguments.scratch, arguments.quick, arguments.repeats, threads)
        return child(arguments.scenario, options, arguments.outcome)
    place = arguments.scratch or root / ".bellwether"
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="benchmarks-", dir=place) as scratch:
        options = Options(root, Path(scratch), arguments.quick, arguments.repeats, threads)
        failures = run(arguments.only, options, arguments.out)
    for failure in failures:
        print(f"benchmarks: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
