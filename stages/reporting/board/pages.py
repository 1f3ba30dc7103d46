"""All files of the board: the index, a page per experiment, and their figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from stages.claims.code import code_of
from stages.claims.experiment import FOLDER, Experiment
from stages.claims.results import Results, result_path
from stages.records.episode import read_json
from stages.reporting.board.experiment_page import Saved, experiment_page, page_of
from stages.reporting.board.figures import (
    FOREST,
    curves_figure,
    curves_svg,
    forest_svg,
    read_curves,
    tradeoff_figure,
    tradeoff_svg,
)
from stages.reporting.board.index import PAGE, index_page, total_cost
from stages.reporting.board.rows import entries
from stages.reporting.figures.claim_curves import Curve

NO_CURVES = "No curves are stored: the runs were made before curves were kept, or there are none yet."


def _stored(root: Path, slugs: Iterable[str]) -> Iterable[Saved]:
    """The results of all experiments, also of those that have changed since."""
    return (read_json(path) for slug in slugs if (path := result_path(root, slug)).exists())


def _without_curve(arms: Iterable[str], curves: Mapping[str, Sequence[Curve]], saved: Saved) -> Iterable[str]:
    """The arms of which runs have no curve, with the number of these runs if others have one."""
    done = Counter(name.rpartition("/")[0] for name in saved["runs"])
    for arm in arms:
        drawn = len(curves.get(arm, ()))
        if not drawn:
            yield f"`{arm}`"
        elif drawn < done[arm]:
            yield f"`{arm}` ({done[arm] - drawn} of {done[arm]} runs)"


def _curves(root: Path, slug: str, experiment: Experiment, saved: Saved | None) -> tuple[str, dict[Path, str]]:
    """(the text about the learning curves, "" if nothing trains; the figure by path)."""
    training = [arm for arm in experiment.arms if experiment.trains(arm)]
    if not training:
        return "", {}
    curves, unit = read_curves(root, slug, experiment) if saved is not None else ({}, "")
    if not curves:
        return NO_CURVES, {}
    figure = curves_figure(slug)
    missing = list(_without_curve(training, curves, saved)) if saved is not None else []
    note = f" No curve: {', '.join(missing)}." if missing else ""
    text = (
        f"![Success while training, by arm]({figure.relative_to(FOLDER).as_posix()})\n\nSuccess of the episodes played while "
        f"training. Thin: one seed; bold: their mean, up to the end of the shortest run; grey: the means of the other arms.{note}"
    )
    return text, {figure: curves_svg(slug, experiment.method, curves, unit)}


def _tradeoff(slug: str, experiment: Experiment, saved: Saved | None) -> tuple[str, dict[Path, str]]:
    """(the text about cost against success, "" without its figure; the figure by path)."""
    drawn = tradeoff_svg(slug, experiment, saved) if saved is not None else None
    if drawn is None:
        return "", {}
    figure = tradeoff_figure(slug)
    text = (
        f"![Cost on the panel against success, by arm]({figure.relative_to(FOLDER).as_posix()})\n\nMeans over seeds; bars: from "
        f"the lowest to the highest seed. The line joins {', '.join(f'`{arm}`' for arm in experiment.tradeoff)}."
    )
    return text, {figure: drawn}


def pages(root: Path) -> dict[Path, str]:
    """The index, reports/claims/README.md, a page per experiment, and their figures, by path relative to `root`."""
    found = entries(root)
    files: dict[Path, str] = {}
    for slug, entry in found.items():
        experiment, saved = entry.experiment, entry.saved
        text, drawn = _curves(root, slug, experiment, saved)
        traded, curve = _tradeoff(slug, experiment, saved)
        code = code_of(root, experiment.program) if saved is not None else None
        page = experiment_page(entry, text, code, Results.load(root, slug).value, traded)
        files |= {page_of(slug): page, **drawn, **curve}
    claims = [row for entry in found.values() for row in entry.rows]
    plot = forest_svg(claims)
    if plot is not None:
        files[FOREST] = plot
    shown = FOREST.relative_to(FOLDER).as_posix() if plot is not None else None
    files[PAGE] = index_page(found, total_cost(_stored(root, found)), shown)
    return files
