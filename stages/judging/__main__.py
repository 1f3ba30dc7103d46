"""`python -m stages.judging measure LABELS`: how far a judge agrees with people, before it is believed; docs/judges.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from stages.algorithms.parts.judge import Judge as JudgeParams
from stages.algorithms.resolve import resolve_section
from stages.judging.agreement import kappa_below
from stages.judging.contract import Judge, JudgeError
from stages.judging.measuring import measured
from stages.judging.reading import reading_judge
from stages.judging.table import write_judgments
from stages.params import Params, load_params
from stages.records.sections import seed_of
from stages.runtime.command import command
from stages.runtime.validation import ParamsError


def judge_section(params: Params, domain: str) -> tuple[JudgeParams, int]:
    """Section rl.judge of a domain as its algorithm resolves it, and the seed of section rl. Raises ParamsError for an algorithm
    without a judge, or with one that reads no text."""
    rl = resolve_section(params.section("rl", domain), params.model.max_length)[1]
    if rl.reward.kind != "judge":
        raise ParamsError(
            f"rl.reward.kind is {rl.reward.kind} on {domain}, so no judge gives rewards; set it to judge, or name another domain "
            f"with --domain"
        )
    if rl.judge.kind == "program":
        raise ParamsError("rl.judge.kind: program reads a domain's hidden quality and no text; set it to server or local")
    if rl.judge.scheme == "checklist" and rl.judge.items is None:
        raise ParamsError("rl.judge.items is null, and labelled pairs belong to no task of the domain; set it to items in words")
    return rl.judge, seed_of(params, rl)


def judge_of(params: Params, domain: str, root: Path) -> Judge:
    """The judge that rl asks on a domain. Raises ParamsError as `judge_section`, and FileNotFoundError without its model."""
    given, _ = judge_section(params, domain)
    return reading_judge(given, domain, root, params.resources.device, params.model.max_length)


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.judging", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("measure", help="agreement of rl.judge with labelled pairs")
    asked.add_argument("labels", type=Path, help="lines of JSON: prompt, chosen, rejected; or prompt, first, second, labels")
    asked.add_argument("--domain", help="whose rl.judge (default: the first of params.yaml)")
    asked.add_argument("--limit", type=int, help="pairs at most")
    asked.add_argument("--out", type=Path, help="write the judgments to this Parquet file")
    asked.add_argument("--least-kappa", type=float, help="exit with 1 if Cohen's kappa with the majority is below this")
    options, root = parser.parse_args(argv), Path.cwd()
    try:
        params = load_params(root / "params.yaml")
        domain = options.domain or params.domains[0]
        section, seed = judge_section(params, domain)
        judge = judge_of(params, domain, root)
        try:
            began = time.monotonic()
            found, rows = measured(judge, section, seed, options.labels, options.limit, alpha=True)
            found["calls_per_second"] = round(judge.sent / max(time.monotonic() - began, 1e-9), 2)
        finally:
            judge.close()
        if options.out is not None:
            write_judgments(options.out, rows)
        print(json.dumps(found, indent=1))
    except (ParamsError, JudgeError, ImportError, ValueError, OSError) as error:
        print(f"judging: {error}", file=sys.stderr)
        return 2
    if (kappa := kappa_below(found, options.least_kappa)) is not None:
        print(f"judging: kappa is {kappa:.2f}, below {options.least_kappa:g}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
