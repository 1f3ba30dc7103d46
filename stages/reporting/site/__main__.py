"""`python -m stages.reporting.site`: build the documentation as a site with search, in .bellwether/site/html; needs no network.

Pages: README.md, docs/, a page per published method, and the board. A broken link or an unknown reference fails the build.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from stages.reporting.site.sources import EXTRA, gather
from stages.runtime.command import command
from stages.runtime.validation import ParamsError

FOLDER = Path(".bellwether/site")
SETTINGS = {
    "project": "Bellwether",
    "copyright": "",
    "root_doc": "index",
    "extensions": ["myst_parser"],
    "myst_heading_anchors": 4,
    "myst_enable_extensions": ["html_image"],
    "html_theme": "furo",
    "html_title": "Bellwether",
    "html_extra_path": [EXTRA],
    "html_copy_source": False,
    "html_show_search_summary": False,  # it fetches the pages, which browsers refuse where there is no server
    "html_show_sphinx": False,
    "html_show_copyright": False,
    "highlight_language": "none",
}


def build(root: Path, folder: Path) -> int:
    """Write the site of the checkout `root` to `folder`/html; the number of pages. Raises SphinxError for a warning, and what
    `gather` raises."""
    from sphinx.application import Sphinx

    shutil.rmtree(folder, ignore_errors=True)
    pages = gather(root, folder / "sources")
    app = Sphinx(
        *(folder / "sources", None, folder / "html", folder / "doctrees", "html", SETTINGS),
        **{"status": None, "warning": sys.stderr, "warningiserror": True, "freshenv": True},
    )
    app.build()
    if app.statuscode:
        raise ValueError("the documentation has the warnings above")
    return len(pages)


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.reporting.site", description=(__doc__ or "").strip())
    parser.parse_args()
    try:
        import furo  # noqa: F401
        import myst_parser  # noqa: F401
    except ImportError as error:
        print(f"site: {error.name} is not installed; 'make site' installs the extra docs", file=sys.stderr)
        return 2
    try:
        count = build(Path.cwd(), FOLDER)
    except (FileNotFoundError, ParamsError, ValueError) as error:
        print(f"site: {error}", file=sys.stderr)
        return 1
    print(f"site: {count} pages; open {FOLDER}/html/index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
