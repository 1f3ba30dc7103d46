"""reports/claims/README.md: all claims by family, counts of verdicts, what remains after correction for their number, cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER
from stages.claims.results import cost_in_seconds
from stages.reporting.board import cells
from stages.reporting.board.rows import VERDICTS, Entry, Row, by_experiment
from stages.reporting.generated_blocks import link, markdown_table

PAGE = FOLDER / "README.md"
GUARANTEES = "docs/guarantees.md"
FAMILIES = {
    "policy_optimisation": "Policy optimisation",
    "credit": "Credit for single steps",
    "value_learning": "Learning values",
    "annotation": "Uses of the annotations",
    "offline": "Learning offline",
    "budget": "Budgets",
    "merging": "Merging",
    "designs": "Search over agent designs",
}
"""Families of experiments, in the order of the index."""

INTRODUCTION = (
    "`make claims` runs what is missing; `make claims METHOD=lite_ppo` runs one experiment, `make claims PROFILE=gemma-270m` "
    "those on a pre-trained model. Each `<slug>.yaml` was fixed before its first run: arms as overrides of params.yaml, looks at "
    "preset numbers of paired seeds, an equal budget of environment steps, gate, tuning, metric, threshold and margin. Only "
    "wording may change later. `python -m stages.reporting.documents` writes these pages."
)
RULES = (
    "The error probability of 5 % is split over the looks; arms of a comparison that is decided get no further seeds. A "
    "difference is *better* or *worse* if its interval excludes zero, else *equivalent* if it is within the margin by two "
    "one-sided tests (whose interval is narrower than the one shown). A claim of superiority is *reproduced* if its arm is "
    "better by at least the threshold, and *not reproduced* if it is better by less, worse or equivalent. A claim of "
    "non-inferiority is *reproduced* if the one-sided lower bound lies above the negative margin, and *not reproduced* if the "
    "interval lies below it; a claim of equivalence likewise, with both margins. An experiment whose gate fails (the start is "
    "too good or too bad, or the baseline does not learn) decides nothing. Claims marked *exploratory* were added or changed "
    "after a look at results, and only fresh seeds can reproduce them."
)
CAPTION = (
    "Each row is a claim (experiment and number: arm − the one it is compared with); a difference to the right is in the claim's "
    "favour. Metrics other than shares are in multiples of the claim's margin. Claims that are not judged yet, or whose gate "
    "failed, are left out."
)
LIMITS = (
    f"Verdicts that are false because of chance are at most 5 % ([guarantees](../../{GUARANTEES})). No interval contains what no "
    "run showed: eight seeds tell nothing about an arm that fails in one run of twenty, so equal means do not exclude that one "
    "arm fails rarely. Nor do intervals cover another start policy or environment; each page says what its verdicts are "
    "conditional on."
)
CORRECTION = (
    "*p* is that of no difference, over all looks taken; *corrected p* accounts for the number of claims of superiority that are "
    "judged (Benjamini–Hochberg at 5 %) and is bold where the difference is kept. Claims of non-inferiority and equivalence, "
    "which p does not test, and exploratory ones without fresh seeds have neither."
)
HEADER = ("claim", "verdict", "effect", "difference (interval)", "seeds", "p", "corrected p")


def _correction(found: Iterable[Row]) -> str:
    kept = [row.correction[1] for row in found if row.correction is not None]
    if not kept:
        return "No claim of superiority has been judged yet."
    return f"Benjamini–Hochberg keeps **{sum(kept)} of {len(kept)}** differences of the claims of superiority that were judged."


def count_verdicts(found: Iterable[Row]) -> dict[str, int]:
    """Number of claims per verdict, in the order of VERDICTS."""
    counts = Counter(row.verdict for row in found)
    return {name: counts[name] for name in VERDICTS}


def counts_table(found: list[Row]) -> str:
    """A row per family, and one for all."""
    families = {title: [row for row in found if row.experiment.family == name] for name, title in FAMILIES.items()}
    lines = [
        (title, *map(str, count_verdicts(of).values()), str(len(of)))
        for title, of in {**families, "**all**": found}.items()
        if of
    ]
    return markdown_table(("family", *VERDICTS, "claims"), lines, "l" + "r" * (len(VERDICTS) + 1))


def total_cost(results: Iterable[Mapping[str, Any]]) -> str:
    """Of all stored runs; one that several experiments use counts once."""
    distinct = {
        (saved["environment"], one["key"], one["commit"], one["seconds"]): one
        for saved in results
        for one in (*saved["runs"].values(), *saved.get("trials", {}).values())
    }.values()
    spent = cells.cost(sum(one["environment_steps"] for one in distinct), sum(map(cost_in_seconds, distinct)))
    return f"All {len(distinct):,} runs stored: {spent}, counted per run (several run side by side)."


def _name(entry: Entry) -> str:
    """The experiment's name and cost."""
    spent = cells.experiment_cost(entry.saved) if entry.saved is not None else entry.state
    return f"**[{entry.experiment.method}]({entry.slug}.md)** ({entry.experiment.environment}; {spent})"


def _experiment_lines(entry: Entry) -> Iterable[tuple[str, ...]]:
    """A line with the experiment's name and cost, and one per claim."""
    yield (_name(entry), *[""] * (len(HEADER) - 1))
    for row in entry.rows:
        yield cells.says(row), cells.verdict(row), cells.effect(row), cells.difference(row), row.seeds, *cells.p_values(row)


def family_tables(found: Iterable[Entry]) -> Iterable[str]:
    """Heading and table of each family that has experiments with claims."""
    judged = [entry for entry in found if entry.rows]
    for name, title in FAMILIES.items():
        if lines := [line for entry in judged if entry.experiment.family == name for line in _experiment_lines(entry)]:
            yield f"## {title}\n\n{markdown_table(HEADER, lines)}"


def index_page(found: Mapping[str, Entry], spent: str, figure: str | None) -> str:
    """The index. found: by slug; figure: the forest plot's path from the page, if any."""
    claims = [row for entry in found.values() for row in entry.rows]
    parts = ["# Which published claims hold here", f"{_correction(claims)} {spent}", counts_table(claims)]
    if figure is not None:
        parts += [f"![Differences of all judged claims, with intervals, by family]({figure})", CAPTION]
    parts += family_tables(found.values())
    if galleries := [entry for entry in found.values() if not entry.rows]:
        parts += ["## Galleries: how training goes, without claims", "\n".join(f"- {_name(entry)}" for entry in galleries)]
    parts += ["## How claims are judged", INTRODUCTION, RULES, CORRECTION, LIMITS]
    return "\n\n".join(parts) + "\n"


def claim_counts(found: list[Row], document: Path) -> str:
    """Number of claims per verdict in a sentence, with a link from `document` to the board."""
    listed = ", ".join(f"{count} {name}" for name, count in count_verdicts(found).items() if count)
    experiments = len(by_experiment(found))
    return (
        f"{len(found)} claims in {experiments} experiments: {listed}. {_correction(found)} [The board]({link(PAGE, document)})."
    )
