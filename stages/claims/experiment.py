"""Experiments are data: reports/claims/<slug>.yaml defines claims, the settings they compare, and when they hold.

All of it is fixed before the first run: arms as overrides of params.yaml, looks (numbers of seeds after which claims are judged),
budget, the values that every arm is tuned over, the gate, metrics, thresholds and margins. Runs of one seed are paired: they draw
the same tasks and start from the same SFT policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from stages.claims.sequential import Kind, alphas
from stages.control.problems import PROBLEMS
from stages.evaluation.statistics import StatisticsError
from stages.merging.registry import get_merger
from stages.records.sections import params_hash
from stages.runtime.validation import Count, ParamsError, Section, explain, guess
from stages.runtime.yaml_files import read_yaml

FOLDER = Path("reports/claims")
LOOKS = (8, 12, 20)
MARGIN = 0.05
"""Default margin of metrics that are shares."""
SHARES = frozenset(
    {"success", "accepted", "difficulty", "pass_at_k", "solutions_differ", "win_rate", "area", "best", "found", "regret"}
)
"""Second components of metrics that are shares."""
UNTRAINED = frozenset({"base", "sft"})
"""Models that no seed of rl changes."""
_BY_TASK = ("difficulty", "pass_at_k", "distinct_at_k", "solutions_differ")
PANEL = ("success", "reward", "turns", "tokens", "cost", "accepted", *_BY_TASK)
_TEXT = ("tradeoff", "family", "method", "paper", "switch", "untuned", "ungated", "learnt")


def _known(metric: str) -> str:
    first, second = metric.split(".")[:2]
    if first == "panel" and second not in PANEL:
        raise ValueError(f"{metric} does not exist{guess(second, PANEL)}: panel has {', '.join(PANEL)}")
    return metric


_PATTERN = r"^(panel|history|report|sft|annotate|utilities|labels|offline|control|designs)\.[\w.]+$"
Metric = Annotated[str, Field(pattern=_PATTERN), AfterValidator(_known)]


def is_share(metric: str) -> bool:
    return metric.split(".")[1] in SHARES


Seed = Annotated[int, Field(ge=0, le=900)]  # tuning's are 1000 and above, and no claim is judged by them


class Claim(Section):
    """The metric of `arm` beside that of `against`; stages/claims/sequential.py judges it."""

    says: str
    """The claim in one sentence, for readers."""
    arm: str
    against: str
    metric: Metric = "panel.success"
    """`panel.<success|reward|turns|tokens|cost|accepted>`, `panel.difficulty.<level>`, `panel.pass_at_k.<k>` or
    `panel.distinct_at_k.<k>` (k a power of two up to evaluate.attempts, or these; different solutions in k attempts),
    `panel.solutions_differ` (chance that two successes at a task are different solutions): on the frozen panel, after training,
    of the one model evaluated on it.
    `history.<column>.<mean|first|last>`: while training, over all steps or the first or last fifth of them.
    `history.steps_to_success.<percent>`: environment steps until the mean success of five training steps is that; the budget if
    it never is. `report.<key>.<key> ...`: of reports/rl/<domain>.json. `annotate.<key>.<key> ...`: of
    reports/annotate/<domain>.json. `sft.<key>.<key> ...`: of reports/sft.json. `utilities.<key>`: of the one model evaluated,
    if evaluate.utilities is set. `labels.<known|keydoor>.<key>`: of a run of lane labels (stages/claims/mcts_labels.py).
    `offline.<key>`, `control.<key>`: of a run of lane control. `designs.<key>`: of a run of lane designs
    (stages/claims/design_metrics.py)."""
    kind: Kind = "superiority"
    """superiority: `arm` exceeds `against`, by at least `threshold`. non_inferiority: it is lower by less than `margin`, if at
    all. equivalence: the two differ by less than `margin`."""
    threshold: Annotated[float, Field(ge=0)] = 0.0
    """superiority: the smallest difference worth the claim, in the metric's unit."""
    margin: Annotated[float, Field(gt=0)]
    """Differences within +-margin are equivalent, in the metric's unit; 0.05 if absent, for metrics that are shares."""
    exploratory: bool = False
    """The claim was added or changed after a look at results: only fresh seeds (`fresh_from`) can reproduce it."""
    fresh_from: Seed = 0
    """The first seed that nobody had looked at when the claim was written; earlier ones do not count."""
    checked: str | None = None
    """For a claim that was not reproduced: how the implementation was verified."""
    world: str | None = None
    """Whether the world here could show the effect at all, in one sentence."""

    @model_validator(mode="before")
    @classmethod
    def _default_margin(cls, values: Any) -> Any:
        metric = values.get("metric", cls.model_fields["metric"].default) if isinstance(values, dict) else None
        if isinstance(metric, str) and "." in metric and "margin" not in values and is_share(metric):
            return {**values, "margin": MARGIN}
        return values

    @model_validator(mode="after")
    def _threshold_of_superiority(self) -> Claim:
        if self.threshold and self.kind != "superiority":
            raise ValueError(f"threshold: a claim of {self.kind} has a margin only; remove it")
        return self


