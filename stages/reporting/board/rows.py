"""The board: one row per claim, from the experiments and their results in reports/claims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER, Claim, Experiment, is_share, load_experiment, slugs
from stages.claims.judging import GATE_FAILED
from stages.claims.results import NOT_RUN, OUTDATED, result_path
from stages.claims.sequential import adjusted, discoveries
from stages.records.episode import read_json
from stages.runtime.validation import ParamsError

NOTHING = "–"
NOT_JUDGED = "not judged yet"
VERDICTS = ("reproduced", "not reproduced", "undecided", GATE_FAILED, NOT_JUDGED)


@dataclass(frozen=True)
class Row:
    """A claim, the `number`-th of its experiment, and its entry in the results; `result` is None before the first run.

    correction: its p adjusted for all differences tested on the board (Benjamini-Hochberg), and whether the difference is kept;
    None if it is not among them.
    """

    slug: str
    number: int
    experiment: Experiment
    claim: Claim
    result: Mapping[str, Any] | None
    state: str
    """The verdict, or why there is none."""
    correction: tuple[float, bool] | None = None

    @property
    def judged(self) -> Mapping[str, Any] | None:
        """`result`, if a look was taken."""
        return self.result if self.result is not None and self.result["difference"] is not None else None

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        return self.state if self.state in VERDICTS else NOT_JUDGED

    @property
    def unconfirmed(self) -> bool:
        """Whether the claim was added after a look at the results that it is judged by."""
        return self.claim.exploratory and not self.claim.fresh_from

    @property
    def tested(self) -> bool:
        """Whether its p, which is of "no difference", is evidence for or against the claim."""
        return self.judged is not None and self.claim.kind == "superiority" and not self.unconfirmed

    def signed(self, value: float) -> str:
        """A signed difference: in points for shares, else in the metric's unit."""
        text = (
            f"{100 * value:+z.1f}" if is_share(self.claim.metric) else f"{value:+,.0f}" if abs(value) >= 100 else f"{value:+.3g}"
        )
        return text.replace("-", "−")

    @property
    def difference(self) -> str:
        return self.estimate(self.judged) if self.judged is not None else NOTHING

    def estimate(self, numbers: Mapping[str, Any]) -> str:
        """`difference`, `low` and `high` of a claim or look: `+4.0 points (+1.0 to +7.0)`."""
        unit = " points" if is_share(self.claim.metric) else ""
        low, high = self.signed(numbers["low"]), self.signed(numbers["high"])
        return f"{self.signed(numbers['difference'])}{unit} ({low} to {high})"

    @property
    def seeds(self) -> str:
        """Seeds of the last look, or those done of the first look's."""
        if self.judged is not None:
            return str(self.judged["seeds"]) if self.judged["seeds"] else NOTHING
        if self.result is None:
            return NOTHING
        done, first = seeds_done(self.experiment, self.result), self.experiment.looks[0]
        return f"{done} of {first}" if done < first else str(done)


def seeds_done(experiment: Experiment, result: Mapping[str, Any]) -> int:
    """Seeds that both arms of a claim have."""
    return min((len(values) for arm, values in result["per_seed"].items() if not experiment.seedless(arm)), default=0)


def saved_results(root: Path, slug: str, experiment: Experiment) -> Mapping[str, Any] | None:
    """The results of the experiment as it is now; None if it has none or was changed since."""
    path = result_path(root, slug)
    saved = read_json(path) if path.exists() else None
    return saved if saved is not None and saved["fixed"] == experiment.fixed else None


def no_results(root: Path, slug: str) -> str:
    """Why an experiment has none."""
    return OUTDATED if result_path(root, slug).exists() else NOT_RUN


def _state(root: Path, slug: str, experiment: Experiment, result: Mapping[str, Any] | None) -> str:
    if result is None:
        return no_results(root, slug)
    return result["verdict"] or f"{seeds_done(experiment, result)} of {experiment.looks[0]} seeds"


def _check_explained(row: Row) -> None:
    missing = [key for key in ("checked", "world") if not getattr(row.claim, key)]
    if row.state == "not reproduced" and missing:
        raise ParamsError(
            f"{FOLDER}/{row.slug}.yaml: claim {row.number} was not reproduced, and its key {' and '.join(map(repr, missing))} is "
            f"missing; check the implementation against numbers worked out by hand and a brute-force reference and describe that "
            f"in 'checked', and say in 'world' whether this environment could show the effect at all"
        )


def experiments(root: Path) -> dict[str, Experiment]:
    """All experiments by slug, galleries too."""
    return {slug: load_experiment(root / FOLDER / f"{slug}.yaml") for slug in slugs(root)}


def rows(root: Path) -> list[Row]:
    """All claims, in order. Raises ParamsError for a claim that was not reproduced and lacks `checked` or `world`."""
    return _rows(root, experiments(root))


def _rows(root: Path, all_experiments: Mapping[str, Experiment]) -> list[Row]:
    found = []
    for slug, experiment in all_experiments.items():
        saved = saved_results(root, slug, experiment)
        for index, claim in enumerate(experiment.claims):
            result = saved["claims"][index] if saved is not None else None
            row = Row(slug, index + 1, experiment, claim, result, _state(root, slug, experiment, result))
            _check_explained(row)
            found.append(row)
    ps = [row.result["p"] for row in found if row.tested and row.result is not None]
    corrections = iter(zip(adjusted(ps), discoveries(ps), strict=True))
    return [replace(row, correction=next(corrections)) if row.tested else row for row in found]


@dataclass(frozen=True)
class Entry:
    """An experiment on the board: the rows of its claims, which a gallery has none of, and its results as it is now."""

    slug: str
    experiment: Experiment
    rows: list[Row]
    saved: Mapping[str, Any] | None
    state: str
    """Why there are no results, if there are none."""


def entries(root: Path) -> dict[str, Entry]:
    """All experiments by slug. Raises what `rows` does."""
    found = experiments(root)
    claims = by_experiment(_rows(root, found))
    return {
        slug: Entry(slug, one, claims.get(slug, []), saved_results(root, slug, one), no_results(root, slug))
        for slug, one in found.items()
    }


def by_experiment(found: list[Row]) -> dict[str, list[Row]]:
    """The rows of each experiment, by slug."""
    grouped: dict[str, list[Row]] = {}
    for row in found:
        grouped.setdefault(row.slug, []).append(row)
    return grouped
