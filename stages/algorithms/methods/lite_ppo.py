"""Lite PPO: group mean, batch standard deviation, token-level loss."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="lite_ppo",
    title="Lite PPO",
    paper="Liu et al., Tricks or Traps?, arXiv 2508.08221",
    equation="A_i = (R_i - group mean) / (std of all the batch's returns with n-1, + 1e-6); PPO's clip 0.2; mean over all "
    "policy tokens; no KL, no entropy bonus",
    assumptions="groups of at least 2 episodes; rewards of one scale, since the task with the widest spread dominates the std; "
    "with nearly constant rewards, disable it (advantage.std: none). Other factors of its study: advantage.mean, advantage.std, "
    "loss.clip_high, loss.aggregation, group_resampling.overlong",
    reduces_to="one group: GRPO with token mean; advantage.std none and aggregation constant: Dr. GRPO",
    tested_by="tests/algorithms/test_lite_ppo.py, tests/algorithms/test_advantage.py",
    switch="rl.algorithm: lite_ppo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "group",
        "advantage.std": "batch",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
    },
)
