"""Whether an experiment's arms are valid settings, and start alike where they must."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from stages.claims.arms import arm_values, run_values, start_values
from stages.claims.experiment import Experiment, sets_key
from stages.control.problems import PROBLEMS
from stages.designs.settings import parse_search
from stages.params import Params, check_domains, parse_params
from stages.runtime.validation import ParamsError, explain

FEWEST = 4
"""Seeds of the first look. Runs of either of two outcomes differ alike in all of three pairs in 1 of 32 comparisons of equal
arms: three times the first look's level."""


def _check_control(problem: str, values: Mapping[str, Any], source: str) -> None:
    settings = PROBLEMS[problem].settings
    try:
        settings.model_validate(values)
    except ValidationError as error:
        raise ParamsError(explain(error, settings, source)) from error


def _refuse_idle(experiment: Experiment, source: str) -> None:
    """Raise ParamsError for what an arm sets without effect, so that arms which look different would be equal."""
    for arm, overrides in experiment.arms.items():
        if "merge" in overrides and experiment.lane != "merge":
            raise ParamsError(
                f"{source}: arm '{arm}' sets merge, but lane {experiment.lane} merges nothing; to compare merges, set lane to "
                f"merge and environment to several domains, such as textworld+search"
            )
        tune = experiment.tune
        if tune is not None and experiment.tunes(arm) and sets_key(overrides, tune.key):
            raise ParamsError(
                f"{source}: arm '{arm}' sets {tune.key}, which is tuned and replaced; remove it, or replace tune by untuned, "
                f"which says why nothing is tuned"
            )
    if experiment.lane == "rl":
        for number, claim in enumerate(experiment.claims, start=1):
            if claim.metric.startswith(("annotate.", "sft.")):
                raise ParamsError(
                    f"{source}: claim {number} is about {claim.metric}, which all runs of an arm in lane rl share with their "
                    f"start, so that no number of seeds decides it; ask it in an experiment of lane annotate, whose seeds vary it"
                )
    if experiment.claims and experiment.looks[0] < FEWEST:
        raise ParamsError(f"{source}: looks: the first is at {experiment.looks[0]} seeds; bistable runs mislead below {FEWEST}")
    gate = experiment.gate
    for arm in [gate.baseline, *(one.arm for one in gate.require)] if gate else []:
        if experiment.seedless(arm):
            raise ParamsError(
                f"{source}: gate names arm '{arm}', which trains nothing and so has one run where the gate needs {gate.runs}; "
                f"it would never be judged; name an arm that trains"
            )


def check_experiment(experiment: Experiment, params: Mapping[str, Any], source: str) -> dict[str, Params]:
    """Arm -> its parameters ({} in lane control, whose problems have their own settings). Raises ParamsError if an arm's are
    invalid, or if arms that must share a start do not."""
    checked: dict[str, Params] = {}
    starts: dict[str, dict[str, Any]] = {}
    if experiment.lane == "control":
        for arm in experiment.arms:
            _check_control(experiment.environment, arm_values(experiment, arm, params), f"{source}: arm '{arm}'")
        return checked
    _refuse_idle(experiment, source)
    for arm in experiment.arms:
        tuned = experiment.tune.values[0] if experiment.tune and experiment.tunes(arm) else None
        try:
            values = run_values(experiment, arm, 0, params, tuned)
        except ParamsError as error:
            raise ParamsError(f"{source}: arm '{arm}': {error}") from error
        parse = parse_search if experiment.lane == "designs" else parse_params
        checked[arm] = parse(values, f"{source}: arm '{arm}'")
        starts[arm] = start_values(values)
    first = next(iter(starts))
    for arm, start in starts.items():
        differing = [name for name in start if start[name] != starts[first][name]]
        if differing and experiment.start == "common" and experiment.lane in ("rl", "merge"):
            raise ParamsError(
                f"{source}: arm '{arm}' and arm '{first}' differ in {', '.join(differing)}, so they would not start from the "
                f"same policy; move that to `shared`, or set `start: own` if the claim is about it"
            )
    return checked


def check_environments(checked: Mapping[str, Params], source: str) -> None:
    """Raise ParamsError if an arm of `check_experiment` has values that its environment rejects (needs the domain's package)."""
    for arm, params in checked.items():
        try:
            check_domains(params)
        except ParamsError as error:
            raise ParamsError(f"{source}: arm '{arm}': {str(error).removeprefix('params.yaml: ')}") from error


def unplayable(experiment: Experiment, params: Mapping[str, Any]) -> str | None:
    """Why a task of lane control that an arm names can't be played here, such as a package that is not installed; None if all
    can."""
    if experiment.lane != "control":
        return None
    from stages.control.off_policy.vector_task import make_task

    named = {arm_values(experiment, arm, params).get("task") for arm in experiment.arms}
    for task in sorted(task for task in named if task):
        try:
            make_task(task).close()
        except (ParamsError, ModuleNotFoundError) as error:
            return str(error)
    return None
