"""README's table and figure of the benchmarks, from reports/benchmarks.

`python -m benchmarks.readme` rewrites what stands between `<!-- benchmarks:begin -->` and `<!-- benchmarks:end -->`, and
docs/figures/benchmarks.svg; `--check` writes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import draw
from stages.reporting.readme import replace_block
from stages.reporting.style import drawing, to_svg

FIGURE = Path("docs/figures/benchmarks.svg")
RAW = Path("reports/benchmarks/raw.json")
TITLE = "Speed beside TRL, transformers and mergekit, and how it grows with slots, tokens and size"


def number(value: float) -> str:
    """Three significant digits, in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def in_order(scenarios: Mapping[str, Any]) -> dict[str, Any]:
    """Sorted by name, numbers in names by their size."""

    def key(name: str) -> list[Any]:
        return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

    return dict(sorted(scenarios.items(), key=lambda item: key(item[0])))


def table(scenarios: Mapping[str, Any]) -> str:
    lines = [
        "| scenario | ours | theirs | unit | times as fast (smallest to largest) | against |",
        "|---|---:|---:|---|---:|---|",
    ]
    for name, row in in_order(scenarios).items():
        ratio = row["ratio"]
        spread = f"**{number(ratio['median'])}** ({number(ratio['low'])} to {number(ratio['high'])})"
        cells = (f"`{name}`", number(row["ours"]), number(row["theirs"]), row["unit"], spread, row["against"])
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def conditions(raw: Mapping[str, Any]) -> str:
    """Where and how it was measured, in a sentence."""
    machine = raw["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(machine["versions"].items()))
    return (
        f"{machine['cpu']}, {machine['nproc']} cores, {machine['threads']} threads, {machine['precision']}; alternating order, "
        f"{raw['warm_ups']} warm-up, {raw['repeats']} repeats, medians. {versions}."
    )


def peaks(scenarios: Mapping[str, Any]) -> str:
    """The merges' peak memory, "" where none was measured."""
    parts = []
    for name, row in in_order(scenarios).items():
        memory = row["notes"].get("peak_memory_bytes")
        anonymous = row["notes"].get("peak_anonymous_bytes")
        if memory and anonymous:
            ours, theirs = (f"{memory[who] / 1e9:.2f} GB ({anonymous[who] / 1e9:.2f} GB anonymous)" for who in ("ours", "theirs"))
            parts.append(f"`{name}` {ours} against {theirs}")
    return f"Peak memory: {'; '.join(parts)}." if parts else ""


def profiles(rows: Sequence[Mapping[str, Any]]) -> str:
    """Where the time of ours goes, a line per scenario; "" if that was not measured."""
    if not rows:
        return ""
    parts = [name for name in rows[0] if name != "scenario"]
    lines = ["| our time in | " + " | ".join(parts) + " |", "|---|" + "---:|" * len(parts)]
    lines += [f"| `{row['scenario']}` | " + " | ".join(f"{100 * row[part]:.0f} %" for part in parts) + " |" for row in rows]
    return "\n".join(lines)


def block(raw: Mapping[str, Any]) -> str:
    where = profiles(raw["tables"].get("profiles", {}).get("rows", []))
    parts = [f"![{TITLE}]({FIGURE})", table(raw["scenarios"]), conditions(raw), peaks(raw["scenarios"]), where]
    return "\n\n".join(part for part in parts if part)


def figure(raw: Mapping[str, Any]) -> str:
    tables = {name: value["rows"] for name, value in raw["tables"].items()}
    with drawing():
        return to_svg(draw(in_order(raw["scenarios"]), tables), "benchmarks", TITLE, standalone=True).text


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description="Write README's benchmarks.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    check = parser.parse_args().check
    root = Path.cwd()
    if not (root / RAW).exists():
        print(f"readme: {RAW} does not exist; run 'make bench' first", file=sys.stderr)
        return 1
    raw = json.loads((root / RAW).read_text(encoding="utf-8"))
    try:
        readme = replace_block((root / "README.md").read_text(encoding="utf-8"), "benchmarks", block(raw))
    except ValueError as error:
        print(f"readme: {error}", file=sys.stderr)
        return 1
    files = {Path("README.md"): readme, FIGURE: figure(raw)}
    stale = [path for path, text in files.items() if not (root / path).exists() or (root / path).read_text("utf-8") != text]
    for path in stale:
        if check:
            print(f"readme: {path} is out of date; run 'python -m benchmarks.readme'", file=sys.stderr)
            continue
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(files[path], encoding="utf-8")
        print(f"readme: wrote {path}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
