"""CISPO: clips importance weights instead of gradients."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="cispo",
    title="CISPO",
    paper="MiniMax-M1, arXiv 2506.13585",
    equation="loss = -sg[clip(rho, 0, 1 + clip_high)] A log pi(y_t), token mean; A as in GRPO",
    assumptions="groups of at least 2 episodes; the paper tunes clip_high without giving it; 4 here, so that weights are "
    "clipped at 5",
    reduces_to="rho within the range: REINFORCE with importance weights; on-policy: the gradient of GRPO with token mean",
    tested_by="tests/algorithms/test_losses.py, tests/algorithms/test_methods.py",
    switch="rl.algorithm: cispo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "cispo",
        "loss.clip_low": 1.0,
        "loss.clip_high": 4.0,
        "loss.aggregation": "token_mean",
    },
)
