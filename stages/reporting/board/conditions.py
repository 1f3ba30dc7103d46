"""What an experiment's verdicts are conditional on, in sentences: start, panel, tasks, and the code of its runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stages.claims.experiment import Experiment
from stages.control.problems import PROBLEMS

BY_LANE = {
    "rl": "One panel, and one start policy, trained with one seed, which all runs share: another start may give another verdict.",
    "annotate": "One panel. Each seed has its own SFT policy and trees, so verdicts are not about one start.",
    "merge": (
        "One panel per domain, and one SFT policy, trained with one seed, from which each seed's specialists start: another "
        "start may give another verdict."
    ),
    "labels": "One SFT policy, whose trees are grown anew with each seed.",
    "designs": "One table of every design's score, measured once with one model; only the searches differ by seed.",
}
OWN_STARTS = (
    "One panel, and one start policy per arm, trained with one seed: arms differ in stages before rl, and another seed there may "
    "give another verdict."
)


def _tasks(experiment: Experiment, saved: Mapping[str, Any]) -> str:
    """What intervals contain besides seeds."""
    clusters = {look["clusters"] for claim in saved["claims"] for look in claim["looks"]}
    if not clusters:
        return ""
    if experiment.lane == "control":  # no panel of tasks is drawn: seeds are all that is random
        return " Intervals are over seeds."
    if experiment.lane == "labels":
        domain = f"`{experiment.environment}`"
        return f" Intervals are over seeds alone: each has its own known trees, but all have the same tasks of {domain}."
    if clusters == {0}:
        return " Intervals are over seeds alone, so they do not contain the error of drawing other tasks."
    shown = f"{min(clusters - {0})}" if len(clusters - {0}) == 1 else f"{min(clusters - {0})} to {max(clusters)}"
    exception = ", those of metrics without a value per task over seeds alone" if 0 in clusters else ""
    return f" Intervals are over seeds and {shown} clusters of tasks{exception}."


def _older_code(saved: Mapping[str, Any], code: str) -> str:
    """How many runs other code than today's made."""
    done = [*saved["runs"].values(), *saved.get("trials", {}).values()]
    older = sum(one.get("code") != code for one in done)
    if not older:
        return f" All {len(done)} runs were made by the code of this checkout."
    found = saved.get("confirmed", {})
    if found.get("code") == code:
        return f" {older} of {len(done)} runs are of older code; {_repeated(saved, found['runs'])}"
    return (
        f" {older} of {len(done)} runs are of older code: something in the stages that make a run has changed since, which may "
        "or may not bear on them."
    )


def _repeated(saved: Mapping[str, Any], runs: Sequence[str]) -> str:
    """What repeating runs of older code showed."""
    arms = {name.rpartition("/")[0] for name, one in saved["runs"].items() if one["code"] != saved["confirmed"]["code"]}
    repeated = {name.rpartition("/")[0] for name in runs}
    which = "of each of their arms" if arms <= repeated else f"each of {', '.join(sorted(repeated))}"
    return f"one run {which}, repeated with the code of this checkout, gave the same results exactly."


def conditions(experiment: Experiment, saved: Mapping[str, Any] | None, code: str | None) -> str:
    """`code`: hash of the code that a run would have now, None before the first run."""
    if not experiment.claims:
        text = "The panel, and the start policy where arms do not set it themselves. With another seed a run may end elsewhere."
    elif experiment.lane == "control":
        text = f"Nothing but the environment: {PROBLEMS[experiment.environment].random}."
    else:
        text = OWN_STARTS if experiment.lane == "rl" and experiment.start == "own" else BY_LANE[experiment.lane]
    if saved is None or code is None:
        return text
    return text + _tasks(experiment, saved) + _older_code(saved, code)
