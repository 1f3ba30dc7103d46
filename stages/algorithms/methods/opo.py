"""OPO: the length-weighted mean of the group as baseline."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="opo",
    title="OPO",
    paper="Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585",
    equation="A_i = R_i - sum_j T_j R_j / sum_j T_j over its group, T policy tokens; loss = -A log pi(y_t)",
    assumptions="groups of at least 2 episodes; on-policy data",
    reduces_to="episodes of equal length: the group mean as baseline",
    tested_by="tests/algorithms/test_advantage.py, tests/algorithms/test_methods.py",
    switch="rl.algorithm: opo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "length_weighted",
        "loss.kind": "policy_gradient",
    },
)
