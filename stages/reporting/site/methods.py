"""A page per published method: formula, switch, what it assumes, the evidence on the board, and its learning curve."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

from pydantic import BaseModel

from stages.algorithms.registry import composition, names
from stages.claims.experiment import Experiment
from stages.records.card import Card
from stages.records.sections import deep_merge
from stages.reporting.board.experiment_page import page_of
from stages.reporting.board.figures import curves_figure
from stages.reporting.board.rows import Entry, Row
from stages.reporting.documents import all_cards
from stages.reporting.generated_blocks import link, markdown_table
from stages.reporting.site.method_curves import Picture, method_pictures

FOLDER = Path("docs/methods")
NO_EVIDENCE = "No experiment of the board uses it yet. `python -m stages.claims new` writes one; see [the board]({board})."
CONTROL_FIGURES = "Its problem is evaluated at the end only: the page of [lane control]({control}) has the figures."
NO_CURVE = "It does not train a policy, so there is no learning curve."


def page_path(card: Card) -> Path:
    return FOLDER / f"{card.slug}.md"


def figure_path(card: Card) -> Path:
    return FOLDER / "figures" / f"{card.slug}.svg"


def _keys(text: str) -> set[str]:
    """The dotted keys, with their values where it has them, that a switch names: `rl.algorithm: arpo`."""
    return set(re.findall(r"[a-z_]+(?:\.[a-z_]+)+(?:: ?[\w+]+)?", text.replace(": ", ":")))


def _papers(text: str) -> set[str]:
    """arXiv's numbers."""
    return set(re.findall(r"\b\d{4}\.\d{4,5}\b", text))


def concerns(experiment: Experiment, card: Card) -> bool:
    """Whether an experiment is about the method, or compares with it."""
    if _keys(card.switch) & _keys(experiment.switch):
        return True
    if experiment.lane == "control" and _papers(card.paper) & _papers(experiment.paper):
        return True
    trained = (deep_merge(experiment.shared, arm or {}) for arm in experiment.arms.values())
    return any(values.get("rl", {}).get("algorithm") == card.slug for values in trained)


def _set(section: BaseModel) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_unset=True)


def _switch(card: Card, parts: Mapping[str, Any]) -> str:
    section, _, value = card.switch.partition(".algorithm: ")
    recipe = f"    {section}: {{algorithm: {value}}}" if value else f"    {card.switch}"
    if not parts:
        return recipe
    table = markdown_table(
        ("key", "value"), ((f"`rl.{key}`", f"`{json.dumps(one, default=_set)}`") for key, one in parts.items())
    )
    return f"{recipe}\n\nIt sets these keys unless you set them:\n\n{table}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _evidence(of_card: Mapping[str, list[Row]], document: Path) -> str:
    if not of_card:
        return NO_EVIDENCE.format(board=link("reports/claims/README.md", document))
    header = ("experiment", "claim", "verdict", "difference (interval)", "seeds")
    lines = (
        (f"[{slug} {row.number}]({link(page_of(slug), document)})", row.claim.says, row.state, row.difference, row.seeds)
        for slug, rows in of_card.items()
        for row in rows
    )
    return markdown_table(header, lines)


def _curve(card: Card, of_card: Mapping[str, list[Row]], picture: Picture | None, document: Path, root: Path) -> str:
    """The method's own curve, and those of the experiments that train; or why there are none."""
    parts = [f"![Learning curve of {card.title}]({link(figure_path(card), document)})\n\n{picture[0]}"] if picture else []
    training = [slug for slug, rows in of_card.items() if any(map(rows[0].experiment.trains, rows[0].experiment.arms))]
    parts += [
        f"![Success while training, by arm, in {slug}]({link(curves_figure(slug), document)})"
        for slug in training
        if (root / curves_figure(slug)).exists()
    ]
    if parts:
        return "\n\n".join(parts)
    if training:
        commands = ", ".join(f"`make claims METHOD={slug}`" for slug in training)
        return f"Not drawn yet, since no run has stored its curve: {commands}."
    control = any(rows[0].experiment.lane == "control" for rows in of_card.values())
    return CONTROL_FIGURES.format(control=link("docs/control.md", document)) if control else NO_CURVE


def method_page(root: Path, card: Card, experiments: Mapping[str, list[Row]], picture: Picture | None) -> str:
    """The page in Markdown; `experiments`: the board's rows by experiment; `picture`: its own learning curve, if there is one."""
    document = page_path(card)
    parts = composition(card.slug).parts if card.slug in names() else {}
    of_card = {slug: rows for slug, rows in experiments.items() if concerns(rows[0].experiment, card)}
    sections = {
        "Formula": f"```text\n{fill(card.equation, 84)}\n```",
        "Switch": _switch(card, parts),
        "What it assumes": _sentence(card.assumptions),
        "What it reduces to": _sentence(card.reduces_to),
        "Evidence": _evidence(of_card, document),
        "Learning curve": _curve(card, of_card, picture, document, root),
        "Tests": f"{card.tested_by}.",
    }
    return "\n\n".join([f"# {card.title}", f"{card.paper}.", *(f"## {name}\n\n{text}" for name, text in sections.items())]) + "\n"


def method_pages(root: Path, board: Mapping[str, Entry]) -> tuple[dict[str, dict[Path, str]], dict[Path, str]]:
    """(pages by path, by family; their figures by path)."""
    cards: Mapping[str, Iterable[Card]] = all_cards()
    by_slug = {card.slug: card for of_family in cards.values() for card in of_family}
    pictures = method_pictures(root, board, by_slug)
    claims = {slug: entry.rows for slug, entry in board.items() if entry.rows}
    pages = {
        family: {page_path(card): method_page(root, card, claims, pictures.get(card.slug)) for card in of_family}
        for family, of_family in cards.items()
    }
    return pages, {figure_path(by_slug[slug]): svg for slug, (_, svg) in pictures.items()}