class Budget(Section):
    environment_steps: Count
    """Environment steps of each run in rl; a run ends with the training step that reaches it."""


class Tune(Section):
    """Every arm that trains, or in lane merge whose method reads the key and that does not set it, is tried at the same values,
    with seeds that no claim uses; the value with the highest mean success on validation tasks becomes the arm's (ties: the
    smallest)."""

    key: Annotated[str, Field(pattern=r"^(rl|merge)(\.\w+)+$")]
    """A key of section rl, such as rl.learning_rate; in lane merge one of section merge, such as merge.lam."""
    values: Annotated[list[int | float], Field(min_length=2)]
    seeds: Count = 1
    """Tuning seeds: 1000, 1001 ..."""

    @field_validator("key")
    @classmethod
    def _leaves_the_budget(cls, key: str) -> str:
        if key in ("rl.tasks_per_step", "rl.group_size", "rl.steps"):
            raise ValueError(f"{key} decides what a budget comes to; compare it as arms, not by tuning")
        return key

    @model_validator(mode="after")
    def _ascending(self) -> Tune:
        if sorted(set(self.values)) != self.values:
            raise ValueError(f"values must ascend, each once: {self.values}")
        return self


Range = Annotated[list[float], Field(min_length=2, max_length=2)]
"""The lowest and the highest value that pass."""


class Requirement(Section):
    """A mean over the gate's runs that must lie in a range."""

    arm: str
    metric: Metric
    range: Range


class Gate(Section):
    """What must hold before further seeds are spent; an experiment that fails it decides nothing."""

    baseline: str
    """The arm whose first runs are the gate's."""
    start: Range = Field(default_factory=lambda: [0.2, 0.6])
    """Success of the policy that training starts from, on the panel."""
    end: Range = Field(default_factory=lambda: [0.05, 0.95])
    """Success of the baseline after training, on the panel: neither floor nor ceiling."""
    runs: Annotated[int, Field(ge=2)] = 3
    """Seeds 0 .. runs - 1."""
    require: list[Requirement] = Field(default_factory=list)


Lane = Literal["rl", "annotate", "labels", "control", "designs", "merge"]


Family = Literal["policy_optimisation", "credit", "value_learning", "annotation", "offline", "budget", "merging", "designs"]


