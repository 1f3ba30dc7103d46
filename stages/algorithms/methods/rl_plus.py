"""RL-PLUS: demonstrations in the policy's groups, with multiple importance sampling and a higher weight for unlikely tokens."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="rl_plus",
    title="RL-PLUS",
    paper="Dong et al., arXiv 2508.00222",
    equation="A_i = R_i - group mean; the policy's tokens -A p/p_old, unclipped; tokens of the demonstration -A sg[(1-p)^0.5] "
    "2p / (1.5 p_old + 0.5 U); sum over tokens / (episodes * a constant length); entropy bonus 0.001 times its mean over tokens",
    assumptions="groups of at least 2 episodes, of which external.per_group are demonstrations with the environment's own "
    "reward; U = 1 as in the paper's code, external.u vocabulary as in its text; the code divides only by the length, a factor "
    "to which Adam is invariant; few updates per step, as nothing is clipped",
    reduces_to="external.per_group 0, loss.entropy_coef 0: Dr. GRPO with loss.kind importance; external.gamma 0: no exploration "
    "weight; external.loss pi, old, sft: the paper's other estimates, and GRPO with an SFT loss",
    tested_by="tests/algorithms/test_rl_plus.py, tests/training/test_external.py",
    switch="rl.algorithm: rl_plus",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "external.per_group": 1,
        "external.loss": "mis",
        "external.gamma": 0.5,
        "advantage.mean": "group",
        "loss.kind": "importance",
        "loss.aggregation": "constant",
        "loss.entropy_coef": 0.001,
        "loss.entropy_aggregation": "token_mean",
    },
)
