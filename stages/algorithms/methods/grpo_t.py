"""GRPO-T: the baseline of Open-AgentRL."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="grpo_t",
    title="GRPO-T",
    paper="Yu et al., Demystifying RL in Agentic Reasoning, arXiv 2510.11701",
    equation="GRPO with token mean, clip 0.2 and a KL term; rewards: success 1, failure -1",
    assumptions="groups of at least 2 episodes; the paper does not give the KL coefficient, 0.01 is ours",
    reduces_to="loss.kl_coef 0, rewards of the environment: GRPO with token mean",
    tested_by="tests/algorithms/test_open_agentrl.py",
    switch="rl.algorithm: grpo_t",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.correct": 1.0,
        "reward.wrong": -1.0,
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.kl_coef": 0.01,
        "loss.aggregation": "token_mean",
    },
)
