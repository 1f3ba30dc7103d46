"""Differences between two runs: parameters, code, success. Pure functions of `Run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.evaluation.statistics import Comparison, StatisticsError, compare
from stages.params import parse_params
from stages.reporting.blocks import scalars
from stages.reporting.kept import Run, Success
from stages.reporting.results import model_order

ABSENT = "–"


@dataclass(frozen=True)
class SuccessChange:
    """Success of one model on one domain, before and now. `test`: the paired test of now against before; None for the reason in
    `why`."""

    domain: str
    model: str
    before: Success | None
    now: Success | None
    test: Comparison | None = None
    why: str = ""

    @property
    def equal(self) -> bool:
        """Whether every task had the same outcome."""
        return self.test is not None and self.test.difference == self.test.low == self.test.high == 0.0


def parameter_changes(before: Run, now: Run) -> list[tuple[str, str, str]]:
    """(dotted key, value before, value now) of every parameter that differs, in the order of params.yaml. Null looks like absent;
    a parameter that one of the runs does not know had its default there. Domains that neither run has are left out."""
    old, new = dict(scalars(before.params)), dict(scalars(now.params))
    sections: dict[str, dict[str, Any]] = {name: {} for name in now.params["domains"]}
    usual = dict(scalars(parse_params({"domains": list(sections), "per_domain": sections}).model_dump(mode="json")))
    domains = {*sections, *before.params["domains"]}
    found = []
    for key in [*new, *(key for key in old if key not in new)]:
        then, today = old.get(key, ABSENT), new.get(key, ABSENT)
        same = then == today or old.get(key, usual.get(key)) == new.get(key, usual.get(key))
        of_others = key.startswith("per_domain.") and key.split(".")[1] not in domains
        if not same and not of_others:
            found.append((key, then, today))
    return found


def set_before_alone(change: tuple[str, str, str]) -> bool:
    """Whether an item of `parameter_changes` has no value now. An earlier version's parameters are such, and the values that it
    stored where the method chooses; a key of `per_domain`, which holds only what params.yaml sets, was removed by an edit."""
    return change[2] == ABSENT and not change[0].startswith("per_domain.")


def code_changes(before: Run, now: Run) -> list[tuple[str, str]]:
    """(path, "changed" | "new" | "removed") of code that differs, sorted."""
    kinds = {path: "new" for path in now.code if path not in before.code}
    kinds |= {path: "removed" for path in before.code if path not in now.code}
    kinds |= {path: "changed" for path in now.code if path in before.code and now.code[path] != before.code[path]}
    return sorted(kinds.items())


def _test(before: Run, now: Run, model: str, domain: str, clusters: Mapping[str, str]) -> tuple[Comparison | None, str]:
    """(paired test of now against before, reason if there is none)."""
    if before.panels.get(domain) != now.panels.get(domain):
        return None, "panels differ"
    then, today = before.solved.get(model, {}).get(domain), now.solved.get(model, {}).get(domain)
    if not then or not today or len(then) != len(today) or len(clusters) != len(today):
        return None, "no outcomes per task"
    tasks = sorted(clusters)
    evaluate = now.params["evaluate"]
    try:
        found = compare(
            [count / now.attempts for count in today],
            tasks,
            [count / before.attempts for count in then],
            tasks,
            clusters=clusters,
            confidence=evaluate["confidence"],
            resamples=evaluate["resamples"],
            seed=now.params["seed"],
        )
    except StatisticsError as error:
        return None, str(error)
    return found, ""


def success_changes(before: Run, now: Run, outcomes: Sequence[Mapping[str, Any]]) -> list[SuccessChange]:
    """Every model on every domain of either run, in the order of the run. `outcomes`: rows of this run's evaluation, for the
    clusters of tasks."""
    clusters: dict[str, dict[str, str]] = {}
    for row in outcomes:
        clusters.setdefault(row["domain"], {})[row["task_id"]] = row["cluster"]
    domains = list(dict.fromkeys([*now.params["domains"], *now.panels, *before.panels]))
    changes = []
    for domain in domains:
        for model in model_order(sorted({*before.success, *now.success}), domains):
            then, today = before.success.get(model, {}).get(domain), now.success.get(model, {}).get(domain)
            if then is None and today is None:
                continue
            test, why = None, "only before" if today is None else "only now"
            if then is not None and today is not None:
                test, why = _test(before, now, model, domain, clusters.get(domain, {}))
            changes.append(SuccessChange(domain, model, then, today, test, why))
    return changes
