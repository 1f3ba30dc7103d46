"""Cloning of the correct paths of annotate's search trees."""

from __future__ import annotations

from stages.algorithms.card import Card, Composition
from stages.runtime.validation import Count, Section

CARD = Card(
    slug="tree_bc",
    title="Cloning of correct tree paths",
    paper="policy self-training of ReST-MCTS*, Zhang et al., arXiv 2406.03816; SFT rounds of rStar-Math, Guan et al., arXiv "
    "2501.04519",
    equation="loss = -log pi(y_t), mean over the policy's tokens of a step's paths from the root of a tree to a success",
    assumptions="trees of data/annotated/<domain> with successes. Of each tree, the settings.per_tree paths with the fewest "
    "turns; rStar-Math takes the two of highest mean Q",
    reduces_to="trees of one rollout each: maximum likelihood on the successes of rollout (bon_sft without play)",
    tested_by="tests/training/test_tree_bc.py",
    switch="rl.algorithm: tree_bc",
)


class Settings(Section):
    paths_per_step: Count = 32
    """Paths per optimizer step; each is used once per pass."""
    per_tree: Count = 4
    """Correct paths of each tree, those with the fewest turns."""


COMPOSITION = Composition(card=CARD, parts={}, settings=Settings, data="paths")
