"""Timing of two ways to do the same work: alternating order, one warm-up, several repeats, wall and CPU time."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARM_S = 3.0
"""Seconds of a first run after which its start no longer matters."""


@dataclass(frozen=True)
class Options:
    """Options of every scenario. `quick`: tiny sizes, one repeat, no warm-up."""

    root: Path
    """The checkout: params.yaml, data/base, data/raw."""
    scratch: Path
    """Folder for temporary files, removed afterwards."""
    quick: bool = False
    repeats: int = 5
    threads: int = 1
    """Of each of our processes, as resources.threads."""
    workers: int = 2
    """Our processes, as resources.workers."""
    device: str = "cpu"
    precision: str = "float32"
    """Compute precision, as resources.precision."""

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    @property
    def cores(self) -> int:
        """What both sides may use."""
        return self.threads * self.workers

    @property
    def warm_ups(self) -> int:
        return 0 if self.quick else 1

    @property
    def times(self) -> int:
        return 1 if self.quick else self.repeats


@dataclass(frozen=True)
class Side:
    """One way to do the work. `run` does it once and returns the amount of work in the scenario's unit."""

    label: str
    run: Callable[[], float]
    before: Callable[[], None] = lambda: None
    """Untimed preparation of each run."""
    facts: Callable[[], Any] = lambda: None
    """Untimed: what the scenario checks or reports beside times."""
    cpu: Callable[[], float] = time.process_time
    """CPU seconds so far."""
    close: Callable[[], None] = lambda: None


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
    """A scenario's outcome. The n-th samples of ours and theirs are a pair, run back to back.

    `kind`: "rate" (amount per wall second), "seconds" (wall seconds for the same work), or "limit" (seconds against a fixed
    limit). A ratio above 1 means that ours is faster.
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
        """Speed of ours over theirs, per pair."""
        if self.limit is not None:
            return [self.limit / sample.wall for sample in self.ours]
        return [mine.rate / other.rate for mine, other in zip(self.ours, self.theirs, strict=True)]

    def summary(self) -> dict[str, Any]:
        """The entry in summary.json; `low` and `high` are the lowest and highest ratio of a pair."""
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
    """`value` to `digits` significant digits."""
    return float(f"{value:.{digits}g}")


def timed(side: Side) -> Sample:
    """Run once, after a garbage collection."""
    side.before()
    gc.collect()
    cpu, wall = side.cpu(), time.perf_counter()
    amount = side.run()
    wall = time.perf_counter() - wall
    return Sample(amount, wall, side.cpu() - cpu)


def turns(count: int) -> list[tuple[int, int]]:
    """The order within each pair, 0 1, 1 0, 0 1, ..., so that drift favours neither side."""
    return [(0, 1) if number % 2 == 0 else (1, 0) for number in range(count)]


def alternate(ours: Side, theirs: Side, options: Options, warm: bool = False) -> tuple[list[Sample], list[Sample]]:
    """Samples of both sides, alternating; warm-ups are discarded. warm: both have run before and need none."""
    sides, warm_ups = (ours, theirs), 0 if warm else options.warm_ups
    samples: tuple[list[Sample], list[Sample]] = ([], [])
    for number, order in enumerate(turns(warm_ups + options.times)):
        for which in order:
            sample = timed(sides[which])
            if number >= warm_ups:
                samples[which].append(sample)
    return samples


def alone(side: Side, options: Options) -> list[Sample]:
    """Samples of one side, after a warm-up."""
    return [timed(side) for _ in range(options.warm_ups + options.times)][options.warm_ups :]


def fastest(
    candidates: Sequence[Callable[[], Side]], options: Options, tell: Callable[[str], object] = lambda line: None
) -> tuple[Side, dict[str, float]]:
    """The fastest of several settings, by one run (after a warm-up, unless that took WARM_S), and the rate of each; in quick mode
    the first, unmeasured. The others are closed. tell: called with a line per setting.

    Settings that fail on this machine are skipped; raises RuntimeError if all fail.
    """
    if options.quick or len(candidates) == 1:
        return candidates[0](), {}
    rates: dict[str, float] = {}
    best: Side | None = None
    errors = []
    for make in candidates:
        try:
            side = make()
            sample = timed(side)
            rates[side.label] = rounded((sample if sample.wall > WARM_S else timed(side)).rate)
            tell(f"{side.label}: {rates[side.label]:.4g} per second")
        except (RuntimeError, ValueError, NotImplementedError, ImportError) as error:
            errors.append(f"{type(error).__name__}: {error}")
            tell(errors[-1])
            continue
        slower, best = (best, side) if best is None or rates[side.label] > rates[best.label] else (side, best)
        if slower is not None:
            slower.close()
    if best is None:
        raise RuntimeError("all settings failed: " + "; ".join(errors))
    return best, rates
