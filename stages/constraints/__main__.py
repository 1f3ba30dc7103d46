"""`python -m stages.constraints`: shows specifications, and measures how many recorded episodes obey a domain's constraint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from stages.constraints.conformance import conformance
from stages.constraints.formula import SpecError, load_spec, shipped
from stages.constraints.settings import make_rules
from stages.constraints.transcript import Transcripts
from stages.records.episode import read_rows
from stages.runtime.command import command


def show(name: str) -> str:
    """A specification's states, and what its first turn may look like."""
    rules = Transcripts(load_spec(name))
    lines = [f"{name}:"]
    for state in rules.spec.states.values():
        notes = ["answered by the environment" if state.env else state.text]
        notes += [f"sends {state.send!r}"] if state.send else []
        notes += [f"one of {', '.join(state.values)}"] if state.values else []
        lines.append(f"  {state.name:<14} {'; '.join(notes)}")
    lines.append(f"first turn: {' or '.join(rules.monitor.valid(rules.start))}")
    lines.append(f"fewest answers of the environment: {rules.monitor.turns_to_end(rules.start):g}")
    return "\n".join(lines)


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.constraints", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    shown = commands.add_parser("show", help="the states of a specification")
    shown.add_argument("spec", help=f"{', '.join(shipped())}, or a file")
    measured = commands.add_parser("conformance", help="the share of recorded episodes that obey")
    measured.add_argument("episodes", type=Path, help="a table such as data/rollouts/search/episodes.parquet")
    measured.add_argument("--kind", default="ltl", choices=["ltl", "regex", "json_schema", "grammar"])
    measured.add_argument("--spec", required=True)
    measured.add_argument("--restart", action="store_true", help="a fulfilled formula begins anew (terminate_on_restart: false)")
    options = parser.parse_args(argv)
    try:
        if options.command == "show":
            print(show(options.spec))
        else:
            rules = make_rules(options.kind, options.spec, restarts=options.restart)
            rows = read_rows(options.episodes, ["messages", "owner"])
            if not rows:
                raise ValueError(f"{options.episodes} has no episodes (those of rollout need rollout.tasks above 0)")
            print(json.dumps(conformance(rules, rows), indent=1))
    except (SpecError, ValueError, FileNotFoundError) as error:
        parser.exit(2, f"{error}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
