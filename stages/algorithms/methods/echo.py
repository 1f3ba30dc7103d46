"""ECHO: GRPO that also learns to predict the environment's answers."""

from stages.algorithms.card import Card, Composition
from stages.algorithms.methods import grpo

CARD = Card(
    slug="echo",
    title="ECHO",
    paper="Shrivastava et al., arXiv 2605.24517",
    equation="L = L_GRPO + coef * mean over the environment's tokens of -log pi(o_t | all before it), from one forward pass; "
    "coef 0.05 (rl.observation.coef; the paper's useful range is 0.01 to 0.05)",
    assumptions="observations that say something about the state. Each loss has its own denominator; episodes of dead groups are "
    "read for it, too; the chat template's tokens around an observation count as its own, which is ours",
    reduces_to="observation.coef 0, or episodes of one turn: GRPO",
    tested_by="tests/training/test_observation.py",
    switch="rl.algorithm: echo",
)

COMPOSITION = Composition(card=CARD, parts={**grpo.COMPOSITION.parts, "observation.coef": 0.05})
