"""`python -m stages.reporting.plots [REVISION ...]`: `dvc plots diff` without a network, and as SVG files.

DVC's own page loads Vega from the network. This gives DVC a template that contains it (result: dvc_plots/index.html) and renders
every plot as dvc_plots/*.svg. Needs the extra `plots`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.runtime.command import command
from stages.runtime.files import atomic_text

TEMPLATE = Path(".bellwether") / "plots.html"
OUT = Path("dvc_plots")
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{refresh_tag}
<title>Plots</title>
<style>body { font-family: sans-serif; margin: 1.5rem } body > div { margin-bottom: 2rem }</style>
<script>LIBRARY</script>
</head>
<body>
{plot_divs}
</body>
</html>
"""
"""DVC fills in the names in braces."""


class PlotsError(RuntimeError):
    """The plots cannot be drawn; the message states the reason and the remedy."""


def converter() -> Any:
    """The package vl_convert, which contains Vega. Raises PlotsError if it is not installed."""
    try:
        import vl_convert
    except ImportError as error:
        raise PlotsError("drawing without a network needs the extra 'plots': pip install -e '.[plots]'") from error
    return vl_convert


def dvc(root: Path, *arguments: str) -> str:
    """Standard output of a DVC command. Raises PlotsError with its standard error if it fails."""
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise PlotsError(f"{' '.join(['dvc', *arguments])}: {done.stderr.strip()}")
    return done.stdout


def file_name(plot: str) -> str:
    """`dvc.yaml::reports/evaluation.csv` -> `reports_evaluation.csv.svg`"""
    return re.sub(r"[^\w.-]+", "_", plot.split("::")[-1]) + ".svg"


def draw(root: Path, revisions: list[str]) -> list[Path]:
    """Write the page and one SVG per plot; the files written, relative to `root`."""
    atomic_text(root / TEMPLATE, PAGE.replace("LIBRARY", converter().javascript_bundle()))
    dvc(root, "plots", "diff", *revisions, "--out", str(OUT), "--html-template", str(root / TEMPLATE))
    written = [OUT / "index.html"]
    plots = json.loads(dvc(root, "plots", "diff", *revisions, "--json"))["data"]
    for name, pages in sorted(plots.items()):
        for page in pages:
            if page.get("type") == "vega":
                path = OUT / file_name(name)
                atomic_text(root / path, converter().vegalite_to_svg(page["content"]))
                written.append(path)
    return written


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.reporting.plots", description=__doc__)
    parser.add_argument("revisions", nargs="*", help="commits, branches, tags or experiments to compare, as for dvc plots diff")
    options = parser.parse_args()
    try:
        for path in draw(Path.cwd(), options.revisions):
            print(f"plots: wrote {path}")
    except PlotsError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
