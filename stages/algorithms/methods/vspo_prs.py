"""VSPO on progressively shaped rewards."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="vspo_prs",
    title="VSPO with progressive reward shaping",
    paper="Su et al., Progressive Reward Shaping and Value-based Sampling, arXiv 2512.07478",
    equation="VSPO on R = sum_k w_k s_k prod over j<k of 1[s_j >= tau_j]: format, then tool call, then outcome (reward.prs; "
    "also for grpo and others, with reward.kind: prs)",
    assumptions="as VSPO; the stages' order is the paper's, the algebra ours; a stage's score is the environment's term of "
    "that name",
    reduces_to="one stage of weight 1 that scores the outcome: VSPO",
    tested_by="tests/algorithms/test_vspo_prs.py",
    switch="rl.algorithm: vspo_prs",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kind": "prs",
        "group_resampling.kind": "value",
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.kl_coef": 0.001,
        "loss.kl_estimator": "k3",
        "loss.aggregation": "seq_mean_token_mean",
    },
)
