"""ScalingInter-RL: a turn limit that increases from stage to stage."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="scaling_inter",
    title="ScalingInter-RL",
    paper="Xi et al., AgentGym-RL, arXiv 2509.08755",
    equation="at step g (from 1) episodes end after rounds[min(floor((g-1) / steps_per_stage), n-1)] turns; GRPO, mean over "
    "tokens, k3 KL 0.001 (not clamped), entropy bonus 0.001",
    assumptions="the first limit must allow the shortest solutions, otherwise all groups of the first stage are dead; truncated "
    "episodes keep their reward so far; evaluation uses the environment's own limit; the default rounds (thirds of the "
    "environment's limit) are ours; horizon.kind works with any algorithm",
    reduces_to="one round, or steps_per_stage >= steps: horizon.kind fixed; a round at the environment's limit: GRPO with "
    "loss.aggregation token_mean, loss.kl_coef and entropy_coef 0.001",
    tested_by="tests/algorithms/test_scaling_inter.py, tests/training/test_horizon.py",
    switch="rl.algorithm: scaling_inter",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "horizon.kind": "scaling_inter",
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
        "loss.kl_coef": 0.001,
        "loss.kl_estimator": "k3",
        "loss.entropy_coef": 0.001,
    },
)
