"""README's generated parts: the pipeline's diagram, the tables of results, methods and claims, and docs/figures/lifecycle.svg.

`python -m stages.reporting.readme` rewrites what stands between `<!-- results:begin -->` and `<!-- results:end -->` (from
reports/evaluation.json), in the same way PROFILES (from what was kept of such a profile's run), `pipeline` (from dvc.yaml),
`methods` (from the methods' cards) and `claims` (from reports/claims, whose own pages it writes as well, and
reports/annotation_uses.json, which the report quotes).
`--check` writes nothing and fails if something is out of date.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from stages.agent.episode import read_json
from stages.claims import annotation_uses, board, step_credit_page
from stages.command import command
from stages.files import atomic_text
from stages.params import load_params
from stages.reporting.diagram import mermaid
from stages.reporting.figures.outcome import success_bars
from stages.reporting.results import check_evaluation, markdown_table
from stages.reporting.style import drawing, to_svg
from stages.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.card import Card

FIGURE = Path("docs/figures/lifecycle.svg")
KEPT = Path("reports/profiles")
"""reports/evaluation.json of runs with other parameters than the default, under the name of the file in profiles/ they took."""
PROFILES = ("three-domains", "search-and-code")
"""Those that README tells the results of, each in a block of that name."""


def has_block(text: str, name: str) -> bool:
    return f"<!-- {name}:begin -->" in text and f"<!-- {name}:end -->" in text


def replace_block(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of block `name`. Raises ValueError if they are missing or in the wrong order."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"README.md needs the lines '{begin}' and '{end}', each once and in this order; add them where the block belongs"
        )
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{content.strip()}\n{end}{tail}"


def _cell(text: str) -> str:
    """`text` as a Markdown table cell: on one line, bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")


def methods_table(cards: Iterable[Card]) -> str:
    """One row per method: switch, title, what it does, what it reduces to, paper."""
    lines = ["| switch | method | in one line | reduces to | paper |", "|---|---|---|---|---|"]
    for card in cards:
        cells = (f"`{card.switch}`", card.title, card.equation, card.reduces_to, card.paper)
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    return "\n".join(lines)


def all_cards() -> list[Card]:
    """Cards of all RL, value and merge methods, and of the design search. Imports torch, through the methods."""
    from stages.algorithms.registry import cards
    from stages.designs import tree
    from stages.merging.registry import MERGERS
    from stages.values import heads, q_model

    return [*cards(), heads.CARD, q_model.CARD, tree.CARD, *(MERGERS[name].card for name in MERGERS)]


def methods_block() -> str:
    return methods_table(all_cards())


def results(root: Path, path: Path, domains: Sequence[str]) -> tuple[dict[str, Any], list[str], str]:
    """What `path` holds, those of `domains` that it has panels of, and their table. Raises FileNotFoundError, ValueError."""
    if not (root / path).exists():
        profile = (
            f" with 'profiles/{path.stem}.yaml' applied, then copy reports/evaluation.json there," if path.parent == KEPT else ""
        )
        raise FileNotFoundError(f"{path} does not exist; run 'dvc repro evaluate'{profile} before README is written from it")
    evaluation = read_json(root / path)
    check_evaluation(evaluation, str(path))
    there = [domain for domain in domains if domain in evaluation["panels"]]
    confidence = float(evaluation.get("confidence", load_params(root / "params.yaml").evaluate.confidence))
    return evaluation, there, markdown_table(evaluation, there, confidence)


def lifecycle_figure(evaluation: Mapping[str, Any], domains: list[str]) -> str:
    """Success of every model with intervals, a panel for each domain, as an SVG file of its own."""
    with drawing():
        figure = success_bars(evaluation, domains, domains)
        return to_svg(
            figure, "lifecycle", f"Success per model on {', '.join(domains)}, with confidence intervals", standalone=True
        ).text


def generated(root: Path) -> dict[Path, str]:
    """What README.md and the figure should hold, by path relative to `root`; blocks that README lacks are left out.

    Raises FileNotFoundError without README.md, or without the evaluation that one of its blocks asks for.
    """
    readme = (root / "README.md").read_text(encoding="utf-8")
    files: dict[Path, str] = {}
    if has_block(readme, "results"):
        evaluation, domains, table = results(root, Path("reports/evaluation.json"), load_params(root / "params.yaml").domains)
        readme = replace_block(readme, "results", table)
        files[FIGURE] = lifecycle_figure(evaluation, domains)
    for profile in filter(partial(has_block, readme), PROFILES):
        overlay = yaml.safe_load((root / "profiles" / f"{profile}.yaml").read_text(encoding="utf-8"))
        readme = replace_block(readme, profile, results(root, KEPT / f"{profile}.json", overlay["domains"])[2])
    if has_block(readme, "methods"):
        readme = replace_block(readme, "methods", methods_block())
    if has_block(readme, "pipeline"):
        readme = replace_block(readme, "pipeline", mermaid(root))
    if has_block(readme, "claims"):
        readme = replace_block(readme, "claims", board.readme_table(root))
        files[board.PAGE] = board.page(root)
        files |= step_credit_page.files(root) | annotation_uses.files(root)
    files[Path("README.md")] = readme
    return files


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m stages.reporting.readme", description="Write README's generated parts.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    options = parser.parse_args()
    root = Path.cwd()
    try:
        files = generated(root)
    except (FileNotFoundError, ValueError, ParamsError) as error:
        print(f"readme: {error}", file=sys.stderr)
        return 1
    stale = [
        path for path, text in files.items() if not (root / path).exists() or (root / path).read_text(encoding="utf-8") != text
    ]
    for path in stale:
        if options.check:
            print(f"readme: {path} is out of date; run 'python -m stages.reporting.readme'", file=sys.stderr)
        else:
            atomic_text(root / path, files[path])
            print(f"readme: wrote {path}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
