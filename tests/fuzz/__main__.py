"""`python -m tests.fuzz params --count 5000 --seed 0` tries mutated params.yaml files and counts the outcomes; likewise records,
imports, requests and kills. The exit code is 1 if a case was lost, 2 for an invalid command. `--only N` runs one case and prints
it; `--write` stores the counts in docs/guarantees.json, and `python -m tests.fuzz page` updates docs/guarantees.md from there."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from . import page
from .outcomes import ACCEPTED, LOST, Outcome, Tally
from .suites import COUNTS, counted


def report_progress(tally: Tally, operators: str, outcome: Outcome) -> None:
    """Print each kill, which takes long; of other cases show the progress on a terminal."""
    if tally.suite == "kills":
        print(f"{operators}: {'the same bytes' if outcome.kind == ACCEPTED else outcome.detail}", flush=True)
    elif sys.stderr.isatty():
        print(f"\r{tally.tried} tried, {tally.counts[LOST]} lost", end="", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("suite", choices=[*COUNTS, "page"])
    parser.add_argument("--count", type=int, help=f"number of cases (default: {COUNTS})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="run case N alone and print its outcome (not for kills)")
    parser.add_argument(
        "--source", type=Path, help="kills: a finished run to copy, such as the default one (default: make a tiny one)"
    )
    parser.add_argument("--write", action="store_true", help="store the counts in docs/guarantees.json and update the page")
    options = parser.parse_args()
    if options.suite == "page":
        page.write()
        return 0
    if options.count is not None and options.count < 1:
        parser.error("--count must be at least 1")
    if options.only is not None:
        if options.suite == "kills":
            parser.error("--only is not for kills, which follow one another")
        operators, outcome = importlib.import_module(f".{options.suite}", __package__).case(options.seed, options.only)
        print(f"{options.suite} {options.only}: {operators}\n{outcome.kind}: {outcome.detail}")
        return int(outcome.kind == LOST)
    count = options.count or COUNTS[options.suite]
    try:
        tally = counted(options.suite, count, options.seed, options.source, report_progress)
    except ValueError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2
    for number, operators, detail in tally.lost:
        again = "" if options.suite == "kills" else f" --only {number}"
        print(f"lost: python -m tests.fuzz {options.suite} --seed {options.seed}{again} ({operators}): {detail}")
    print(tally.line())
    print(json.dumps({options.suite: tally.row()}))
    if options.write:
        run = " --source FOLDER" if options.source else ""
        page.store(tally, f"python -m tests.fuzz {options.suite} --count {count} --seed {options.seed}{run}")
    return int(bool(tally.lost))


if __name__ == "__main__":
    sys.exit(main())
