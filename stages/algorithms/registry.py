"""All RL methods by name. A method is one module of stages/algorithms/methods with a COMPOSITION; its file's name is its name.

Methods outside this repository are found through the entry-point group `bellwether.algorithms`, whose entries name such a module
or its COMPOSITION.
"""

from __future__ import annotations

import importlib
import pkgutil

from stages.algorithms import methods
from stages.algorithms.card import Card, Composition
from stages.runtime.installed import Group, place
from stages.runtime.validation import ParamsError

GROUP = Group("bellwether.algorithms", "rl.algorithm")


def names() -> list[str]:
    """Every known name, sorted. Looks at file names and package metadata alone."""
    own = {module.name for module in pkgutil.iter_modules(methods.__path__)}
    return sorted(own | set(GROUP.points()))


def composition(name: str) -> Composition:
    """The method called `name`. Raises ParamsError with the nearest known name for an unknown one, and for a module that is not
    a method."""
    if any(module.name == name for module in pkgutil.iter_modules(methods.__path__)):
        found = importlib.import_module(f"{methods.__name__}.{name}")
    else:
        found = GROUP.load(name, names())
    made = getattr(found, "COMPOSITION", found)
    if not isinstance(made, Composition):
        raise ParamsError(f"rl.algorithm '{name}': {place(found)} has no COMPOSITION; set it to a stages.plugins.Composition")
    return made


def learns_token_values(method: Composition) -> bool:
    """Whether the method leaves values of tokens beside its policy, by which a model can choose among actions."""
    return method.offline is not None and method.offline.value is not None


def cards() -> list[Card]:
    """Every method's card, by name."""
    return [composition(name).card for name in names()]
