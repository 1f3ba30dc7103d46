"""default_run_seconds, default_run_gigabytes: the last `make lifecycle`, read from the costs that its stages recorded, without
DVC's own time between them; make_suite_seconds: the last `make test`, from its JUnit file; claims: seconds per run of the
experiments on the board.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.measure import Options, Result, Sample, rounded
from benchmarks.startup import SkippedError

SECONDS_LIMIT, MEMORY_LIMIT_GB, TEST_LIMIT_S = 300.0, 4.0, 360.0
TESTS = Path(".bellwether") / "tests.xml"
"""Written by `make test`."""
CLAIMS = Path("reports") / "claims"


@dataclass(frozen=True)
class Span:
    """A stage's run: when it started and ended, CPU seconds, peak bytes of all its processes together."""

    start: float
    end: float
    cpu: float
    peak: float


def recorded(root: Path, domains: Sequence[str], transfer: Sequence[str] = ()) -> dict[str, Span]:
    """Stage (`rl@search`) -> its run on the current inputs on this machine. {} unless all stages ran here: what DVC restored
    from its cache took no time. transfer: the domains of the stage of that name."""
    from stages.runtime.costs import cost_file, current_costs

    spans = {}
    for title, cost in current_costs(root, domains, transfer).items():
        if cost is None:
            return {}
        end = cost_file(root, title).stat().st_mtime
        spans[title] = Span(end - cost.seconds, end, cost.cpu_seconds, cost.peak_tree_bytes)
    return spans


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds in which at least one stage ran: stages run side by side, and an interrupted run has pauses."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return total


def peak_bytes(spans: Sequence[Span]) -> float:
    """The largest sum of the peaks of stages that ran at the same time."""
    return max(sum(other.peak for other in spans if other.start <= span.start < other.end) for span in spans)


def limited(unit: str, value: float, limit: float, cpu: float = 0.0) -> Result:
    return Result(unit, f"the limit of {limit:g} {unit}", "limit", [Sample(1.0, value, cpu)], limit=limit)


def suite_seconds(root: Path) -> float | None:
    """Of the last `make test`; None if it was not run here."""
    path = root / TESTS
    return float(ElementTree.parse(path).getroot()[0].attrib["time"]) if path.exists() else None


def claims(options: Options) -> list[dict[str, str | float]]:
    """A row per experiment on the board: seconds of its runs, of one arm with one seed each."""
    rows: list[dict[str, str | float]] = []
    for path in sorted((options.root / CLAIMS).glob("*.json")):
        runs = json.loads(path.read_text(encoding="utf-8")).get("runs", {})
        if seconds := [run["seconds"] for run in runs.values()]:
            spread = {"median": rounded(statistics.median(seconds)), "low": min(seconds), "high": max(seconds)}
            rows.append({"claim": path.stem, "runs": len(seconds), **spread})
    return rows


def measure(options: Options) -> dict[str, Result]:
    from stages.params import load_params

    params = load_params(options.root / "params.yaml")
    spans = recorded(options.root, params.domains, params.evaluate.transfer)
    tests, results = suite_seconds(options.root), {}
    lacking = "not all stages of the current 'make lifecycle' ran in this checkout"
    if not spans and tests is None:
        raise SkippedError(f"{lacking}, nor has 'make test'")
    if not spans:
        print(f"default_run: {lacking}, so its time and memory are not shown", flush=True)
    if spans:
        cpu = sum(span.cpu for span in spans.values())
        results["default_run_seconds"] = limited("s", busy_seconds(spans.values()), SECONDS_LIMIT, cpu)
        results["default_run_gigabytes"] = limited("GB", peak_bytes(list(spans.values())) / 1e9, MEMORY_LIMIT_GB)
    if tests is not None:
        results["make_suite_seconds"] = limited("s", tests, TEST_LIMIT_S)
    return results
