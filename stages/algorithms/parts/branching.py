"""Entropy-triggered branching: further episodes branch off after observations that leave the policy uncertain (ARPO, arXiv
2507.19849).

H_t is the entropy of a turn's first tokens over the most likely candidates, summed (the authors' code) or averaged, over
ln(vocabulary size); dH = H_t - H_0, the rise since the first turn. An episode branches if

    clip(u - entropy_weight * dH, 0, 1) <= base,  u ~ U(0, 1),   so   P(branch) = clip(base + entropy_weight * dH, 0, 1),

up to beam - 1 times, while the group is not full. The draw is deliberate: entropy alone would always branch at the same place.
With probe: answer (the paper) the turn after an observation decides on branches there; with call (the code) it is the turn
before it, so that dH at the first observation is 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.agent.branching import Fork, Path
from stages.algorithms.parts.part import AppliesTo, Part
from stages.runtime.validation import Count, NonNegative, ParamsError, Share
from stages.seeding import stream

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


KINDS = ("random", "entropy")
"""Kinds of branching that `EntropyPlan` implements."""


class Branching(Part):
    """Whether the episodes of a group are played independently, or some of them branch off others."""

    data = ("episodes",)

    kind: Literal["none", "random", "entropy", "own"] = "none"
    """`entropy`: episodes branch after observations, with a probability that grows with the rise in entropy; `random`: with the
    same probability everywhere."""
    initial: Annotated[Count | None, AppliesTo("kind", "entropy", "random")] = None
    """Episodes of a group that start from the task; the others, up to group_size, are branches. null: half of them."""
    beam: Annotated[Count, AppliesTo("kind", "entropy", "random")] = 2
    """An episode that branches becomes at most this many episodes; 1: no branching."""
    base: Annotated[Share, AppliesTo("kind", "entropy", "random")] = 0.5
    """Probability of a branch if entropy has not risen."""
    entropy_weight: Annotated[NonNegative, AppliesTo("kind", "entropy")] = 0.2
    """Increase of that probability per unit of rise in normalised entropy."""
    tokens: Annotated[Count, AppliesTo("kind", "entropy")] = 20
    """Number of tokens at the start of a turn over which entropy is computed."""
    candidates: Annotated[int, Field(ge=2), AppliesTo("kind", "entropy")] = 10
    """Number of most likely tokens over which entropy is computed."""
    aggregate: Annotated[Literal["sum", "mean"], AppliesTo("kind", "entropy")] = "sum"
    """How the tokens' entropies, each divided by the log of the vocabulary size, are combined."""
    probe: Annotated[Literal["call", "answer"], AppliesTo("kind", "entropy")] = "answer"
    """Turn whose entropy decides on a branch after an observation: call: the turn before it; answer: the turn after it."""
    inherit: Annotated[bool, AppliesTo("kind", "entropy")] = True
    """Whether a branch's rise is measured from its parent's first turn, or from its own."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        branching = values["branching"]
        if branching["kind"] in KINDS and branching["initial"] is None:
            branching["initial"] = max(1, (given.group_size - values["external"]["per_group"]) // 2)

    def check(self, rl: Rl, method: Composition) -> None:
        played = rl.group_size - rl.external.per_group
        if self.kind not in KINDS:
            return
        if played < 2:
            raise ParamsError(
                f"rl.branching needs at least 2 episodes of a group that the policy plays, and there is {played} (rl.group_size "
                f"minus rl.external.per_group); raise rl.group_size"
            )
        if self.initial is not None and self.initial > played:
            raise ParamsError(
                f"rl.branching.initial is {self.initial}, more than the {played} episodes of a group that the policy plays "
                f"(rl.group_size minus rl.external.per_group); lower it, or raise rl.group_size"
            )


def branches(uniform: float, rise: float, base: float, weight: float) -> bool:
    """Whether an episode branches, given a uniform draw in [0, 1)."""
    return base + weight * rise > 0 and min(max(uniform - weight * rise, 0.0), 1.0) <= base


def turn_entropy(entropies: Sequence[float], tokens: int, aggregate: str, vocabulary: int) -> float:
    """H of a turn from the entropies (nats) before its tokens: sum or mean of the first `tokens` over ln(vocabulary)."""
    first = entropies[:tokens]
    return math.fsum(first) / (len(first) if aggregate == "mean" and first else 1) / math.log(vocabulary)


@dataclass(frozen=True)
class EntropyPlan:
    """`stages.agent.branching.Plan` for branching.kind entropy and random, from resolved parameters; `vocabulary`: size of the
    policy's vocabulary."""

    params: Branching
    vocabulary: int

    @property
    def candidates(self) -> int:
        """Candidates for the entropy; 0 for branching.kind: random, which needs no entropy."""
        return self.params.candidates if self.params.kind == "entropy" else 0

    def initial(self, size: int) -> int:
        return size if self.params.initial is None else min(self.params.initial, size)

    def rise(self, path: Path) -> float:
        """dH of the path's last turn; 0 for branching.kind: random."""
        if self.params.kind != "entropy":
            return 0.0
        first = 0 if self.params.inherit else min(path.inherited, len(path.entropies) - 1)
        tokens, aggregate = self.params.tokens, self.params.aggregate
        then, now = (
            turn_entropy(path.entropies[turn], tokens, aggregate, self.vocabulary) for turn in (first, len(path.entropies) - 1)
        )
        return now - then

    def place(self, path: Path) -> int:
        """How many turns a branch of the path would inherit; 0 if there is no observation to branch after."""
        if self.params.probe == "call":
            return len(path.entropies) if path.alive else 0
        taken = len(path.entropies) - 1
        # A branch does not branch again at its origin, for which its parent has already drawn.
        return taken if taken > path.inherited or not path.inherited else 0

    def grow(self, paths: Sequence[Path], free: int, *key: object) -> list[Fork]:
        """See `stages.agent.branching.Plan`: at most `free` forks, in the order of the paths."""
        forks: list[Fork] = []
        for path in paths:
            turns = self.place(path) if path.moved else 0
            if not turns:
                continue
            draws = stream(*key, path.row, turns)
            for _ in range(self.params.beam - 1):
                chosen = branches(draws.random(), self.rise(path), self.params.base, self.params.entropy_weight)
                if chosen and len(forks) < free:
                    forks.append(Fork(path.row, turns))
        return forks