class Experiment(Section):
    family: Family
    """The board's index is by family."""
    method: str
    """The method's name, for people."""
    paper: str
    switch: str
    """The setting of params.yaml that selects it."""
    profile: str | None = None
    """A file of profiles/, without .yaml, over params.yaml: of experiments on another model, which run only when asked for."""
    environment: str
    """A domain of params.yaml; in lane merge, the specialists' domains, as textworld+search+shop; in lane control, a problem of
    stages/control/problems.py."""
    looks: list[int] = Field(default_factory=lambda: list(LOOKS))
    """Numbers of seeds after which claims are judged. Arms of claims that are still open then get further seeds."""
    lane: Lane = "rl"
    """The kind of run. rl: the specialist is trained from a start that all seeds share, and evaluated on the panel. annotate: the
    SFT policy is evaluated on the panel with the arm's `evaluate.models`; the seed is that of all stages, SFT and trees included.
    labels: trees grown with the arm's `annotate`, whose labels and pairs are compared with exact values
    (stages/claims/mcts_labels.py); all arms and seeds share the SFT policy. control: a method on a small control
    problem, without a language model. designs: a search over agent designs with the arm's `design`, replayed on a table
    of all designs' scores (stages/claims/design_search.py) that all arms and seeds share. merge: specialists of several
    domains are trained from one SFT policy with the seed, once for all arms; each arm merges them with its `merge`, and the
    merged model is evaluated on all panels, whose means count alike."""
    budget: Budget | None = None
    """Of lane rl only. Arms that learn from pairs or an offline dataset play no episodes and take rl.steps instead; if all arms
    do, `shared` sets rl.steps in place of a budget."""
    start: Literal["common", "own"] = "common"
    """`own`: arms may differ in stages before rl, which they compare."""
    tune: Tune | None = None
    untuned: str | None = None
    """Lane rl without `tune`: why nothing is tuned."""
    gate: Gate | None = None
    ungated: str | None = None
    """Lane rl without `gate`: why there is none."""
    learnt: str | None = None
    """What the results taught, and what would change our mind: one paragraph for the experiment's page."""
    shared: dict[str, Any] = Field(default_factory=dict)
    """Overrides for every arm: of params.yaml, or of the settings of the control problem."""
    arms: Annotated[dict[str, dict[str, Any]], Field(min_length=2)]
    measured: list[Metric] = Field(default_factory=list)
    """Further metrics to store and show for every run that has them."""
    tradeoff: list[str] = Field(default_factory=list)
    """Arms whose cost on the panel is drawn against their success, in this order: the points of a curve."""
    claims: list[Claim] = Field(default_factory=list)
    """[]: a gallery. Each arm runs with the first look's seeds, for its learning curve; nothing is judged."""

    @model_validator(mode="after")
    def _names(self) -> Experiment:
        if self.lane == "rl" and self.budget is None and "steps" not in self.shared.get("rl", {}):
            raise ValueError(
                "budget.environment_steps is missing: it ends the runs of lane rl (for methods that play no episodes, set "
                "rl.steps in `shared` instead)"
            )
        if self.lane != "rl" and self.budget is not None:
            raise ValueError(f"budget: lane {self.lane} plays no episodes in rl; remove it")
        if (self.environment in PROBLEMS) != (self.lane == "control"):
            raise ValueError(f"environment {self.environment}: lane control, and no other, has {', '.join(PROBLEMS)}")
        if (len(self.domains) > 1) != (self.lane == "merge"):
            raise ValueError(f"environment {self.environment}: lane merge, and no other, has several domains: textworld+search")
        if strange := sorted(set(self.tradeoff) - set(self.arms)):
            raise ValueError(f"tradeoff names {strange}; the arms are {', '.join(self.arms)}")
        for number, claim in enumerate(self.claims, start=1):
            unknown = sorted({claim.arm, claim.against} - set(self.arms))
            if unknown:
                raise ValueError(f"claim {number} names {unknown}; the arms are {', '.join(self.arms)}")
            if claim.arm == claim.against:
                raise ValueError(f"claim {number} compares arm '{claim.arm}' with itself")
        return self

    @model_validator(mode="after")
    def _merges(self) -> Experiment:
        if self.lane != "merge":
            return self
        metrics = {*self.measured, *(claim.metric for claim in self.claims)}
        if other := sorted(metric for metric in metrics if not metric.startswith("panel.")):
            raise ValueError(f"lane merge measures panels, not {other[0]}")
        if several := [arm for arm in self.arms if len(self.models(arm)) != 1]:
            raise ValueError(f"arm {several[0]}: evaluate.models must name one model, not {', '.join(self.models(several[0]))}")
        return self

    @model_validator(mode="after")
    def _looks(self) -> Experiment:
        if not self.claims:
            if len(self.looks) != 1 or self.looks[0] < 1:
                raise ValueError(f"looks: without claims it is one number of seeds, not {self.looks}")
            return self
        try:
            alphas(self.looks)
        except StatisticsError as error:
            raise ValueError(f"looks: {error}") from error
        return self

    @model_validator(mode="after")
    def _tuned_and_gated(self) -> Experiment:
        for name, reason in (("tune", "untuned"), ("gate", "ungated")):
            given = [key for key in (name, reason) if getattr(self, key) is not None]
            if self.lane == "rl" and len(given) != 1:
                raise ValueError(f"lane rl needs {name}, or {reason} with the reason; it has {' and '.join(given) or 'neither'}")
            own = {"rl": [name, reason], "merge": ["tune"]}.get(self.lane, [])
            if other := [key for key in given if key not in own]:
                raise ValueError(f"{other[0]} is for {'lanes rl and merge' if other[0] == 'tune' else 'lane rl'}; remove it")
        if self.gate is not None:
            named = {self.gate.baseline, *(one.arm for one in self.gate.require)}
            if unknown := sorted(named - set(self.arms)):
                raise ValueError(f"gate names {unknown}; the arms are {', '.join(self.arms)}")
            if self.gate.runs > self.looks[0]:
                raise ValueError(f"gate.runs is {self.gate.runs}, but the first look is at {self.looks[0]} seeds")
        return self

    @model_validator(mode="after")
    def _tunes_its_lane(self) -> Experiment:
        if self.tune is None:
            return self
        section = "merge" if self.lane == "merge" else "rl"
        if not self.tune.key.startswith(f"{section}."):
            raise ValueError(f"tune.key is {self.tune.key}: lane {self.lane} tunes a key of section {section}")
        if self.lane == "merge":
            for arm in self.arms:
                if not self.seedless(arm) and self._merge_method(arm) is None:
                    raise ValueError(f"arm {arm}: name its merge.method, which decides whether it reads {self.tune.key}")
            tuned = [arm for arm in self.arms if self.tunes(arm)]  # refuses unknown methods
            if not tuned:
                raise ValueError(f"tune.key: the method of no arm reads {self.tune.key}")
        return self

    @property
    def program(self) -> str:
        """What does its runs: the lane, or the problem of lane control."""
        return self.environment if self.lane == "control" else self.lane

    @property
    def domains(self) -> list[str]:
        """The domains of params.yaml that its runs know."""
        return self.environment.split("+")

    @property
    def seeds(self) -> range:
        """All seeds that claims may need."""
        return range(self.looks[-1] + max((claim.fresh_from for claim in self.claims), default=0))

    def seeded(self, seed: int) -> dict[str, Any]:
        """The overrides that make a run one of this seed."""
        return nested(
            {"rl": "rl.seed", "labels": "rl.seed", "merge": "rl.seed", "designs": "design.seed"}.get(self.lane, "seed"), seed
        )

    def models(self, arm: str) -> list[str]:
        """What plays the panel: `evaluate.models` of the arm or of `shared`, else the specialist (lane rl), the merged model
        (lane merge) or the SFT policy."""
        named = [one["evaluate"]["models"] for one in (self.arms[arm], self.shared) if "models" in one.get("evaluate", {})]
        usual = {"rl": f"rl@{self.environment}", "merge": "merged"}.get(self.lane, "sft")
        return named[0] if named else [usual]

    def trains(self, arm: str) -> bool:
        """Whether the arm's runs train a specialist."""
        return self.lane == "rl" and any(model.startswith("rl@") for model in self.models(arm))

    def tunes(self, arm: str) -> bool:
        """Whether the arm is tried at the values of `tune`, and has its own."""
        if self.tune is None:
            return False
        if self.lane != "merge":
            return self.trains(arm)
        method = None if self.seedless(arm) else self._merge_method(arm)
        reads = method is not None and self.tune.key.split(".")[1] in get_merger(method).Settings.model_fields
        return reads and not sets_key(self.arms[arm], self.tune.key)

    def _merge_method(self, arm: str) -> str | None:
        """`merge.method` of the arm or of `shared`."""
        return next((one["merge"]["method"] for one in (self.arms[arm], self.shared) if sets_key(one, "merge.method")), None)

    @property
    def unclaimed_arms(self) -> list[str]:
        """Arms that no claim names, which are measured beside the others at the first look."""
        claimed = {arm for claim in self.claims for arm in (claim.arm, claim.against)}
        return [arm for arm in self.arms if arm not in claimed]

    def seedless(self, arm: str) -> bool:
        """Whether all seeds give the arm one value, so that it is run once: in lanes rl and merge, that of the SFT policy."""
        if self.lane == "merge":
            return set(self.models(arm)) <= UNTRAINED
        return self.lane == "rl" and not self.trains(arm)

    @property
    def fixed(self) -> str:
        """Hash (16 hex digits) of everything fixed before the run. Free text is excluded, so claims can be reworded."""
        text = {"says", "checked", "world"}
        values = self.model_dump(mode="json", exclude={*_TEXT, "claims"}, exclude_defaults=True)
        claims = [claim.model_dump(mode="json", exclude=text, exclude_defaults=True) for claim in self.claims]
        return params_hash({**values, "claims": claims})


