"""The generated parts of README.md and docs/: `python -m stages.reporting.documents` writes them, `--check` only compares.

Blocks, each found by its markers (stages/reporting/generated_blocks.py):

- `results`, `results-full` (with the paired comparisons), and one for each of PROFILES: from evaluations in reports/
- `pipeline`: from dvc.yaml
- `methods`, `method-names`: from the cards of the methods
- `claim-counts`: from reports/claims

Beside the blocks: docs/figures/lifecycle.svg, the pages of reports/claims, and reports/annotation_uses.json, which the report
quotes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from stages.params import load_params
from stages.records.episode import read_json
from stages.reporting import annotation_uses, board, step_credit_page
from stages.reporting.diagram import mermaid
from stages.reporting.figures.outcome import success_bars
from stages.reporting.generated_blocks import Block, block_names, documents, filled, link, write_or_check
from stages.reporting.results import check_evaluation, comparisons_list, markdown_table
from stages.reporting.style import drawing, to_svg
from stages.runtime.command import command
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.card import Card, Composition

COMMAND = "python -m stages.reporting.documents"
FIGURE = Path("docs/figures/lifecycle.svg")
EVALUATION = Path("reports/evaluation.json")
KEPT = Path("reports/profiles")
"""reports/evaluation.json of runs with other parameters than the default, under the name of the file in profiles/ they took."""
PROFILES = ("three-domains", "search-and-code")
FAMILIES = (
    "Policy gradients without a critic",
    "Policy gradients with a critic",
    "Step credit and branching",
    "Preference learning",
    "Learning from recorded episodes",
)
"""Of RL methods, in the order of the page."""
METHODS_PAGE = Path("docs/methods.md")


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


def family(method: Composition) -> str:
    """What kind of RL method it is, read from what it is made of."""
    if method.data == "pairs":
        return FAMILIES[3]
    if method.data in ("records", "stored"):
        return FAMILIES[4]
    if method.parts.get("advantage.estimator") in ("gae", "utterance"):
        return FAMILIES[1]
    if {"credit.kind", "branching.kind"} & set(method.parts):
        return FAMILIES[2]
    return FAMILIES[0]


def all_cards() -> dict[str, list[Card]]:
    """The cards of all methods by family: RL, values, design search, merging. Imports torch, through the methods."""
    from stages.algorithms.registry import composition, names
    from stages.designs import tree
    from stages.merging.registry import cards as merge_cards
    from stages.values import heads, q_model

    families: dict[str, list[Card]] = {name: [] for name in FAMILIES}
    for name in names():
        method = composition(name)
        families[family(method)].append(method.card)
    families["Values and search"] = [heads.CARD, q_model.CARD, tree.CARD]
    families["Merging"] = merge_cards()
    return families


def methods_block(document: Path) -> str:
    return "\n\n".join(f"## {name}\n\n{methods_table(cards)}" for name, cards in all_cards().items())


def method_names(document: Path) -> str:
    """A line per family: the titles of its methods."""
    page = link(METHODS_PAGE, document)
    lines = []
    for name, cards in all_cards().items():
        anchor = name.lower().replace(" ", "-")
        lines.append(f"- [{name}]({page}#{anchor}): {'; '.join(card.title for card in cards)}.")
    return "\n".join(lines)


def evaluation_of(root: Path, path: Path, domains: Sequence[str]) -> tuple[dict[str, Any], list[str], float]:
    """What `path` holds, those of `domains` that it has panels of, and its confidence. Raises FileNotFoundError, ValueError."""
    if not (root / path).exists():
        profile = (
            f" with 'profiles/{path.stem}.yaml' applied, then copy reports/evaluation.json there," if path.parent == KEPT else ""
        )
        raise FileNotFoundError(f"{path} does not exist; run 'dvc repro evaluate'{profile} first")
    evaluation = read_json(root / path)
    check_evaluation(evaluation, str(path))
    there = [domain for domain in domains if domain in evaluation["panels"]]
    return evaluation, there, float(evaluation.get("confidence", load_params(root / "params.yaml").evaluate.confidence))


def lifecycle_figure(evaluation: Mapping[str, Any], domains: list[str]) -> str:
    """Success of every model with intervals, a panel for each domain, as an SVG file of its own."""
    with drawing():
        figure = success_bars(evaluation, domains, domains)
        return to_svg(
            figure, "lifecycle", f"Success per model on {', '.join(domains)}, with confidence intervals", standalone=True
        ).text


def claim_counts(root: Path, document: Path) -> str:
    """How many claims have which verdict, with a link to the board."""
    counts = Counter(row.state for row in board.rows(root))
    told = ", ".join(f"{count} {state}" for state, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    experiments = len(board.slugs(root))
    return f"{sum(counts.values())} claims in {experiments} experiments: {told}. [The board]({link(board.PAGE, document)})."


def blocks(root: Path) -> dict[str, Block]:
    """Every block that this command writes, by name."""
    default = load_params(root / "params.yaml").domains

    def table(path: Path, domains: Sequence[str], full: bool) -> str:
        evaluation, there, confidence = evaluation_of(root, path, domains)
        short = markdown_table(evaluation, there, confidence)
        return f"{short}\n{comparisons_list(evaluation, there, confidence)}" if full else short

    def profile(name: str) -> Block:
        overlay = root / "profiles" / f"{name}.yaml"
        return lambda document: table(KEPT / f"{name}.json", yaml.safe_load(overlay.read_text("utf-8"))["domains"], True)

    return {
        "results": lambda document: table(EVALUATION, default, False),
        "results-full": lambda document: table(EVALUATION, default, True),
        "pipeline": lambda document: mermaid(root),
        "methods": methods_block,
        "method-names": method_names,
        "claim-counts": lambda document: claim_counts(root, document),
        **{name: profile(name) for name in PROFILES},
    }


def generated(root: Path) -> dict[Path, str]:
    """What the documents, the figure and the pages of the board should hold, by path relative to `root`.

    Raises FileNotFoundError without the evaluation that a block asks for, ValueError for markers out of order.
    """
    files = filled(root, blocks(root))
    asked = {name for document in documents(root) for name in block_names((root / document).read_text("utf-8"))}
    if asked & {"results", "results-full"}:
        evaluation, domains, _ = evaluation_of(root, EVALUATION, load_params(root / "params.yaml").domains)
        files[FIGURE] = lifecycle_figure(evaluation, domains)
    if (root / board.FOLDER).exists():
        files |= board.pages(root) | step_credit_page.files(root) | annotation_uses.files(root)
    return files


@command
def main() -> int:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Write the generated parts of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    options = parser.parse_args()
    root = Path.cwd()
    try:
        files = generated(root)
    except (FileNotFoundError, ValueError, ParamsError) as error:
        print(f"documents: {error}", file=sys.stderr)
        return 1
    return write_or_check(root, files, options.check, COMMAND)


if __name__ == "__main__":
    raise SystemExit(main())
