"""`python -m stages.reporting.documents` writes the generated parts of README.md and docs/; `--check` only compares them.

Blocks, found by their markers (stages/reporting/generated_blocks.py):

- `results`, `results-full` (with paired comparisons) and one per profile in PROFILES: from evaluations in reports/
- `stages`: what each stage added and cost, from the evaluation, the kept run of it and the experiment lifecycle
- `spread`, `spread-full`, `contributions`: the lifecycle over seeds, and what each specialist contributes to the merged model,
  from reports/spread.parquet
- `pipeline`: from dvc.yaml
- `methods`, `method-names`: from the cards of the methods
- `claim-counts`: from reports/claims

Also written: docs/figures/lifecycle.svg, the pages of reports/claims, reports/spread.json, reports/annotation_uses.json and
reports/control.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stages.claims.experiment import FOLDER
from stages.params import load_params
from stages.records.episode import read_json
from stages.reporting import annotation_uses, contributions, control_summary, spread, stage_gains, step_credit_page
from stages.reporting.board.index import claim_counts
from stages.reporting.board.pages import pages
from stages.reporting.board.rows import Row, rows
from stages.reporting.diagram import mermaid
from stages.reporting.figures.outcome import success_bars
from stages.reporting.generated_blocks import Block, block_names, documents, filled, link, markdown_table, write_or_check
from stages.reporting.kept import read_kept
from stages.reporting.results import check_evaluation, comparisons_list, on_panels, success_table
from stages.reporting.style import drawing, to_svg
from stages.runtime.command import command
from stages.runtime.validation import ParamsError
from stages.runtime.yaml_files import read_yaml

if TYPE_CHECKING:
    from stages.algorithms.card import Card, Composition

COMMAND = "python -m stages.reporting.documents"
FIGURE = Path("docs/figures/lifecycle.svg")
EVALUATION = Path("reports/evaluation.json")
KEPT = Path("reports/profiles")
"""reports/evaluation.json of runs with a profile, named like the file in profiles/."""
PROFILES = ("three-domains", "search-and-code", "seven-domains", "gemma-270m")
FAMILIES = (
    "Policy gradients without a critic",
    "Policy gradients with a critic",
    "Step credit and branching",
    "Preference learning",
    "Offline learning",
)
"""Families of RL methods, in the order of the page."""
METHODS_PAGE = Path("docs/methods.md")


def methods_table(cards: Iterable[Card]) -> str:
    """One row per method: switch, title, equation, what it reduces to, paper."""
    lines = ((f"`{card.switch}`", card.title, card.equation, card.reduces_to, card.paper) for card in cards)
    return markdown_table(("switch", "method", "in one line", "reduces to", "paper"), lines)


def family(method: Composition) -> str:
    """The family of an RL method, inferred from its data and parts."""
    if method.data == "pairs":
        return FAMILIES[3]
    if method.data in ("offline_replay", "offline", "paths", "attempts"):
        return FAMILIES[4]
    if method.parts.get("advantage.estimator") in ("gae", "team", "utterance"):
        return FAMILIES[1]
    if {"credit.kind", "branching.kind"} & set(method.parts):
        return FAMILIES[2]
    return FAMILIES[0]


def all_cards() -> dict[str, list[Card]]:
    """The cards of all methods by family. The methods import torch."""
    from stages.algorithms.registry import composition, names
    from stages.constraints import formula
    from stages.control.advice import rladapter
    from stages.control.exact import r2pvi, shapley
    from stages.control.games import risk_averse
    from stages.control.reach import ravl
    from stages.control.soft_q import arsq
    from stages.conversion import rounds
    from stages.designs import tree
    from stages.judging import utilities
    from stages.merging.registry import cards as merge_cards
    from stages.values import gaussian, heads, lipschitz, q_model, vagram

    families: dict[str, list[Card]] = {name: [] for name in FAMILIES}
    for name in names():
        method = composition(name)
        families[family(method)].append(method.card)
    families["Values and search"] = [heads.CARD, q_model.CARD, tree.CARD]
    control = [arsq, gaussian, lipschitz, r2pvi, ravl, risk_averse, rladapter, shapley, vagram]
    families["Control"] = [method.CARD for method in control]
    families["Around training"] = [utilities.CARD, formula.CARD, rounds.CARD]
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
    """(content of `path`, those of `domains` with a panel in it, confidence level). Raises FileNotFoundError, ValueError."""
    if not (root / path).exists():
        made_by = f"make lifecycle PROFILE={path.stem}" if path.parent == KEPT else "dvc repro evaluate"
        raise FileNotFoundError(f"{path} does not exist; run '{made_by}' first")
    evaluation = read_json(root / path)
    check_evaluation(evaluation, str(path))
    if not on_panels(evaluation):
        raise ValueError(
            f"{path} has results on validation tasks, and documents show those on the frozen panels; set evaluate.split to test "
            "and evaluate again"
        )
    evaluated = [domain for domain in domains if domain in evaluation["panels"]]
    return evaluation, evaluated, float(evaluation.get("confidence", load_params(root / "params.yaml").evaluate.confidence))


def lifecycle_figure(evaluation: Mapping[str, Any], domains: list[str]) -> str:
    """Success of every model with intervals, a panel per domain, as a standalone SVG file."""
    title = f"Success per model on {', '.join(domains)}, with confidence intervals"
    with drawing():
        return to_svg(success_bars(evaluation, domains, domains), "lifecycle", title, standalone=True).text


def blocks(root: Path) -> dict[str, Block]:
    """The blocks that this command writes, by name."""
    default = load_params(root / "params.yaml").domains

    @cache
    def board() -> list[Row]:
        return rows(root)

    def table(path: Path, domains: Sequence[str], full: bool) -> str:
        evaluation, evaluated, confidence = evaluation_of(root, path, domains)
        short = success_table(evaluation, evaluated, confidence)
        return f"{short}\n{comparisons_list(evaluation, evaluated, confidence)}" if full else short

    def profile(name: str) -> Block:
        def text(document: Path) -> str:
            overlay = read_yaml(root / "profiles" / f"{name}.yaml")
            domains = [*overlay["domains"], *overlay.get("evaluate", {}).get("transfer", [])]
            return table(KEPT / f"{name}.json", domains, True)

        return text

    def stages(document: Path) -> str:
        evaluation, evaluated, _ = evaluation_of(root, EVALUATION, default)
        return stage_gains.block(root, evaluation, evaluated, read_kept(root), document)

    return {
        "results": lambda document: table(EVALUATION, default, False),
        "stages": stages,
        "spread": lambda document: spread.short(spread.summary(spread.load_rows(root))),
        "spread-full": lambda document: spread.full(spread.summary(spread.load_rows(root))),
        "contributions": lambda document: contributions.block(spread.load_rows(root)),
        "results-full": lambda document: table(EVALUATION, default, True),
        "pipeline": lambda document: mermaid(root),
        "methods": methods_block,
        "method-names": method_names,
        "claim-counts": lambda document: claim_counts(board(), document),
        **{name: profile(name) for name in PROFILES},
    }


def generated(root: Path) -> dict[Path, str]:
    """The generated files (documents, figure, pages of the board) by path relative to `root`.

    Raises FileNotFoundError if the evaluation for a block is missing, ValueError for markers out of order.
    """
    files = filled(root, blocks(root))
    used = {name for document in documents(root) for name in block_names((root / document).read_text("utf-8"))}
    if used & {"results", "results-full"}:
        evaluation, domains, _ = evaluation_of(root, EVALUATION, load_params(root / "params.yaml").domains)
        files[FIGURE] = lifecycle_figure(evaluation, domains)
    if used & {"spread", "spread-full"}:
        files |= spread.files(root)
    if (root / FOLDER).exists():
        files |= pages(root) | step_credit_page.files(root) | annotation_uses.files(root)
    return files | control_summary.files(root)


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
