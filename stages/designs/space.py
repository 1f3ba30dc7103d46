"""Which designs there are: the factors of an agent, their options, and what a design is in params.yaml.

A design is a tuple with one option for each factor, in the order of FACTORS. Designs that play alike are one (`Space.canonical`):
without draws to choose from their number has no effect, and greedy draws are all the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from stages.agent.model_names import model_names
from stages.algorithms.registry import composition, learns_token_values
from stages.designs.settings import SETTINGS, DesignSpace, SearchParams
from stages.runtime.validation import ParamsError

LARGEST = 100_000
"""Designs that a space may have, since all of them are listed."""
BETWEEN = 0.5
"""Length of the one-hot part of an ordered factor in `features`."""
SCORED = ("logprob", "value")
"""Choices that go by a score of each token, which may be summed or averaged."""
Design = tuple[Any, ...]


@dataclass(frozen=True)
class Factor:
    """One thing that designs differ in. `component`: what it belongs to; decoding is refined, other components are recombined."""

    name: str
    component: str
    key: str
    """Its place in section `evaluate`; "" for what `evaluate.models` joins."""
    ordered: bool = False
    later: bool = False
    """It was no factor at first. Where a space gives it no choice, names and records are what they were without it, so that what
    was evaluated before stays known."""


DECODING = "decoding"
FACTORS = (
    Factor("model", "model", ""),
    Factor("choose", "workflow", ""),
    Factor("think", "planning", "scaffold.think"),
    Factor("note", "planning", "scaffold.note"),
    Factor("window", "memory", "scaffold.window", ordered=True),
    Factor("recall", "memory", "scaffold.recall"),
    Factor("max_turns", "tools", "scaffold.max_turns", ordered=True),
    Factor("draws", DECODING, "best_of.n", ordered=True),
    Factor("temperature", DECODING, "sampling.temperature", ordered=True),
    Factor("top_p", DECODING, "sampling.top_p", ordered=True),
    Factor("top_k", DECODING, "sampling.top_k", ordered=True),
    Factor("max_tokens", DECODING, "sampling.max_tokens", ordered=True),
    # Behind the others: journals of searches from before it end where it begins (`Space.restored`).
    Factor("per_token", "workflow", "best_of.per_token", later=True),
)
PLACE = {factor.name: place for place, factor in enumerate(FACTORS)}
COMPONENTS = {
    component: tuple(place for place, factor in enumerate(FACTORS) if factor.component == component)
    for component in dict.fromkeys(factor.component for factor in FACTORS)
}
"""Component -> places of its factors."""


def _nested(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _asked(space: DesignSpace, name: str) -> Sequence[Any]:
    """Options of a factor that `design.space` lists; of scores per token none where no choice goes by such scores."""
    if name == "per_token" and not set(SCORED) & set(space.choose):
        return ()
    return getattr(space, name) or ()


def _check_choices(params: SearchParams) -> None:
    """Raise ParamsError for a choice by what a domain does not have: a Q-model, or values of tokens."""
    choose = params.design.space.choose
    no_q = [name for name in params.domains if params.section("annotate", name).q_model.kind == "none"]
    methods = {name: composition(params.section("rl", name).algorithm) for name in params.domains}
    no_values = [name for name, method in methods.items() if not learns_token_values(method)]
    if "q" in choose and no_q:
        raise ParamsError(
            f"{SETTINGS}: space.choose: q needs a Q-model, and annotate.q_model.kind is none in {no_q[0]}; "
            "set it to step_dpo or regression, or leave q out"
        )
    if "value" in choose and no_values:
        raise ParamsError(
            f"{SETTINGS}: space.choose: value needs values of tokens, which rl learns with rl.algorithm b_coder, and in "
            f"{no_values[0]} that is {params.section('rl', no_values[0]).algorithm}; set it to b_coder, or leave value out"
        )


def _as_values(design: Design, named: Collection[str]) -> dict[str, Any]:
    """The options that a design has of the factors `named`, as values over params.yaml."""
    evaluate: dict[str, Any] = {}
    for factor, value in zip(FACTORS, design, strict=True):
        if factor.key and factor.name in named:
            *sections, name = factor.key.split(".")
            node = evaluate
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
    model, choose = design[PLACE["model"]], design[PLACE["choose"]]
    return {"evaluate": {"models": [model if choose == "none" else f"{model}+{choose}"], **evaluate}}


@dataclass(frozen=True)
class Space:
    """`options` [factor][option]; `root`: the design that params.yaml has now."""

    options: tuple[tuple[Any, ...], ...]
    root: Design

    @classmethod
    def of(cls, params: SearchParams) -> Space:
        """The space that `design.space` describes. Raises ParamsError for a model that the run does not have, a choice that it
        cannot make, or a space that is too large."""
        evaluate, space = params.evaluate.model_dump(), params.design.space
        models = model_names(params.domains)
        given = space.model or models[1:]
        strange = sorted(set(given) - set(models))
        if strange:
            raise ParamsError(f"{SETTINGS}: space.model names {strange}; there are {', '.join(models)}")
        _check_choices(params)
        root = [_nested(evaluate, factor.key) if factor.key else None for factor in FACTORS]
        root[PLACE["model"]] = "merged" if "merged" in given else given[0]
        root[PLACE["choose"]] = "none"
        options = []
        for factor, now in zip(FACTORS, root, strict=True):
            found = list(given if factor.name == "model" else _asked(space, factor.name))
            found += [now] if now not in found else []
            if factor.ordered:
                found.sort(key=lambda value: math.inf if value is None else value)
            options.append(tuple(found))
        size = math.prod(map(len, options))
        if size > LARGEST:
            raise ParamsError(f"{SETTINGS}: space has {size:,} designs; leave out options until it has {LARGEST:,} at most")
        made = cls(tuple(options), tuple(root))
        return cls(made.options, made.canonical(made.root))

    def canonical(self, design: Design) -> Design:
        """The one that stands for all designs that play like this one: factors without effect are as in the root."""
        values = list(design)
        if values[PLACE["temperature"]] == 0:
            values[PLACE["choose"]] = "none"
            for name in ("top_p", "top_k"):
                values[PLACE[name]] = self.root[PLACE[name]]
        if values[PLACE["choose"]] == "none":
            values[PLACE["draws"]] = self.root[PLACE["draws"]]
        if values[PLACE["choose"]] not in SCORED:
            values[PLACE["per_token"]] = self.root[PLACE["per_token"]]
        return tuple(values)

    def restored(self, saved: Sequence[Any]) -> Design:
        """A design that was written down, perhaps before the last factors were there: it had params.yaml's options of them."""
        return (*saved, *self.root[len(saved) :])

    def all(self) -> list[Design]:
        """Every design once, in canonical order."""
        return sorted({self.canonical(design) for design in product(*self.options)}, key=self.order)

    def order(self, design: Design) -> tuple[int, ...]:
        """Option numbers: the canonical order of designs."""
        return tuple(options.index(value) for options, value in zip(self.options, design, strict=True))

    def free(self, component: str | None = None) -> list[int]:
        """Places of factors with more than one option: of a component, or (None) of all but decoding."""
        places = COMPONENTS[component] if component else [p for p, factor in enumerate(FACTORS) if factor.component != DECODING]
        return [place for place in places if len(self.options[place]) > 1]

    def axes(self) -> list[list[dict[int, Any]]]:
        """What covering arrays are over: of each factor that is no decoding its options, as changes of a design. Scores per token
        are further options of the choice: in a row with a choice that has none they would be lost."""
        places = [place for place in self.free() if place != PLACE["per_token"]]
        found: list[list[dict[int, Any]]] = [[{place: option} for option in self.options[place]] for place in places]
        for other in self.options[PLACE["per_token"]]:
            if other != self.root[PLACE["per_token"]]:
                of_choice = found[places.index(PLACE["choose"])]
                of_choice += [{**one, PLACE["per_token"]: other} for one in of_choice if one[PLACE["choose"]] in SCORED]
        return found

    @property
    def told(self) -> dict[str, tuple[Any, ...]]:
        """Options by factor, those `later` ones left out of which there is one."""
        named = zip(FACTORS, self.options, strict=True)
        return {factor.name: options for factor, options in named if not factor.later or len(options) > 1}

    def overrides(self, design: Design) -> dict[str, Any]:
        """The design as values over params.yaml."""
        return _as_values(design, set(self.told))

    def name(self, design: Design) -> str:
        """12 hex digits: the same in spaces with a `later` factor and without it, where the design has params.yaml's option."""
        pairs = zip(FACTORS, design, self.root, strict=True)
        values = _as_values(design, {factor.name for factor, value, now in pairs if not factor.later or value != now})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def label(self, design: Design) -> str:
        """What it has of its own, for people."""
        parts = [
            f"{factor.name} {'all' if value is None else json.dumps(value) if factor.name == 'note' else value}"
            for factor, value, now in zip(FACTORS, design, self.root, strict=True)
            if value != now
        ]
        return ", ".join(parts) or "as params.yaml has it"


def one_hot(value: Any, options: Sequence[Any]) -> list[float]:
    return [float(value == option) for option in options]


def features(space: Space, design: Design) -> list[float]:
    """Every factor one-hot, ordered ones by their place among the options in [0, 1] too, so that what lies between has a value
    between unless it was seen to differ; factors without a choice are left out."""
    found: list[float] = []
    for factor, options, value in zip(FACTORS, space.options, design, strict=True):
        if len(options) > 1:
            share = BETWEEN if factor.ordered else 1.0
            found += [share * hot for hot in one_hot(value, options)]
            found += [options.index(value) / (len(options) - 1)] if factor.ordered else []
    return found
