"""`python -m stages.conversion SETTINGS`: convert narrow calls of a served model to small models; docs/conversion.md."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from stages.conversion.call_log import read_calls, unmasked_lines
from stages.conversion.settings import load_settings
from stages.runtime.command import command
from stages.runtime.validation import ParamsError


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.conversion", description=__doc__)
    parser.add_argument("settings", type=Path, help="a YAML file; see examples/conversion.yaml")
    parser.add_argument("--answer", type=Path, metavar="FILE", help="route the calls of another log instead, as lines of JSON")
    restore = "print the log with personal data in place of its placeholders, which takes the key that it was masked with"
    parser.add_argument("--unmask", action="store_true", help=restore)
    options, root = parser.parse_args(argv), Path.cwd()
    try:
        settings = load_settings(options.settings)
        if options.unmask:
            print("\n".join(unmasked_lines(root / settings.log, root / settings.key)))
            return 0
        from stages.conversion.rounds import convert  # loads torch, which takes seconds: settings are checked first
        from stages.conversion.router import CallRouter

        if options.answer is None:
            report = convert(settings, root)
            why = f" ({report['why']})" if "why" in report else ""
            share, cost = report["replaceable_share"], report["cost_per_call"]
            print(f"{report['status']}{why}: replaceable share {share:.1%}, cost of a call {cost:.1%} of the large model's")
            return 0
        calls = read_calls(options.answer)
        routed = CallRouter.load(root / settings.out).route(calls)
        for call, one in zip(calls, routed, strict=True):
            text = None if one.answer is None else one.answer.text
            print(json.dumps({"trace": call["trace"], "call": call["call"], "by": one.by, "why": one.fallback, "answer": text}))
    except (ParamsError, ValueError, OSError) as error:
        print(f"conversion: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
