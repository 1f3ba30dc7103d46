"""GSPO: one importance ratio per episode."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="gspo",
    title="GSPO",
    paper="Zheng et al., arXiv 2507.18071",
    equation="one ratio per episode, s = exp(mean over its policy tokens of log pi - log pi_old); loss = -min(s A, clip(s) A), "
    "mean over episodes; A as in GRPO",
    assumptions="groups of at least 2 episodes; the clip range is that of a mean over tokens, hence 3e-4 and 4e-4 instead of 0.2",
    reduces_to="episodes of one token: GRPO",
    tested_by="tests/algorithms/test_losses.py, tests/algorithms/test_methods.py",
    switch="rl.algorithm: gspo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "gspo",
        "loss.clip_low": 0.0003,
        "loss.clip_high": 0.0004,
        "loss.aggregation": "seq_mean_token_mean",
    },
)
