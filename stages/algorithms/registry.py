"""RL methods by name: the modules of stages/algorithms/methods with a COMPOSITION, and those of other packages through the
entry-point group `bellwether.algorithms`, whose entries name such a module or its COMPOSITION."""

from __future__ import annotations

from stages.algorithms import methods
from stages.algorithms.card import Card, Composition
from stages.runtime.entry_points import Group, place
from stages.runtime.validation import ParamsError

GROUP = Group("bellwether.algorithms", "rl.algorithm", methods, "COMPOSITION")


def names() -> list[str]:
    """All known names, sorted, from file names and package metadata, without importing."""
    return GROUP.names()


def composition(name: str) -> Composition:
    """The method `name`. Raises ParamsError for an unknown name, with the nearest known one, and for a module that is no
    method."""
    found = GROUP.load(name)
    if not isinstance(found, Composition):
        raise ParamsError(f"rl.algorithm '{name}': {place(found)} has no COMPOSITION; set it to a stages.plugins.Composition")
    return found


def learns_token_values(method: Composition) -> bool:
    """Whether the method saves token values with its policy, which can rank actions."""
    return method.offline is not None and method.offline.value is not None


def cards() -> list[Card]:
    """Every method's card, by name."""
    return [composition(name).card for name in names()]