def sets_key(overrides: Any, key: str) -> bool:
    """Whether the overrides have a value of the dotted key."""
    first, _, rest = key.partition(".")
    return isinstance(overrides, Mapping) and first in overrides and (not rest or sets_key(overrides[first], rest))


def nested(key: str, value: Any) -> dict[str, Any]:
    """{"rl": {"seed": 1}} of "rl.seed" and 1."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def load_experiment(path: Path) -> Experiment:
    """Read an experiment. Raises ParamsError, naming file and key, if it is invalid."""
    try:
        values = read_yaml(path)
        return Experiment.model_validate(values)
    except yaml.YAMLError as error:
        raise ParamsError(f"{path}: not YAML ({error})") from error
    except ValidationError as error:
        raise ParamsError(explain(error, Experiment, str(path))) from error


def slugs(root: Path) -> list[str]:
    """Names of all experiments, sorted."""
    return sorted(path.stem for path in (root / FOLDER).glob("*.yaml") if path.name != "dvc.yaml")


def profiles(root: Path) -> dict[str, str | None]:
    """Every experiment's profile, by name, sorted."""
    return {name: read_yaml(root / FOLDER / f"{name}.yaml").get("profile") for name in slugs(root)}


def peers(profile_of: Mapping[str, str | None], slug: str) -> list[str]:
    """Names of the other experiments of this one's profile: their runs may be equal, and take about as long."""
    return [name for name, profile in profile_of.items() if name != slug and profile == profile_of[slug]]
