"""DAPO: GRPO with clip-higher, dynamic sampling, token-level loss and overlong shaping."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="dapo",
    title="DAPO",
    paper="Yu et al., arXiv 2503.14476",
    equation="GRPO with clip 1 - 0.2 .. 1 + 0.28, token mean over the batch, no KL; groups of equal returns are replaced by "
    "playing further tasks; a length penalty over the last fifth of the context",
    assumptions="groups of at least 2 episodes; group_resampling.rounds limits the further tasks, so that a batch may remain "
    "incomplete; clip_high 0.2, group_resampling.kind none and overlong_penalty 0 disable its parts",
    reduces_to="those three parts disabled: GRPO with token mean",
    tested_by="tests/algorithms/test_methods.py, tests/algorithms/test_group_resampling.py, tests/algorithms/test_shaping.py",
    switch="rl.algorithm: dapo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.overlong_penalty": 1.0,
        "group_resampling.kind": "resample",
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.clip_high": 0.28,
        "loss.aggregation": "token_mean",
    },
)
