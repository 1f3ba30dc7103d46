"""`python -m tests.fuzz params --count 5000 --seed 0`: mutated params.yaml files, counted; likewise records, imports, requests and
kills. Exit code 1 if a case was lost. `--write` keeps the counts for docs/guarantees.md; `--only N` runs one case and shows it."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from .outcomes import LOST, Tally, keep

SUITES = {"params": 5000, "records": 2000, "imports": 2000, "requests": 2000, "kills": 36}
"""Suite -> cases where --count is not given."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--count", type=int, help=f"cases to try; {SUITES} where not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="try case N alone and say what came of it")
    parser.add_argument("--source", type=Path, help="kills: a finished run to copy, such as the default run's; else a tiny one is made")
    parser.add_argument("--write", action="store_true", help="keep the counts in docs/guarantees.json and docs/guarantees.md")
    options = parser.parse_args()
    suite = importlib.import_module(f".{options.suite}", __package__)
    if options.only is not None and options.suite != "kills":
        operators, outcome = suite.case(options.seed, options.only)
        print(f"{options.suite} {options.only}: {operators}\n{outcome.kind}: {outcome.detail}")
        return int(outcome.kind == LOST)
    count = options.count or SUITES[options.suite]
    if options.suite == "kills":
        cases = suite.cases(options.seed, count, options.source)
    else:
        cases = (suite.case(options.seed, number) for number in range(count))
    tally = Tally(options.suite, options.seed)
    for number, (operators, outcome) in enumerate(cases):
        tally.add(number, operators, outcome)
        if options.suite == "kills":
            print(f"{operators}: {'the same bytes' if outcome.kind != LOST else 'LOST'}", flush=True)
        elif sys.stderr.isatty():
            print(f"\r{number + 1}/{count}, {tally.counts[LOST]} lost", end="", file=sys.stderr, flush=True)
    for number, operators, detail in tally.lost:
        print(f"lost: {options.suite} --seed {options.seed} --only {number} ({operators}): {detail}")
    print(tally.line())
    print(json.dumps({options.suite: tally.row()}))
    if options.write:
        keep(tally, f"python -m tests.fuzz {options.suite} --count {count} --seed {options.seed}")
    return int(bool(tally.lost))


if __name__ == "__main__":
    sys.exit(main())
