"""Settings of the search over agent designs (`python -m flows.design`), read from reports/design/design.yaml."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from stages.params import Params, check_domains, load_params, parse_as
from stages.records.sections import deep_merge
from stages.runtime.validation import Count, NonNegative, ParamsError, Section, Share, explain, parse_yaml

SETTINGS = Path("reports/design/design.yaml")

Window = Annotated[int, Field(ge=1)] | None
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class DesignSpace(Section):
    """Options of each factor; ordered factors are sorted, null last. The option in `evaluate` is always added."""

    model: Annotated[list[str], Field(min_length=1)] | None = None
    """Of sft, rl@<domain>, merged, merged_linear; null: all of them."""
    choose: list[Literal["none", "logprob", "vote", "q", "value"]] = ["none", "logprob", "vote"]
    """How an action is chosen among several draws."""
    per_token: Annotated[list[bool], Field(min_length=1)] | None = None
    """Whether logprob and value average scores over tokens; null: not a factor, evaluate.best_of.per_token applies."""
    think: list[Literal["none", "plan", "reflect", "both"]] = ["none", "plan"]
    window: list[Window] = [1, 2, 4, None]
    recall: list[Literal["none", "action", "task", "both"]] = ["none", "action", "task"]
    note: list[str] = [""]
    max_turns: list[Count | None] = [None]
    draws: list[Annotated[int, Field(ge=2, le=64)]] = [3, 5]
    temperature: list[Annotated[float, Field(ge=0.0, le=5.0)]] = [0.0, 0.25, 0.5, 0.75, 1.0]
    top_p: list[Annotated[float, Field(gt=0.0, le=1.0)]] = [0.8, 0.95, 1.0]
    top_k: list[Annotated[int, Field(ge=0)]] = [0]
    max_tokens: list[Annotated[int, Field(ge=1, le=32768)]] = [24]

    @model_validator(mode="after")
    def _distinct(self) -> DesignSpace:
        for name, options in self:
            given: list[Any] = options or []
            if len(set(given)) != len(given):
                raise ValueError(f"space.{name} lists an option twice: {given}")
        return self


class Labels(Section):
    """Designs that are evaluated to train the value model, before the tree grows. They are part of the budget."""

    strength: Annotated[int, Field(ge=0, le=3)] = 1
    """Strength of the covering array: every combination of the options of this many factors occurs; 0: no array."""
    balanced: Annotated[int, Field(ge=0)] = 8
    """Further labels, alternately the most promising design by mean + kappa std and the poorest by -mean + kappa std."""
    kappa: NonNegative = 2.0


class DesignTree(Section):
    lam: Share = 0.3
    """Share of the selection probability that is uniform over evaluated designs."""
    alpha: NonNegative = 20.0
    """Sharpness, per unit of success in [0, 1]."""
    beta: Share = 0.3
    """Weight of uncertainty in selection."""
    uncertainty: Literal["error", "std"] = "error"
    """error: the prediction error beyond the score's standard error; std: the prediction's standard deviation."""
    subtract_noise: bool = True
    """error: subtract the score's standard error."""
    backup: Literal["mean", "max", "none"] = "mean"
    """How scores and uncertainties of a design and its descendants are combined for selection."""
    proposals: Count = 4
    """Candidates per operation."""
    rank: Literal["mean", "ucb"] = "mean"
    """Candidates are ranked by the predicted mean, or (ucb) by mean + labels.kappa std."""


class DesignConfirm(Section):
    """The best designs are evaluated again on other validation tasks, since the best of many noisy scores is biased upwards."""

    designs: Count = 3
    tasks: Annotated[int, Field(ge=2)] = 24
    """Per domain."""


class DesignSettings(Section):
    method: Literal["agentswift", "unguided", "random"] = "agentswift"
    """unguided: the tree without a value model; random: random designs."""
    seed: Seed | None = None
    """null: `seed`."""
    budget: Count = 40
    """Designs evaluated, including the default and labels."""
    tasks: Annotated[int, Field(ge=2)] = 48
    """Validation tasks per domain."""
    attempts: Annotated[int, Field(ge=1, le=256)] = 2
    """Per task."""
    metric: Literal["success", "reward"] = "success"
    space: DesignSpace = DesignSpace()
    labels: Labels = Labels()
    value_model: Literal["gp", "ridge"] = "gp"
    """gp: a Gaussian process; ridge: Bayesian linear regression."""
    tree: DesignTree = DesignTree()
    confirm: DesignConfirm = DesignConfirm()

    @model_validator(mode="after")
    def _used(self) -> DesignSettings:
        if self.tree.uncertainty == "std" and self.method != "agentswift":
            raise ValueError(f"tree.uncertainty: std needs a value model, and method {self.method} has none; set it to error")
        return self


class SearchParams(Params):
    """params.yaml, and the search's own settings as the section `design`."""

    design: DesignSettings = DesignSettings()


def parse_search(values: Mapping[str, Any], source: str = "params.yaml") -> SearchParams:
    """Validate `values`: params.yaml with a section `design`. Raises ParamsError."""
    return parse_as(SearchParams, values, source)


def load_search(root: Path, changes: Sequence[str] = ()) -> tuple[dict[str, Any], SearchParams]:
    """The values of params.yaml, and the validated parameters with SETTINGS as `design`, both after overrides such as
    `design.budget=20`. Raises ParamsError."""
    path = root / SETTINGS
    load_params(root / "params.yaml")
    values: dict[str, Any] = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    values["design"] = parse_yaml(path.read_bytes(), SETTINGS, may_be_empty=True) if path.exists() else {}
    for change in changes:
        key, equals, text = change.removeprefix("++").partition("=")
        if not equals:
            raise ParamsError(f"--set takes KEY=VALUE, such as design.budget=20, not '{change}'")
        nested: Any = yaml.safe_load(text)
        for part in reversed(key.split(".")):
            nested = {part: nested}
        values = deep_merge(values, nested)
    changed = " with --set" if changes else ""
    try:
        DesignSettings.model_validate(values["design"])
    except ValidationError as error:
        raise ParamsError(explain(error, DesignSettings, f"{SETTINGS}{changed}")) from error
    params = parse_search(values, f"params.yaml{changed}")
    check_domains(params)
    return {name: value for name, value in values.items() if name != "design"}, params
