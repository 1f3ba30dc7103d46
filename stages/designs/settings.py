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
    """Options of each factor; numbers in rising order, null behind them. What `evaluate` has is always one of them."""

    model: Annotated[list[str], Field(min_length=1)] | None = None
    """Who plays: of sft, rl@<domain>, merged, merged_linear; null: all of them."""
    choose: list[Literal["none", "logprob", "vote", "q", "value"]] = ["none", "logprob", "vote"]
    """How an action is chosen among several draws."""
    per_token: Annotated[list[bool], Field(min_length=1)] | None = None
    """Whether logprob and value go by scores per token; null: no factor, but what evaluate.best_of.per_token is."""
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
    """Designs that are evaluated for the value model to learn from, before the tree grows. They count towards the budget."""

    strength: Annotated[int, Field(ge=0, le=3)] = 1
    """Of the covering array over components: every combination of the options of so many factors occurs; 0: none."""
    balanced: Annotated[int, Field(ge=0)] = 8
    """Then so many by turns where the model finds a design promising, mean + kappa std, and poor, -mean + kappa std."""
    kappa: NonNegative = 2.0


class DesignTree(Section):
    lam: Share = 0.3
    """Share of the selection probability that is the same for every evaluated design."""
    alpha: NonNegative = 20.0
    """Sharpness, per unit of success in [0, 1]."""
    beta: Share = 0.3
    """Weight of uncertainty in selection."""
    uncertainty: Literal["error", "std"] = "error"
    """error: how far the prediction was from the score, beyond the score's own standard error; std: the prediction's."""
    subtract_noise: bool = True
    """error: leave out what is within one standard error of the score."""
    backup: Literal["mean", "max", "none"] = "mean"
    """What of its descendants' scores and uncertainties an evaluated design is selected by, its own among them."""
    proposals: Count = 4
    """Candidates of each operation."""
    rank: Literal["mean", "ucb"] = "mean"
    """What candidates are ranked by: the prediction, or that plus `labels.kappa` standard deviations."""


class DesignConfirm(Section):
    """The best are played again on other validation tasks, since the best of many noisy scores is too high."""

    designs: Count = 3
    tasks: Annotated[int, Field(ge=2)] = 24
    """Per domain."""


class Design(Section):
    method: Literal["agentswift", "unguided", "random"] = "agentswift"
    """unguided: the tree alone, without a value model; random: designs drawn at random."""
    seed: Seed | None = None
    """null: `seed`."""
    budget: Count = 40
    """Designs evaluated, the first one (what `evaluate` has) and labels included."""
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
    def _used(self) -> Design:
        if self.tree.uncertainty == "std" and self.method != "agentswift":
            raise ValueError(f"tree.uncertainty: std is the value model's, and method {self.method} has none; set it to error")
        return self


class SearchParams(Params):
    """params.yaml, and the search's own settings as the section `design`."""

    design: Design = Design()


def parse_search(values: Mapping[str, Any], source: str = "params.yaml") -> SearchParams:
    """Check `values`: params.yaml with a section `design`. Raises ParamsError."""
    return parse_as(SearchParams, values, source)


def load_search(root: Path, changes: Sequence[str] = ()) -> tuple[dict[str, Any], SearchParams]:
    """The values of params.yaml, and with SETTINGS as `design`, checked; both after overrides such as `design.budget=20`.
    Raises ParamsError."""
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
        Design.model_validate(values["design"])
    except ValidationError as error:
        raise ParamsError(explain(error, Design, f"{SETTINGS}{changed}")) from error
    params = parse_search(values, f"params.yaml{changed}")
    check_domains(params)
    return {name: value for name, value in values.items() if name != "design"}, params
