"""The params.yaml of an experiment's runs: overrides of the experiment, its arm and its seed over those of the checkout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from stages.algorithms.registry import composition
from stages.algorithms.settings import Rl
from stages.claims.experiment import Experiment, nested
from stages.records.sections import deep_merge, params_hash

AFTER_SFT = ("rollout", "annotate")
"""Sections that shape what rl reads, but not the SFT policy."""
BEFORE_RL = ("seed", "domains", "model", "curate", "sft", *AFTER_SFT)
"""Sections that shape the start of rl, beside the environment's settings."""
AFTER_RL = ("resources", "merge", "evaluate", "report")
"""Sections that shape nothing before the merge, but for RESOURCES."""
RESOURCES = ("device", "precision", "tokens_per_batch")
"""Keys of section resources that change results."""
_PER_DOMAIN = ("curate", "rollout", "annotate", "rl")


def _flattened(values: Mapping[str, Any], domain: str) -> dict[str, Any]:
    """`values` with `per_domain` merged into the sections, so that later overrides always take effect."""
    flat = dict(values)
    own = dict(flat.get("per_domain", {}).get(domain, {}))
    for name in _PER_DOMAIN:
        flat[name] = deep_merge(flat.get(name) or {}, own.get(name) or {})
        own[name] = {}
    flat["per_domain"] = {domain: own}
    return flat


def _spread(overrides: Mapping[str, Any], domains: Sequence[str]) -> dict[str, Any]:
    """`overrides` with their sections repeated in `per_domain` of every domain, where they take precedence over params.yaml's,
    and the overrides' own `per_domain` over them."""
    sections = {name: overrides[name] for name in _PER_DOMAIN if name in overrides}
    own = overrides.get("per_domain", {})
    return {**overrides, "per_domain": {name: deep_merge(sections, own.get(name, {})) for name in domains}}


def _without_seed(own: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of one domain without a seed of rl."""
    return {**own, "rl": {name: value for name, value in own.get("rl", {}).items() if name != "seed"}}


def arm_values(experiment: Experiment, arm: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """params.yaml of the arm, without the seed (`run_values`). The experiment's overrides take precedence over `per_domain`.

    `params`: params.yaml with its defaults.
    """
    if experiment.lane == "control":
        return deep_merge(experiment.shared, experiment.arms[arm])
    values = {**params, "domains": experiment.domains, "merge": {**params.get("merge", {}), "weights": {}}}
    if experiment.lane == "merge":
        values["per_domain"] = {name: params["per_domain"].get(name, {}) for name in experiment.domains}
        for overrides in (experiment.shared, experiment.arms[arm]):
            values = deep_merge(values, _spread(overrides, experiment.domains))
        # The run's seed holds for all.
        values["per_domain"] = {name: _without_seed(own) for name, own in values["per_domain"].items()}
    else:
        domain = experiment.environment
        values = _flattened(values, domain)
        for overrides in (experiment.shared, experiment.arms[arm]):
            values = _flattened(deep_merge(values, overrides), domain)
    values["evaluate"] = {**values.get("evaluate", {}), "models": experiment.models(arm)}
    rl = values["rl"]
    if experiment.budget is None or composition(rl.get("algorithm", Rl.model_fields["algorithm"].default)).data != "episodes":
        return values
    budget = experiment.budget.environment_steps
    if not any("steps" in overrides.get("rl", {}) for overrides in (experiment.shared, experiment.arms[arm])):
        # Enough steps to reach the budget, as an episode has at least one turn.
        rl["steps"] = math.ceil(budget / (rl.get("tasks_per_step", 16) * rl.get("group_size", 8)))
    rl["environment_steps"] = budget
    return values


def common_values(experiment: Experiment, params: Mapping[str, Any]) -> dict[str, Any]:
    """params.yaml of the start that all arms of lanes labels and designs share."""
    bare = experiment.model_copy(update={"arms": {"": {}}})
    return arm_values(bare, "", params)


def run_values(
    experiment: Experiment, arm: str, seed: int, params: Mapping[str, Any], tuned: float | None = None
) -> dict[str, Any]:
    """params.yaml of one run. `tuned`: the arm's value of `tune.key`; None: as its overrides have it."""
    values = arm_values(experiment, arm, params)
    if tuned is not None and experiment.tune is not None:
        values = deep_merge(values, nested(experiment.tune.key, tuned))
    return deep_merge(values, experiment.seeded(seed))


def start_key(values: Mapping[str, Any]) -> str:
    """16 hex digits of what the success of the initial policy follows from."""
    found = start_values(values)
    if len(values["domains"]) == 1:
        found = {name: value for name, value in found.items() if name not in AFTER_SFT}
    return params_hash([found, {**values["evaluate"], "models": ["sft"]}])


def trained_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `values` that shapes the policies that rl trains."""
    used = {name: values.get("resources", {}).get(name) for name in RESOURCES}
    return {**{name: value for name, value in values.items() if name not in AFTER_RL}, "resources": used}


def start_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `values` that shapes the start of rl; with several domains, that of the merge."""
    trained = trained_values(values)
    if len(values["domains"]) > 1:
        return trained
    environment = values["per_domain"][values["domains"][0]].get("environment")
    return {**{name: values.get(name) for name in BEFORE_RL}, "resources": trained["resources"], "environment": environment}
