"""REINFORCE++: PPO's clip and a KL penalty in the reward, no critic, advantages whitened over the batch."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="reinforce_pp",
    title="REINFORCE++",
    paper="Hu et al., arXiv 2501.03262",
    equation="r_t = R at the last token - beta k1_t; A_t = reward-to-go from token t on, whitened over the batch; loss = "
    "-min(rho A, clip(rho) A)",
    assumptions="works without groups (group_size 1); beta = reward.kl_coef, by default 0.01 as in OpenRLHF, not as in the paper",
    reduces_to="beta 0, no clipping and no whitening: REINFORCE without baseline",
    tested_by="tests/algorithms/test_methods.py, tests/algorithms/test_advantage.py",
    switch="rl.algorithm: reinforce_pp",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kl_coef": 0.01,
        "reward.kl_estimator": "k1",
        "advantage.level": "token",
        "advantage.mean": "none",
        "advantage.whiten": True,
        "loss.kind": "ppo_clip",
    },
)
