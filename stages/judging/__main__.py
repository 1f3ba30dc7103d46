"""`python -m stages.judging measure LABELS`: how far a judge agrees with people, before it is believed; docs/judges.md."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.judging.agreement import against, read_labels
from stages.judging.contract import Cost, Judge, JudgeError
from stages.judging.measures import order_measures
from stages.judging.preferences import QUALITY, margins_of
from stages.judging.reading import reading_judge
from stages.judging.table import judgment_row, write_judgments
from stages.params import Params, load_params
from stages.runtime.command import command
from stages.runtime.validation import ParamsError


def judge_of(params: Params, domain: str, root: Path) -> Judge:
    """The judge of section rl.judge. Raises ParamsError for one that reads no text, and FileNotFoundError without its model."""
    given = params.section("rl", domain).judge
    if given.kind == "program":
        raise ParamsError("rl.judge.kind: program reads a domain's hidden quality and no text; set it to server or local")
    if given.kind == "server" and not given.server.model:
        raise ParamsError("rl.judge.server.model is empty; set it to the judge's name at the server")
    return reading_judge(given, domain, root, params.resources.device, params.model.max_length)


def measured(judge: Judge, labels: Path, limit: int | None, out: Path | None) -> dict[str, Any]:
    """What the judge says of the labelled pairs, each in both orders; `out`: the table of its judgments. Raises ValueError for a
    file that has no pairs, and JudgeError."""
    questions, truth = (part[:limit] for part in read_labels(labels))
    began = time.monotonic()
    margins, asked = margins_of(judge, questions, None)
    seconds = time.monotonic() - began
    rows = [judgment_row(judge, *one) for one in asked]
    if out is not None:
        write_judgments(out, rows)
    cost = sum((judgment.cost for _, judgment in asked), Cost())
    statuses = [row["status"] for row in rows]
    return {
        **against([of.get(QUALITY) for of in margins], truth, alpha=True),
        "position_bias": order_measures(rows)["position_bias"],
        "statuses": {status: statuses.count(status) for status in sorted(set(statuses))},
        "calls": cost.calls,
        "tokens_in": cost.tokens_in,
        "tokens_out": cost.tokens_out,
        "money": cost.money,
        "calls_per_second": round(cost.calls / max(seconds, 1e-9), 2),
    }


@command
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.judging", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    asked = commands.add_parser("measure", help="agreement of rl.judge with labelled pairs")
    asked.add_argument("labels", type=Path, help="lines of JSON: prompt, chosen, rejected; or prompt, first, second, labels")
    asked.add_argument("--domain", help="whose rl.judge (default: the first of params.yaml)")
    asked.add_argument("--limit", type=int, help="pairs at most")
    asked.add_argument("--out", type=Path, help="write the judgments to this Parquet file")
    options, root = parser.parse_args(argv), Path.cwd()
    try:
        params = load_params(root / "params.yaml")
        judge = judge_of(params, options.domain or params.domains[0], root)
        try:
            print(json.dumps(measured(judge, options.labels, options.limit, options.out), indent=1))
        finally:
            judge.close()
    except (ParamsError, JudgeError, ImportError, ValueError, OSError) as error:
        print(f"judging: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
