"""Dr. GRPO: GRPO without the two normalisations that weight tasks and lengths unequally."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="dr_grpo",
    title="Dr. GRPO",
    paper="Liu et al., Understanding R1-Zero-Like Training, arXiv 2503.20783",
    equation="A_i = R_i - group mean; PPO's clipped ratio; token sum over episodes times a constant length "
    "(loss.constant_length)",
    assumptions="groups of at least 2 episodes from one prompt",
    reduces_to="(G-1)/G times RLOO's advantage; all episodes of the constant length: token_mean",
    tested_by="tests/algorithms/test_advantage.py, tests/algorithms/test_methods.py",
    switch="rl.algorithm: dr_grpo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "group",
        "advantage.std": "none",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "constant",
    },
)
