"""All RL methods by name. A method is one module with a CARD and a COMPOSITION; add it here and to `Rl.algorithm` in params."""

from __future__ import annotations

from stages.algorithms import grpo, ppo, reinforce, rloo
from stages.algorithms.contract import Card, Composition

COMPOSITIONS: dict[str, Composition] = {module.CARD.slug: module.COMPOSITION for module in (reinforce, rloo, grpo, ppo)}


def composition(name: str) -> Composition:
    """The method called `name`. Raises ValueError listing the known ones."""
    if name not in COMPOSITIONS:
        raise ValueError(f"unknown rl.algorithm '{name}'; known: {', '.join(sorted(COMPOSITIONS))}")
    return COMPOSITIONS[name]


def cards() -> list[Card]:
    """Every method's card, by name."""
    return [COMPOSITIONS[name].card for name in sorted(COMPOSITIONS)]
