"""The space of agent designs: factors, their options, and a design as values of params.yaml.

A design is a tuple with one option per factor, in the order of FACTORS. Equivalent designs have one canonical form
(`Space.canonical`): without a choice among draws their number has no effect, and greedy draws are identical.
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
"""Largest number of designs in a space, all of which are enumerated."""
ORDERED_WEIGHT = 0.5
"""Weight of the one-hot part of an ordered factor in `features`."""
SCORED = ("logprob", "value")
"""Choices by token scores, which are summed or averaged."""
Design = tuple[Any, ...]


@dataclass(frozen=True)
class Factor:
    """One factor of a design. `component`: decoding is refined, other components are recombined."""

    name: str
    component: str
    key: str
    """Its key in section `evaluate`; "" for the parts of `evaluate.models`."""
    ordered: bool = False
    optional: bool = False
    """Left out of names and results unless the space has several options, so that earlier evaluations stay valid."""


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
    # Last, since designs in older journals end before it (`Space.restored`).
    Factor("per_token", "workflow", "best_of.per_token", optional=True),
)
INDEX = {factor.name: index for index, factor in enumerate(FACTORS)}
COMPONENTS = {
    component: tuple(index for index, factor in enumerate(FACTORS) if factor.component == component)
    for component in dict.fromkeys(factor.component for factor in FACTORS)
}
"""Component -> indices of its factors."""


def _nested(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _listed(space: DesignSpace, name: str) -> Sequence[Any]:
    """Options of a factor in `design.space`; none for `per_token` if no choice uses token scores."""
    if name == "per_token" and not set(SCORED) & set(space.choose):
        return ()
    return getattr(space, name) or ()


def _check_choices(params: SearchParams) -> None:
    """Raise ParamsError for a choice by a Q-model or by token values that a domain lacks."""
    choose = params.design.space.choose
    no_q = [name for name in params.domains if params.section("annotate", name).q_model.kind == "none"]
    methods = {name: composition(params.section("rl", name).algorithm) for name in params.domains}
    no_values = [name for name, method in methods.items() if not learns_token_values(method)]
    if "q" in choose and no_q:
        raise ParamsError(
            f"{SETTINGS}: space.choose: q needs a Q-model, but annotate.q_model.kind is none in {no_q[0]}; "
            "set it to step_dpo or regression, or remove q"
        )
    if "value" in choose and no_values:
        raise ParamsError(
            f"{SETTINGS}: space.choose: value needs token values, which rl learns with rl.algorithm b_coder, but in "
            f"{no_values[0]} it is {params.section('rl', no_values[0]).algorithm}; set it to b_coder, or remove value"
        )


def _as_values(design: Design, named: Collection[str]) -> dict[str, Any]:
    """A design's options of the factors `named`, as overrides of params.yaml."""
    evaluate: dict[str, Any] = {}
    for factor, value in zip(FACTORS, design, strict=True):
        if factor.key and factor.name in named:
            *sections, name = factor.key.split(".")
            node = evaluate
            for section in sections:
                node = node.setdefault(section, {})
            node[name] = value
    model, choose = design[INDEX["model"]], design[INDEX["choose"]]
    return {"evaluate": {"models": [model if choose == "none" else f"{model}+{choose}"], **evaluate}}


