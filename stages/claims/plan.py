"""The runs of an experiment: their parameters, keys and metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stages.claims.arms import RESOURCES, run_values
from stages.claims.design_metrics import METRICS as DESIGN_METRICS
from stages.claims.experiment import Experiment
from stages.claims.label_metrics import METRICS, WORLDS
from stages.control.problems import PROBLEMS
from stages.designs.settings import parse_search
from stages.params import parse_params
from stages.records.sections import deep_merge, params_hash

ALWAYS = ("panel.success", "panel.turns", "panel.cost", "panel.tokens")
"""Metrics of every run, also those that no claim needs, by lane."""
ALWAYS_LABELS = tuple(f"labels.{world}.{metric}" for world in WORLDS for metric in METRICS)
ALWAYS_DESIGNS = tuple(f"designs.{metric}" for metric in DESIGN_METRICS)
LEARNT = ("history.success.first", "history.success.last")
"""Metrics of the gate's runs, if they play episodes."""


@dataclass(frozen=True)
class Run:
    """One arm with one seed; `key` is a hash of its parameters."""

    arm: str
    seed: int
    values: Mapping[str, Any]
    key: str
    required: tuple[str, ...]
    """Metrics without which it is not done."""
    trial: bool = False
    """A tuning run; `arm` then names arm and value."""

    @property
    def name(self) -> str:
        return f"{self.arm}/{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a run found. `seconds`: of processors; `start_seconds`: those of its start, if this run made it. `code`: hash of the
    code that bears on it. `rows`, `curve`: of ROWS_SCHEMA and CURVES_SCHEMA, without arm and seed; [] in lanes that evaluate no
    panel. `start`: panel success of the policy that training started from."""

    metrics: dict[str, float | None]
    environment_steps: int
    seconds: float
    commit: str
    code: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    start: float | None = None
    start_seconds: float = 0.0


def metrics_of(experiment: Experiment) -> list[str]:
    """All metrics that its runs store, if they have them."""
    by_program = {"labels": ALWAYS_LABELS, "designs": ALWAYS_DESIGNS} | {name: one.metrics for name, one in PROBLEMS.items()}
    always = by_program.get(experiment.program, ALWAYS)
    gate = experiment.gate
    gated = {*LEARNT, *(one.metric for one in gate.require)} if gate else set()
    return sorted({*always, *gated, *experiment.measured, *(claim.metric for claim in experiment.claims)})


def required_of(experiment: Experiment, arm: str, seed: int) -> tuple[str, ...]:
    """The metrics that the run must have: those of its arm's claims, and of the gate."""
    needed = {claim.metric for claim in experiment.claims if arm in (claim.arm, claim.against)}
    gate = experiment.gate
    if gate is not None and seed < gate.runs:
        needed |= {"panel.success"} if arm == gate.baseline else set()
        needed |= {one.metric for one in gate.require if one.arm == arm}
    return tuple(sorted(needed))


def shaping(experiment: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that shape a run and differ from their defaults: so a new setting does not invalidate finished runs. Not to be
    changed in place."""
    asked = json.dumps([experiment.lane, experiment.environment, values], sort_keys=True)
    if asked not in _SHAPED:
        _SHAPED[asked] = _shaping(experiment, values)
    return _SHAPED[asked]


KEYS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"annotate": {"tasks": 48}, "rollout": {"tasks": 96}}
"""Defaults that keys go by in place of the sections' own, so that runs stay valid when those change."""
_SHAPED: dict[str, dict[str, Any]] = {}
"""To check settings takes most of the time of a plan, and planning, tuning and costs ask for the same ones."""


def _shaping(experiment: Experiment, values: Mapping[str, Any]) -> dict[str, Any]:
    if experiment.lane == "control":
        return PROBLEMS[experiment.environment].settings.model_validate(values).model_dump(mode="json", exclude_defaults=True)
    parse = parse_search if experiment.lane == "designs" else parse_params
    parsed = parse(values, "params.yaml")
    found = parsed.model_dump(mode="json", exclude_defaults=True)
    for name, defaults in KEYS_DEFAULTS.items():
        section = {**found.get(name, {}), **parsed.model_dump(mode="json", include={name: set(defaults)})[name]}
        found[name] = {key: value for key, value in section.items() if (key, value) not in defaults.items()}
        for own in found["per_domain"].values() if not found[name] else ():  # lane merge repeats them for every domain
            if own.get(name):
                own[name] = {key: value for key, value in own[name].items() if (key, value) not in defaults.items()}
                if not own[name]:
                    del own[name]
        if not found[name]:
            del found[name]
    found["resources"] = {name: one for name, one in found.get("resources", {}).items() if name in RESOURCES}
    for name in ("report",) if experiment.lane == "merge" else ("report", "merge"):
        found.pop(name, None)
    return found


def _keys(experiment: Experiment, arm: str, params: Mapping[str, Any], tuned: float | None) -> Callable[[int], str]:
    """Seed -> key of the arm's run. Parameters are checked once, since the seed changes nothing else."""
    return partial(key_of, experiment, shaping(experiment, run_values(experiment, arm, 1, params, tuned)))


def key_of(experiment: Experiment, shaped: Mapping[str, Any], seed: int) -> str:
    """The key of the run with this seed. `shaped`: `shaping` of its settings with any seed."""
    values = deep_merge(shaped, experiment.seeded(seed))
    if values.get("seed") == 0:
        del values["seed"]  # the default
    return params_hash(values)


def planned_runs(
    experiment: Experiment,
    params: Mapping[str, Any],
    tuned: Mapping[str, float] | None = None,
    seeds: Iterable[int] | None = None,
    arms: Iterable[str] | None = None,
) -> list[Run]:
    """The runs of `arms` (None: all) with `seeds` (None: all), seed by seed; arms without seeds only once. `tuned`: arm -> its
    value of `tune.key`."""
    value_of, chosen = tuned or {}, list(experiment.arms if arms is None else arms)
    keys = {arm: _keys(experiment, arm, params, value_of.get(arm)) for arm in chosen}
    return [
        Run(
            *(arm, seed, run_values(experiment, arm, seed, params, value_of.get(arm)), keys[arm](seed)),
            required_of(experiment, arm, seed),
        )
        for seed in (experiment.seeds if seeds is None else seeds)
        for arm in chosen
        if not (seed and experiment.seedless(arm))
    ]
