"""Settings of the edge-of-reach problem; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, NonNegative, Positive, Section, Share


class Models(Section):
    """An ensemble of models, one of which, drawn at random, makes each step of a rollout."""

    members: Annotated[int, Field(ge=2, le=1000)] = 7
    generalises: Share = 0.0
    """All members know the moves of the dataset's states; beyond them, each knows a move with this probability, and else guesses.
    1: all know every move, so that nothing is uncertain."""
    uncertainty: NonNegative = 0.0
    """Subtracted from the rewards: this times the standard deviation of the members' next states (MOPO, arXiv 2005.13239)."""


class Reach(Section):
    """Value learning on rollouts of a model in a chain of states (stages/control/reach/ravl.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    states: Annotated[int, Field(ge=2, le=10_000)] = 31
    goal: Annotated[int, Field(ge=0)] = 3
    """The state at distance 0."""
    penalty: Positive = 0.2
    """Minus the reward of a step, per state of distance from the goal after it."""
    covered: Count = 6
    """The dataset has the states 0 to covered - 1; rollouts begin there."""
    rollouts: Count = 2000
    length: Count = 5
    """Steps of a rollout, with random actions; its end is no termination."""
    models: Models | None = None
    """null: a single, perfect model."""
    gamma: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.95
    critics: Count = 10
    """Members of the ensemble; 1: no pessimism."""
    aggregate: Literal["min", "mean", "min_of_2"] = "min"
    """The ensemble's value. min_of_2: the smaller of two members, averaged over all pairs of members; ours, as the paper does not
    say which two: it is the expectation of REDQ's target (arXiv 2101.05982), and with two critics the minimum."""
    spread: Positive = 5.0
    """Standard deviation of the values that learning begins with."""
    true_edge_values: bool = False
    """Replace the values of states that are only ends of rollouts by the true ones: shows that these alone do the harm."""

    @model_validator(mode="after")
    def _fits(self) -> Reach:
        for name, most in (("goal", self.states - 1), ("covered", self.states)):
            if getattr(self, name) > most:
                raise ValueError(f"{name} {getattr(self, name)} is more than {most}, the most in a chain of {self.states} states")
        if self.critics == 1 and self.aggregate != "min":
            raise ValueError(f"aggregate {self.aggregate} has no effect with critics: 1; remove it")
        return self