@dataclass(frozen=True)
class Space:
    """`options` [factor][option]; `root`: the default, the design in params.yaml."""

    options: tuple[tuple[Any, ...], ...]
    root: Design

    @classmethod
    def of(cls, params: SearchParams) -> Space:
        """The space that `design.space` describes. Raises ParamsError for an unknown model, an impossible choice, or too many
        designs."""
        evaluate, space = params.evaluate.model_dump(), params.design.space
        models = model_names(params.domains)
        given = space.model or models[1:]
        unknown = sorted(set(given) - set(models))
        if unknown:
            raise ParamsError(f"{SETTINGS}: space.model: unknown {unknown}; the models are {', '.join(models)}")
        _check_choices(params)
        root = [_nested(evaluate, factor.key) if factor.key else None for factor in FACTORS]
        root[INDEX["model"]] = "merged" if "merged" in given else given[0]
        root[INDEX["choose"]] = "none"
        options = []
        for factor, default in zip(FACTORS, root, strict=True):
            found = list(given if factor.name == "model" else _listed(space, factor.name))
            found += [default] if default not in found else []
            if factor.ordered:
                found.sort(key=lambda value: math.inf if value is None else value)
            options.append(tuple(found))
        size = math.prod(map(len, options))
        if size > LARGEST:
            raise ParamsError(f"{SETTINGS}: space has {size:,} designs; remove options until it has at most {LARGEST:,}")
        space_of_root = cls(tuple(options), tuple(root))
        return cls(space_of_root.options, space_of_root.canonical(space_of_root.root))

    def canonical(self, design: Design) -> Design:
        """The canonical form of equivalent designs: factors without effect have the root's options."""
        values = list(design)
        coolest = min(self.options[INDEX["temperature"]])
        if values[INDEX["temperature"]] == 0 or values[INDEX["top_k"]] == 1:
            values[INDEX["choose"]] = "none"
            # Greedy draws have one form: temperature 0 if that is an option, else top_k 1.
            for name in ("top_p", "top_k" if coolest == 0 else "temperature"):
                values[INDEX[name]] = self.root[INDEX[name]]
            if coolest == 0:
                values[INDEX["temperature"]] = coolest
        if values[INDEX["choose"]] == "none":
            values[INDEX["draws"]] = self.root[INDEX["draws"]]
        if values[INDEX["choose"]] not in SCORED:
            values[INDEX["per_token"]] = self.root[INDEX["per_token"]]
        return tuple(values)

    def restored(self, saved: Sequence[Any]) -> Design:
        """A stored design; factors added since have the root's options."""
        return (*saved, *self.root[len(saved) :])

    def all(self) -> list[Design]:
        """Every design once, in canonical order."""
        return sorted({self.canonical(design) for design in product(*self.options)}, key=self.order)

    def order(self, design: Design) -> tuple[int, ...]:
        """Option numbers: the canonical order of designs."""
        return tuple(options.index(value) for options, value in zip(self.options, design, strict=True))

    def free(self, component: str | None = None) -> list[int]:
        """Indices of factors with several options: of a component, or (None) of all but decoding."""
        indices = COMPONENTS[component] if component else [p for p, factor in enumerate(FACTORS) if factor.component != DECODING]
        return [index for index in indices if len(self.options[index]) > 1]

    def axes(self) -> list[list[dict[int, Any]]]:
        """The axes of covering arrays: per factor outside decoding its options, as changes of a design. `per_token` adds
        options to the choice, since it has no effect with other choices."""
        indices = [index for index in self.free() if index != INDEX["per_token"]]
        found: list[list[dict[int, Any]]] = [[{index: option} for option in self.options[index]] for index in indices]
        for other in self.options[INDEX["per_token"]]:
            if other != self.root[INDEX["per_token"]]:
                of_choice = found[indices.index(INDEX["choose"])]
                of_choice += [{**one, INDEX["per_token"]: other} for one in of_choice if one[INDEX["choose"]] in SCORED]
        return found

    @property
    def factor_options(self) -> dict[str, tuple[Any, ...]]:
        """Factor -> options, without `optional` factors that have one option."""
        named = zip(FACTORS, self.options, strict=True)
        return {factor.name: options for factor, options in named if not factor.optional or len(options) > 1}

    def overrides(self, design: Design) -> dict[str, Any]:
        """The design as overrides of params.yaml."""
        return _as_values(design, set(self.factor_options))

    def name(self, design: Design) -> str:
        """12 hex digits, which ignore `optional` factors that have the root's option."""
        pairs = zip(FACTORS, design, self.root, strict=True)
        values = _as_values(design, {factor.name for factor, value, now in pairs if not factor.optional or value != now})
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]

    def label(self, design: Design) -> str:
        """Its differences from the default, for people."""
        parts = [
            f"{factor.name} {'all' if value is None else json.dumps(value) if factor.name == 'note' else value}"
            for factor, value, now in zip(FACTORS, design, self.root, strict=True)
            if value != now
        ]
        return ", ".join(parts) or "as params.yaml has it"


def one_hot(value: Any, options: Sequence[Any]) -> list[float]:
    return [float(value == option) for option in options]


def features(space: Space, design: Design) -> list[float]:
    """Each factor with several options one-hot; ordered ones also by their rank in [0, 1], so that the model interpolates between
    options."""
    found: list[float] = []
    for factor, options, value in zip(FACTORS, space.options, design, strict=True):
        if len(options) > 1:
            weight = ORDERED_WEIGHT if factor.ordered else 1.0
            found += [weight * hot for hot in one_hot(value, options)]
            found += [options.index(value) / (len(options) - 1)] if factor.ordered else []
    return found
