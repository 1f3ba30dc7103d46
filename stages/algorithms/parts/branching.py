"""Entropy-triggered branching: where an answer of the environment leaves the policy uncertain, further episodes branch off
(ARPO, arXiv 2507.19849).

H_t is the entropy of a turn's first tokens over the most likely candidates, summed (the authors' code) or averaged, over
ln(vocabulary size); dH = H_t - H_0, the rise since the first turn. An episode branches if

    clip(u - entropy_weight * dH, 0, 1) <= base,  u ~ U(0, 1),   so   P(branch) = clip(base + entropy_weight * dH, 0, 1),

up to beam - 1 times, while the group has places. The draw is deliberate: entropy alone would branch at one place again and
again. Under probe: answer (the paper) the turn behind an answer decides on branches at that answer; under call (the code) it is
the turn that called for it, so that the first answer's dH is 0.
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
"""Kinds of branching that `EntropyPlan` plays."""


class Branching(Part):
    """How a group is played: its episodes one beside the other, or some of them as branches of others."""

    data = ("episodes",)

    kind: Literal["none", "random", "entropy", "own"] = "none"
    """`entropy`: episodes branch after an answer of the environment, the likelier the more entropy has risen; `random`: with the
    same chance everywhere."""
    initial: Annotated[Count | None, AppliesTo("kind", "entropy", "random")] = None
    """Episodes of a group that start from the task; the places up to group_size are for branches."""
    beam: Annotated[Count, AppliesTo("kind", "entropy", "random")] = 2
    """An episode that branches becomes at most this many; 1: none branches."""
    base: Annotated[Share, AppliesTo("kind", "entropy", "random")] = 0.5
    """Chance of a branch where entropy has not risen."""
    entropy_weight: Annotated[NonNegative, AppliesTo("kind", "entropy")] = 0.2
    """What a rise of the normalised entropy by 1 adds to that chance."""
    tokens: Annotated[Count, AppliesTo("kind", "entropy")] = 20
    """Tokens at the start of a turn that entropy is taken over."""
    candidates: Annotated[int, Field(ge=2), AppliesTo("kind", "entropy")] = 10
    """Most likely tokens that entropy is taken over."""
    aggregate: Annotated[Literal["sum", "mean"], AppliesTo("kind", "entropy")] = "sum"
    """Of the tokens' entropies, each over the log of the vocabulary size."""
    probe: Annotated[Literal["call", "answer"], AppliesTo("kind", "entropy")] = "answer"
    """Which turn's entropy decides on a branch behind an answer: of the turn that called for it, or of the one that follows."""
    inherit: Annotated[bool, AppliesTo("kind", "entropy")] = True
    """A branch's rise counts from its parent's first turn; False: from its own."""

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
                f"rl.branching makes branches of the episodes of a group that the policy plays, and there is {played} "
                f"(rl.group_size less rl.external.per_group); raise rl.group_size"
            )
        if (self.initial or 1) > played:
            raise ParamsError(
                f"rl.branching.initial is {self.initial}, more than the {played} episodes of a group that the policy plays "
                f"(rl.group_size less rl.external.per_group); lower it, or raise rl.group_size"
            )


def branches(uniform: float, rise: float, base: float, weight: float) -> bool:
    """Whether an episode branches, for one draw in [0, 1)."""
    return base + weight * rise > 0 and min(max(uniform - weight * rise, 0.0), 1.0) <= base


def turn_entropy(entropies: Sequence[float], tokens: int, aggregate: str, vocabulary: int) -> float:
    """H of a turn from the entropies (nats) before its tokens: sum or mean of the first `tokens` over ln(vocabulary)."""
    first = entropies[:tokens]
    return math.fsum(first) / (len(first) if aggregate == "mean" and first else 1) / math.log(vocabulary)


@dataclass(frozen=True)
class EntropyPlan:
    """`stages.agent.branching.Plan` for branching.kind entropy and random, from resolved parameters; `vocabulary`: tokens that
    the policy knows."""

    params: Branching
    vocabulary: int

    @property
    def candidates(self) -> int:
        """None are needed where the chance is the same everywhere."""
        return self.params.candidates if self.params.kind == "entropy" else 0

    def initial(self, size: int) -> int:
        return min(self.params.initial or size, size)

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
        """How many turns a branch of the path would take over; 0 if there is no answer to branch behind."""
        if self.params.probe == "call":
            return len(path.entropies) if path.alive else 0
        taken = len(path.entropies) - 1
        # Where a branch came from it does not branch once more: its parent has had its draws there.
        return taken if taken > path.inherited or not path.inherited else 0

    def grow(self, paths: Sequence[Path], free: int, *key: object) -> list[Fork]:
        """See `stages.agent.branching.Plan`: rows in order, as long as there are places."""
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
