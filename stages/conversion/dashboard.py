"""The dashboard of a conversion: the replaceable share, the cost of a call, and what each cluster came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stages.runtime.files import atomic_text

TEMPLATES = Path(__file__).resolve().parent / "templates"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def page(report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> str:
    """The page as HTML; all texts are escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["percent"] = percent
    largest = max([1.0, *(row["cost_per_call"] for row in history)])
    return environment.get_template("dashboard.html.j2").render(report=report, history=history, largest=largest)


def write_dashboard(path: Path, report: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> None:
    atomic_text(path, page(report, history))
