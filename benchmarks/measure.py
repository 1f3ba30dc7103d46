"""How two ways of doing the same work are timed: alternating order, one warm-up, several repeats, wall and CPU time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Options:
    """What every scenario is given. `quick`: sizes that only show that it works, one repeat, no warm-up."""

    root: Path
    """The checkout: params.yaml, data/base, data/raw."""
    scratch: Path
    """A folder for temporary files, removed afterwards."""
    quick: bool = False
    repeats: int = 5
    threads: int = 2
    device: str = "cpu"
    precision: str = "float32"
    """What layers compute in, as resources.precision."""

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @property
    def warm_ups(self) -> int:
        return 0 if self.quick else 1

    @property
    def times(self) -> int:
        return 1 if self.quick else self.repeats


@dataclass(frozen=True)
class Side:
    """One way to do the work. `run` does all of it once and returns how much that was, in the scenario's own units."""

    label: str
    run: Callable[[], float]
    model: Any = None
    """What it forwards tokens through, where that is counted."""
    before: Callable[[], None] = lambda: None
    """Done before each run, and not timed."""


@dataclass(frozen=True)
class Sample:
    """One run: amount of work, wall and CPU seconds (of all threads)."""

    amount: float
    wall: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.amount / self.wall


@dataclass
class Result:
    """A scenario's outcome. Samples are in order of measurement; the n-th of ours and of theirs are a pair, run back to back.

    `kind`: "rate" (amount per wall second), "seconds" (wall seconds for the same work), or "limit" (seconds against a fixed
    number of them). A ratio above 1 means that ours is the faster one, whatever the kind.
    """

    unit: str
    against: str
    kind: str
    ours: list[Sample]
    theirs: list[Sample] = field(default_factory=list)
    limit: float | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def value(self, sample: Sample) -> float:
        return sample.rate if self.kind == "rate" else sample.wall

    def ratios(self) -> list[float]:
        """Ours over theirs, one for each pair."""
        if self.limit is not None:
            return [self.limit / sample.wall for sample in self.ours]
        return [mine.rate / other.rate for mine, other in zip(self.ours, self.theirs, strict=True)]

    def summary(self) -> dict[str, Any]:
        """What summary.json holds; `low` and `high` are the smallest and the largest ratio of the pairs."""
        ratios = self.ratios()
        theirs = self.limit if self.limit is not None else statistics.median(self.value(sample) for sample in self.theirs)
        return {
            "ratio": {"median": rounded(statistics.median(ratios)), "low": rounded(min(ratios)), "high": rounded(max(ratios))},
            "ours": rounded(statistics.median(self.value(sample) for sample in self.ours)),
            "theirs": rounded(theirs),
            "unit": self.unit,
            "against": self.against,
        }

    def raw(self) -> dict[str, Any]:
        """Every repeat."""
        return {
            **self.summary(),
            "kind": self.kind,
            "repeats": {
                name: [{"amount": s.amount, "wall_s": rounded(s.wall, 6), "cpu_s": rounded(s.cpu, 6)} for s in samples]
                for name, samples in (("ours", self.ours), ("theirs", self.theirs))
                if samples
            },
            "notes": self.notes,
        }


def rounded(value: float, digits: int = 4) -> float:
    """`value` to so many significant digits."""
    return float(f"{value:.{digits}g}")


def timed(side: Side) -> Sample:
    """Run once. Garbage of earlier runs is collected before, not within."""
    side.before()
    gc.collect()
    cpu, wall = time.process_time(), time.perf_counter()
    amount = side.run()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(amount, wall, cpu)


def turns(count: int) -> list[tuple[int, int]]:
    """Who goes first in each pair: 0 1, 1 0, 0 1, ... so that a machine that drifts favours neither."""
    return [(0, 1) if number % 2 == 0 else (1, 0) for number in range(count)]


def alternate(ours: Side, theirs: Side, options: Options) -> tuple[list[Sample], list[Sample]]:
    """Both sides in turns; what the warm-ups measured is thrown away."""
    sides = (ours, theirs)
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for number, order in enumerate(turns(options.warm_ups + options.times)):
        for which in order:
            sample = timed(sides[which])
            if number >= options.warm_ups:
                samples[which].append(sample)
    return samples


def alone(side: Side, options: Options) -> list[Sample]:
    """One side by itself, after its warm-up."""
    return [timed(side) for _ in range(options.warm_ups + options.times)][options.warm_ups :]


def fastest(candidates: Sequence[Callable[[], Side]], options: Options) -> tuple[Side, dict[str, float]]:
    """The best of several settings, by one run after a warm-up, and the rate of each; in quick mode the first, unmeasured.

    This is how "their best setting" is found: on the machine that measures, rather than by belief. Settings that the machine
    cannot run are left out; raises RuntimeError if none can.
    """
    if options.quick or len(candidates) == 1:
        return candidates[0](), {}
    rates: dict[str, float] = {}
    best: Side | None = None
    errors = []
    for make in candidates:
        try:
            side = make()
            timed(side)
            rates[side.label] = rounded(timed(side).rate)
        except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            continue
        if best is None or rates[side.label] > rates[best.label]:
            best = side
    if best is None:
        raise RuntimeError("none of the settings ran: " + "; ".join(errors))
    return best, rates


def merged(results: Sequence[Mapping[str, Result]]) -> dict[str, Result]:
    """All results by name."""
    return {name: result for part in results for name, result in part.items()}
