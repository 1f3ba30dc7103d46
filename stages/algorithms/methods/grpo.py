"""GRPO: group-relative policy optimisation."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="grpo",
    title="GRPO",
    paper="Shao et al., DeepSeekMath, arXiv 2402.03300",
    equation="A_i = (R_i - group mean) / (group std with n-1, + 1e-6); PPO's clipped ratio; mean over each episode's tokens, "
    "then over episodes; the paper's KL term is loss.kl_coef: 0.04 with kl_estimator: k3",
    assumptions="groups of at least 2 episodes from one prompt; groups of equal returns have no gradient (see dead_groups)",
    reduces_to="advantage.std none, loss.aggregation constant: Dr. GRPO; advantage.std batch, aggregation token_mean: Lite PPO",
    tested_by="tests/algorithms/test_advantage.py, tests/algorithms/test_losses.py, tests/algorithms/test_resolve.py",
    switch="rl.algorithm: grpo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "seq_mean_token_mean",
    },
)
