"""Settings of the pursuit and of its players' contributions; experiments of lane control override them. Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stages.runtime.validation import Count, Section, Share, refuse_idle

MOST_EXACT = 10
"""Players of whom all coalitions are evaluated."""


class Pursuit(Section):
    """Contributions of predators of given speeds to the team's return (stages/control/pursuit/contributions.py)."""

    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    speeds: Annotated[list[Annotated[float, Field(ge=0.0, le=2.0)]], Field(min_length=1, max_length=16)] = [0.5, 1.0, 1.5]
    """Of the predators: mean moves per step."""
    switched_off: Annotated[int, Field(ge=0)] | None = None
    """A predator, from 0, whose own policy is to stay."""
    replacement: Literal["noop", "random", "random_player"] = "noop"
    """What predators outside a coalition do: stay, move at random, or move as another one would from where it is itself."""
    estimator: Literal["exact", "permutation", "coalition_uniform"] = "exact"
    """exact: all coalitions; permutation: random orders of joining; coalition_uniform: as in the reference code, which estimates
    Banzhaf values."""
    value: Literal["shapley", "banzhaf"] = "shapley"
    """Of exact."""
    samples: Count = 100
    """Of permutation and coalition_uniform; each plays one new episode per coalition."""
    antithetic: bool = False
    """Of permutation: also walk every order in reverse, at twice the cost. Off, so that the plain estimator is the one compared
    with."""
    episodes: Count = 200
    """Of exact, and of a sampling estimator with cache_coalitions: per coalition."""
    players: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    """Predators, from 0, whose contributions are computed; the others always chase. null: all."""
    common_random_numbers: bool = True
    """The coalitions of a sample, or all of exact, share their random draws; false: each has its own."""
    cache_coalitions: bool = False
    """Of a sampling estimator: play each coalition once, for `episodes` episodes; false: one new episode every time."""
    details: bool = False
    """Also write error_<i>, the standard error of each contribution, and share_<i>, its share of what the players gain together,
    where that is clear (contributions.py)."""
    size: Annotated[int, Field(ge=2, le=100)] = 12
    """Of the grid."""
    steps: Count = 50
    """Per episode."""
    prey_speed: Share = 0.7
    """Probability that the prey moves in a step."""

    @model_validator(mode="after")
    def _fits(self) -> Pursuit:
        count = len(self.speeds)
        players = range(count) if self.players is None else self.players
        if len(set(players)) < len(players):
            raise ValueError(f"players names a predator twice: {self.players}")
        if unknown := [player for player in players if player >= count]:
            raise ValueError(f"players {unknown[0]}: the predators are 0 to {count - 1}")
        if self.replacement == "random_player" and count == 1:
            raise ValueError("replacement random_player needs another predator; add one to speeds, or use noop")
        if self.switched_off is not None and self.switched_off >= count:
            raise ValueError(f"switched_off {self.switched_off}: the predators are 0 to {count - 1}")
        if self.estimator == "exact" and len(players) > MOST_EXACT:
            raise ValueError(
                f"{len(players)} predators have {2 ** len(players)} coalitions; use estimator: permutation for more than "
                f"{MOST_EXACT}"
            )
        repeats = "episodes" if self.estimator == "exact" else "samples"
        if getattr(self, repeats) == 1:
            raise ValueError(f"{repeats} 1: contributions of one have no standard error; raise it to two or more")
        exact, sampled = (self.estimator == "exact", "estimator: exact"), (self.estimator != "exact", "a sampling estimator")
        permuted = (self.estimator == "permutation", "estimator: permutation")
        whole = (self.estimator == "exact" or self.cache_coalitions, "estimator: exact, or cache_coalitions: true")
        needs = {"value": exact, "episodes": whole, "samples": sampled, "antithetic": permuted, "cache_coalitions": sampled}
        refuse_idle(self, "", needs)
        return self
