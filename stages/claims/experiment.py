"""Experiments are data: reports/claims/<slug>.yaml defines claims, the settings they compare, and when they hold.

All of it is fixed before the first run: arms as overrides of params.yaml, seeds, budget, metric and threshold. Runs of one seed
are paired: they draw the same tasks and start from the same SFT policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from stages.algorithms.registry import composition
from stages.algorithms.settings import Rl
from stages.control.settings import OfflineQ
from stages.designs.settings import parse_search
from stages.params import Params, check_domains, parse_params
from stages.records.sections import deep_merge, params_hash
from stages.runtime.validation import Count, ParamsError, Section, explain

FOLDER = Path("reports/claims")
OFFLINE = "guessing"
"""`environment` of experiments of lane offline_q."""
MIN_SEEDS = 5
BEFORE_RL = ("seed", "domains", "model", "curate", "sft", "rollout", "annotate")
"""Sections that shape the start of rl, beside the environment's settings."""
_TEXT = ("method", "paper", "switch")
_PER_DOMAIN = ("curate", "rollout", "annotate", "rl")


Metric = Annotated[str, Field(pattern=r"^(panel|history|report|annotate|labels|offline|designs)\.[\w.]+$")]


class Claim(Section):
    """The metric of `arm` exceeds that of `against` by at least `threshold`."""

    says: str
    """The claim in one sentence, for readers."""
    arm: str
    against: str
    metric: Metric = "panel.success"
    """`panel.<success|reward|turns|tokens|cost|accepted>`, `panel.difficulty.<level>`, `panel.pass_at_k.<k>` or
    `panel.distinct_at_k.<k>` (k a power of two up to evaluate.attempts, or these; different solutions in k attempts),
    `panel.solutions_differ` (chance that two successes at a task are different solutions): on the frozen panel, after training,
    of the one model evaluated on it.
    `history.<column>.<mean|first|last>`: while training, over all steps or the first or last fifth of them. `report.<key>.<key>
    ...`: of reports/rl/<domain>.json. `annotate.<key>.<key> ...`: of reports/annotate/<domain>.json.
    `labels.<known|keydoor>.<key>`: of a run of lane labels (stages/claims/mcts_labels.py). `offline.<key>`: of a run of lane
    offline_q. `designs.<key>`: of a run of lane designs (stages/claims/design_metrics.py)."""
    threshold: float = 0.0
    """The smallest difference that confirms the claim, in the metric's unit; below 0 for a non-inferiority margin."""
    checked: str | None = None
    """For a claim that was not reproduced: how the implementation was verified."""


class Budget(Section):
    environment_steps: Count
    """Environment steps of each run in rl; a run ends with the training step that reaches it."""


Lane = Literal["rl", "annotate", "labels", "offline_q", "designs"]


class Experiment(Section):
    method: str
    """The method's name, for people."""
    paper: str
    switch: str
    """The setting of params.yaml that selects it."""
    environment: str
    """A domain of params.yaml."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=MIN_SEEDS)]
    lane: Lane = "rl"
    """The kind of run. rl: the specialist is trained from a start that all seeds share, and evaluated on the panel. annotate: the
    SFT policy is evaluated on the panel with the arm's `evaluate.models`; the seed is that of all stages, SFT and trees included.
    labels: trees grown with the arm's `annotate`, whose labels and pairs are compared with exact values
    (stages/claims/mcts_labels.py); all arms and seeds share the SFT policy. offline_q: stages/control/offline_q.py learns from
    offline games; `environment` is `guessing`. designs: a search over agent designs with the arm's `design`, replayed on a table
    of all designs' scores (stages/claims/design_search.py) that all arms and seeds share."""
    budget: Budget | None = None
    """Of lane rl only. Arms that learn from pairs or an offline dataset play no episodes and take rl.steps instead; if all arms
    do, `shared` sets rl.steps in place of a budget."""
    start: Literal["common", "own"] = "common"
    """`own`: arms may differ in stages before rl, which they compare."""
    shared: dict[str, Any] = Field(default_factory=dict)
    """Overrides for every arm: of params.yaml, or of the offline lane's settings (stages/control/settings.py)."""
    arms: Annotated[dict[str, dict[str, Any]], Field(min_length=2)]
    measured: list[Metric] = Field(default_factory=list)
    """Further metrics to store and show for every run that has them."""
    claims: Annotated[list[Claim], Field(min_length=1)]

    @model_validator(mode="after")
    def _names(self) -> Experiment:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds lists a seed twice: {self.seeds}")
        if self.lane == "rl" and self.budget is None and "steps" not in self.shared.get("rl", {}):
            raise ValueError(
                "budget.environment_steps is missing: it ends the runs of lane rl (for methods that play no episodes, set "
                "rl.steps in `shared` instead)"
            )
        if self.lane != "rl" and self.budget is not None:
            raise ValueError(f"budget: lane {self.lane} plays no episodes in rl; remove it")
        if (self.environment == OFFLINE) != (self.lane == "offline_q"):
            raise ValueError(f"environment {self.environment}: lane offline_q, and no other, plays {OFFLINE}")
        for number, claim in enumerate(self.claims, start=1):
            unknown = sorted({claim.arm, claim.against} - set(self.arms))
            if unknown:
                raise ValueError(f"claim {number} names {unknown}; the arms are {', '.join(self.arms)}")
            if claim.arm == claim.against:
                raise ValueError(f"claim {number} compares arm '{claim.arm}' with itself")
        return self

    @property
    def fixed(self) -> str:
        """Hash (16 hex digits) of everything fixed before the run. Free text is excluded, so claims can be reworded."""
        values = self.model_dump(mode="json", exclude={*_TEXT, "claims"})
        values["claims"] = [claim.model_dump(mode="json", exclude={"says", "checked"}) for claim in self.claims]
        if self.lane == "rl":
            del values["lane"]
        if not self.measured:
            del values["measured"]
        return digest(values)


