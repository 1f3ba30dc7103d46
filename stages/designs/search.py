"""The next design to evaluate, as a pure function of those evaluated: a stopped search resumes from its nodes.

agentswift: the design in params.yaml; labels for the value model (a covering array over components, then promising and poor
designs in turn); then the tree. unguided: the tree only, with random candidates. random: any design not evaluated yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from stages.designs.covering import covering_array
from stages.designs.settings import DesignSettings
from stages.designs.space import COMPONENTS, DECODING, FACTORS, Design, Space
from stages.designs.tree import Node, node_probabilities
from stages.designs.value_model import ValueModel, acquisition
from stages.seeding import stream

DUPLICATES = 40
"""Known proposals in a row after which a design is drawn at random."""
POOL = 2000
"""Designs that balanced labels are chosen from."""
FREQUENT = 0.2
"""Share of rejected actions, or of truncated episodes, from which refinement reacts to them."""


@dataclass(frozen=True)
class Proposal:
    """The next design to evaluate; its fields become those of a `Node`."""

    design: Design
    parent: int
    origin: str
    predicted: float | None = None
    std: float | None = None
    reused: int = 0


class Search:
    """Proposes designs of `space`. `value_model` is fitted on the nodes before each proposal; None for methods without one."""

    def __init__(self, space: Space, settings: DesignSettings, seed: int, value_model: ValueModel | None) -> None:
        if (value_model is None) == (settings.method == "agentswift"):
            raise ValueError(f"method {settings.method} takes {'a' if value_model is None else 'no'} value model")
        self.space, self.settings, self.seed, self.value_model = space, settings, seed, value_model
        self.designs = space.all()
        self._covering = self._covering_designs()

    def _covering_designs(self) -> list[Design]:
        """Unique designs from the rows of the covering array, with the root's decoding."""
        if self.value_model is None:
            return []
        axes, found = self.space.axes(), []
        for row in covering_array([len(axis) for axis in axes], self.settings.labels.strength, self.seed):
            changes: dict[int, Any] = {}
            for axis, option in zip(axes, row, strict=True):
                changes |= axis[option]
            found.append(self.space.canonical(self._with(self.space.root, changes)))
        return list(dict.fromkeys(found))

    def propose(self, nodes: Sequence[Node]) -> Proposal | None:
        """The next design after `nodes`, the earlier proposals in order; None when the budget is spent or no design is left."""
        done = {node.design for node in nodes}
        left = [design for design in self.designs if design not in done]
        if not left or len(nodes) >= self.settings.budget:
            return None
        if not nodes:
            return Proposal(self.space.root, -1, "root")
        rng = stream("design", self.seed, self.settings.method, len(nodes))
        if self.settings.method == "random":
            return Proposal(rng.choice(left), 0, "random")
        if self.value_model is not None:
            self.value_model.fit(nodes)
            label = self._label(nodes, left, rng)
            if label is not None:
                return label
        return self._from_tree(nodes, done, left, rng)

    # ---- labels -------------------------------------------------------------------------------------------------------------

    def _label(self, nodes: Sequence[Node], left: Sequence[Design], rng: Random) -> Proposal | None:
        """The next label for the value model; None when it has all of them."""
        assert self.value_model is not None
        labels, open_ones = self.settings.labels, set(left)
        for design in self._covering:
            if design in open_ones:
                return Proposal(design, 0, "covering", *self._predicted(design))
        balanced = sum(node.origin in ("promising", "poor") for node in nodes)
        if balanced >= labels.balanced:
            return None
        pool = sorted(rng.sample(left, POOL), key=self.space.order) if len(left) > POOL else list(left)
        sign = 1 if balanced % 2 == 0 else -1
        mean, std = self.value_model.predict(pool)
        best = int(np.argmax(acquisition(mean, std, labels.kappa, sign)))
        return Proposal(pool[best], 0, "promising" if sign > 0 else "poor", float(mean[best]), float(std[best]))

    def _predicted(self, design: Design) -> tuple[float, float]:
        assert self.value_model is not None
        mean, std = self.value_model.predict([design])
        return float(mean[0]), float(std[0])

    # ---- the tree -----------------------------------------------------------------------------------------------------------

    def _from_tree(self, nodes: Sequence[Node], done: set[Design], left: Sequence[Design], rng: Random) -> Proposal:
        guided = self.value_model is not None
        probabilities = node_probabilities(nodes, self.settings.tree, self.settings.tree.beta if guided else 0.0)
        for reused in range(DUPLICATES):
            parent = rng.choices(range(len(nodes)), weights=probabilities.tolist())[0]
            design = self._expand(nodes, parent, done, rng)
            if design is not None:
                return Proposal(design, parent, "tree", *(self._predicted(design) if guided else ()), reused=reused)
        design = rng.choice(left)
        return Proposal(design, 0, "random", *(self._predicted(design) if guided else ()), reused=DUPLICATES)

    def _expand(self, nodes: Sequence[Node], parent: int, done: set[Design], rng: Random) -> Design | None:
        """Recombination, then mutation, then refinement, each keeping the best of its input and its candidates. None if that
        yields no new design."""
        pool = [node.design for node in nodes if not node.failed]
        design = nodes[parent].design
        design = self._best([design, *self.recombined(design, pool, rng)], rng)
        design = self._best([design, *self.mutated(design, rng)], rng)
        last = [design, *self.refined(design, nodes[parent], rng)]
        fresh = [candidate for candidate in last if candidate not in done]
        return self._best(fresh, rng) if fresh else None

    def _best(self, candidates: Sequence[Design], rng: Random) -> Design:
        """The best by the value model, ties in canonical order; a random one without a value model."""
        ordered = sorted(dict.fromkeys(candidates), key=self.space.order)
        if self.value_model is None:
            return rng.choice(ordered)
        mean, std = self.value_model.predict(ordered)
        tree, labels = self.settings.tree, self.settings.labels
        return ordered[int(np.argmax(acquisition(mean, std, labels.kappa, 1) if tree.rank == "ucb" else mean))]

    def _some(self, candidates: list[Design], design: Design, rng: Random) -> list[Design]:
        """At most `tree.proposals` distinct candidates other than `design`."""
        different = [one for one in dict.fromkeys(map(self.space.canonical, candidates)) if one != design]
        return rng.sample(different, min(self.settings.tree.proposals, len(different)))

    def _with(self, design: Design, changes: dict[int, object]) -> Design:
        return tuple(changes.get(index, value) for index, value in enumerate(design))

    def recombined(self, design: Design, pool: Sequence[Design], rng: Random) -> list[Design]:
        """`design` with one component of another evaluated design."""
        found = []
        for indices in COMPONENTS.values():
            for other in dict.fromkeys(tuple(one[index] for index in indices) for one in pool):
                found.append(self._with(design, dict(zip(indices, other, strict=True))))
        return self._some(found, design, rng)

    def mutated(self, design: Design, rng: Random) -> list[Design]:
        """`design` with another option of one factor outside decoding."""
        found = [self._with(design, {index: option}) for index in self.space.free() for option in self.space.options[index]]
        return self._some(found, design, rng)

    def refined(self, design: Design, parent: Node, rng: Random) -> list[Design]:
        """`design` with one decoding factor a step up or down, remedies for the parent's failures first."""
        steps = {}
        for index in self.space.free(DECODING):
            options = self.space.options[index]
            at = options.index(design[index])
            for step in (-1, 1):
                if 0 <= at + step < len(options):
                    steps[FACTORS[index].name, step] = self.space.canonical(self._with(design, {index: options[at + step]}))
        preferred = [steps[step] for step in remedies(parent.failures) if step in steps]
        first = [one for one in dict.fromkeys(preferred) if one != design][: self.settings.tree.proposals]
        others = [one for one in self._some(list(steps.values()), design, rng) if one not in first]
        return [*first, *others][: self.settings.tree.proposals]


def remedies(failures: Mapping[str, float]) -> list[tuple[str, int]]:
    """Decoding steps against failures: cooler, narrower and more draws if actions are rejected, warmer and wider ones if episodes
    are truncated although actions are valid."""
    if failures.get("refused", 0.0) >= FREQUENT:
        return [("temperature", -1), ("top_p", -1), ("draws", 1), ("max_tokens", 1)]
    if failures.get("cut", 0.0) >= FREQUENT:
        return [("temperature", 1), ("top_p", 1), ("max_tokens", 1)]
    return []
