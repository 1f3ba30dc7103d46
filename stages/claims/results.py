"""reports/claims/<slug>.json: the metrics of an experiment's runs so far, its gate, what was tuned, and the verdicts on its
claims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from stages.claims.experiment import FOLDER
from stages.claims.plan import Outcome, Run
from stages.claims.rows import Tables
from stages.records.episode import read_json

NOT_RUN, OUTDATED = "not run yet", "changed since it was run"
"""Why an experiment has no verdicts."""


def result_path(root: Path, slug: str) -> Path:
    return root / FOLDER / f"{slug}.json"


def cost_in_seconds(outcome: Mapping[str, Any]) -> float:
    """Of processors, for a stored run and the start that it made, if it made one."""
    return outcome["seconds"] + outcome.get("start_seconds", 0.0)


@dataclass
class Results:
    """Outcomes by run name, each with its run's key, and their tables."""

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    starts: dict[str, float] = field(default_factory=dict)
    """Arm -> panel success of its initial policy."""
    start_keys: dict[str, str] = field(default_factory=dict)
    """Arm -> `start_key` of the settings that this was measured with, where a session recorded it."""
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Tuning runs by name, each with its key and its success on validation tasks."""
    confirmed: dict[str, Any] = field(default_factory=dict)
    """`code`, the hash of the code that repeated some runs, and `runs`, the names of those that gave the same results."""
    place: tuple[Path, str] | None = None
    """Checkout and experiment that they are stored in."""
    environment: str = ""

    @cached_property
    def tables(self) -> Tables:
        """The runs' rows and curves, read when they are first used."""
        return Tables.load(*self.place) if self.place else Tables()

    @classmethod
    def load(cls, root: Path, slug: str) -> Results:
        """The stored results; empty if there are none."""
        path = result_path(root, slug)
        if not path.exists():
            return cls()
        saved = read_json(path)
        found = cls(saved["runs"], saved["start"], trials=saved["trials"], place=(root, slug), environment=saved["environment"])
        found.start_keys, found.confirmed = saved.get("start_keys", {}), saved.get("confirmed", {})
        return found

    def value(self, run: str, metric: str) -> float | None:
        """A run's metric: as it was measured, or computed from its tables; None if it has neither."""
        if run not in self.outcomes:
            return None
        measured = self.outcomes[run]["metrics"].get(metric)
        return self.tables.value(run, metric) if measured is None else float(measured)

    def add(self, run: Run, outcome: Outcome) -> None:
        """Store what a run found."""
        self._store(run)[run.name] = {
            **{name: getattr(outcome, name) for name in ("metrics", "environment_steps", "seconds", "commit", "code")},
            **({"start_seconds": outcome.start_seconds} if outcome.start_seconds else {}),
            "key": run.key,
        }
        if run.trial:
            return
        self.tables.drop_others(set(self.outcomes) - {run.name})
        self.tables.rows |= {run.name: outcome.rows} if outcome.rows else {}
        self.tables.curves |= {run.name: outcome.curve} if outcome.curve else {}
        if outcome.start is not None:
            self.starts[run.arm] = outcome.start  # the same for every seed

    def _store(self, run: Run) -> dict[str, dict[str, Any]]:
        return self.trials if run.trial else self.outcomes

    def missing(self, runs: Iterable[Run]) -> list[Run]:
        """Runs that are not done, were done with other parameters, or lack a metric that they must have."""
        return [run for run in runs if not self._done(run)]

    def _done(self, run: Run) -> bool:
        found = self._store(run).get(run.name)
        return found is not None and found["key"] == run.key and self._has(run, run.name)

    def _has(self, run: Run, name: str) -> bool:
        """Whether what is stored as `name` has the metrics that the run must have."""
        return run.trial or all(self.value(name, metric) is not None for metric in run.required)

    def drop_others(self, keys: Mapping[str, set[str]]) -> int:
        """Drop outcomes whose key is not among those of the run's name; how many."""
        kept = {name: one for name, one in self.outcomes.items() if one["key"] in keys.get(name, ())}
        dropped, self.outcomes = len(self.outcomes) - len(kept), kept
        self.tables.drop_others(set(kept))
        return dropped

    def drop_starts(self, keys: Mapping[str, str]) -> None:
        """Drop what is known of the starts of arms that are not among `keys`, or whose key is another. A start without a key is
        that of the arm's runs, and goes with the last of them."""
        with_runs = {name.rpartition("/")[0] for name in self.outcomes}
        for arm in {*self.starts, *self.start_keys}:
            key = self.start_keys.get(arm)
            if (key is None and arm not in with_runs) or (key is not None and key != keys.get(arm)):
                self.start_keys.pop(arm, None)
                self.starts.pop(arm, None)

    def reuse(self, sources: Iterable[Results], runs: Iterable[Run]) -> int:
        """Copy missing runs from results with equal parameters, seed and metrics; how many."""
        known = {
            (trial, one["key"]): (results, name)
            for results in sources
            for trial, store in ((False, results.outcomes), (True, results.trials))
            for name, one in store.items()
        }
        reused = 0
        for run in self.missing(runs):
            source, name = known.get((run.trial, run.key), (None, ""))
            if source is None or not source._has(run, name):
                continue
            self._store(run)[run.name] = source._store(run)[name]
            if not run.trial:
                self.tables.copy(source.tables, name, run.name)
                arm = name.rpartition("/")[0]
                self.starts |= {run.arm: source.starts[arm]} if arm in source.starts else {}
            reused += 1
        return reused
