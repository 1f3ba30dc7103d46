"""`python -m stages.reporting.plots [REVISION ...]`: what `dvc plots diff` draws, without a network, and as SVG files.

DVC's own page loads its drawing library from the network. This writes a template that holds the library, once, has DVC fill it
(dvc_plots/index.html), and draws every plot as dvc_plots/*.svg. Needs the extra `plots`.
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
"""DVC replaces what stands in braces."""


class PlotsError(RuntimeError):
    """The plots cannot be drawn; the message says why and what to do."""


def converter() -> Any:
    """The module that holds the drawing library. Raises PlotsError without it."""
    try:
        import vl_convert
    except ImportError as error:
        raise PlotsError("drawing without a network needs the extra 'plots': pip install -e '.[plots]'") from error
    return vl_convert


def write_template(path: Path) -> None:
    """The page for DVC to fill, with the drawing library in it."""
    atomic_text(path, PAGE.replace("LIBRARY", converter().javascript_bundle()))


def dvc(root: Path, *arguments: str) -> str:
    """Standard output of a DVC command. Raises PlotsError with what it said if it fails."""
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
    write_template(root / TEMPLATE)
    dvc(root, "plots", "diff", *revisions, "--out", str(OUT), "--html-template", str(root / TEMPLATE))
    written = [OUT / "index.html"]
    plots = json.loads(dvc(root, "plots", "diff", *revisions, "--json"))["data"]
    for name, pages in sorted(plots.items()):
        for page in pages:
            if page.get("type") == "vega":
                path = OUT / file_name(name)
                content = page["content"]
                atomic_text(root / path, converter().vegalite_to_svg(content))
                written.append(path)
    return written


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.reporting.plots", description=__doc__)
    parser.add_argument(
        "revisions", nargs="*", help="commits, branches, tags or experiments to lay over each other; as dvc plots diff"
    )
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
