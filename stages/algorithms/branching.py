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

from stages.agent.branching import Fork, Path
from stages.parameters.rl import Branching
from stages.seeding import stream


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
        return (self.params.candidates or 0) if self.params.kind == "entropy" else 0

    def initial(self, size: int) -> int:
        return min(self.params.initial or size, size)

    def rise(self, path: Path) -> float:
        """dH of the path's last turn; 0 for branching.kind: random."""
        if self.params.kind != "entropy":
            return 0.0
        first = 0 if self.params.inherit else min(path.inherited, len(path.entropies) - 1)
        tokens, aggregate = self.params.tokens or 1, self.params.aggregate or "sum"
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
            for _ in range((self.params.beam or 1) - 1):
                chosen = branches(draws.random(), self.rise(path), self.params.base or 0.0, self.params.entropy_weight or 0.0)
                if chosen and len(forks) < free:
                    forks.append(Fork(path.row, turns))
        return forks