def digest(values: Any) -> str:
    return params_hash(values)


def load_experiment(path: Path) -> Experiment:
    """Read an experiment. Raises ParamsError, naming file and key, if it is invalid."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        return Experiment.model_validate(values)
    except yaml.YAMLError as error:
        raise ParamsError(f"{path}: not YAML ({error})") from error
    except ValidationError as error:
        raise ParamsError(explain(error, Experiment, str(path))) from error


def slugs(root: Path) -> list[str]:
    """Names of all experiments, sorted."""
    return sorted(path.stem for path in (root / FOLDER).glob("*.yaml") if path.name != "dvc.yaml")


def _flattened(values: Mapping[str, Any], domain: str) -> dict[str, Any]:
    """`values` with `per_domain` merged into the sections, so that later overrides always take effect."""
    flat = dict(values)
    own = dict(flat.get("per_domain", {}).get(domain, {}))
    for name in _PER_DOMAIN:
        flat[name] = deep_merge(flat.get(name) or {}, own.get(name) or {})
        own[name] = {}
    flat["per_domain"] = {domain: own}
    return flat


def arm_values(experiment: Experiment, arm: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """params.yaml of the arm, without the seed (`run_values`). The experiment's overrides take precedence over `per_domain`.

    `params`: params.yaml with its defaults.
    """
    domain = experiment.environment
    if experiment.lane == "offline_q":
        return deep_merge(experiment.shared, experiment.arms[arm])
    values = _flattened({**params, "domains": [domain], "merge": {**params.get("merge", {}), "weights": {}}}, domain)
    for overrides in (experiment.shared, experiment.arms[arm]):
        values = _flattened(deep_merge(values, overrides), domain)
    named = [
        one["evaluate"]["models"] for one in (experiment.arms[arm], experiment.shared) if "models" in one.get("evaluate", {})
    ]
    default = [f"rl@{domain}"] if experiment.lane == "rl" else ["sft"]
    values["evaluate"] = {**values.get("evaluate", {}), "models": (named or [default])[0]}
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


def run_values(experiment: Experiment, arm: str, seed: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """params.yaml of one run."""
    values = arm_values(experiment, arm, params)
    seeded = {"rl": "rl", "labels": "rl", "designs": "design"}.get(experiment.lane)
    if seeded is None:
        return {**values, "seed": seed}
    return {**values, seeded: {**(values.get(seeded) or {}), "seed": seed}}


def start_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `values` that shapes the start of rl."""
    domain = values["domains"][0]
    return {**{name: values.get(name) for name in BEFORE_RL}, "environment": values["per_domain"][domain].get("environment")}


def _check_offline(values: Mapping[str, Any], source: str) -> None:
    try:
        OfflineQ.model_validate(values)
    except ValidationError as error:
        raise ParamsError(explain(error, OfflineQ, source)) from error


def check_experiment(experiment: Experiment, params: Mapping[str, Any], source: str) -> dict[str, Params]:
    """Arm -> its parameters ({} in lane offline_q, which has its own settings). Raises ParamsError if an arm's are invalid, or if
    arms that must share a start do not."""
    checked: dict[str, Params] = {}
    starts: dict[str, dict[str, Any]] = {}
    if experiment.lane == "offline_q":
        for arm in experiment.arms:
            _check_offline(arm_values(experiment, arm, params), f"{source}: arm '{arm}'")
        return checked
    for arm in experiment.arms:
        values = arm_values(experiment, arm, params)
        parse = parse_search if experiment.lane == "designs" else parse_params
        checked[arm] = parse(values, f"{source}: arm '{arm}'")
        starts[arm] = start_values(values)
    first = next(iter(starts))
    for arm, start in starts.items():
        differing = [name for name in start if start[name] != starts[first][name]]
        if differing and experiment.start == "common" and experiment.lane == "rl":
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
