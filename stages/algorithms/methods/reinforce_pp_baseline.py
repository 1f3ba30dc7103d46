"""REINFORCE++ with the group mean as baseline."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="reinforce_pp_baseline",
    title="REINFORCE++ with baseline",
    paper="Hu et al., arXiv 2501.03262",
    equation="as REINFORCE++, with the group mean subtracted from R first",
    assumptions="groups of at least 2 episodes from one prompt; beta = reward.kl_coef (0.01 as in OpenRLHF)",
    reduces_to="beta 0, groups as large as the batch: REINFORCE++",
    tested_by="tests/algorithms/test_methods.py, tests/algorithms/test_advantage.py",
    switch="rl.algorithm: reinforce_pp_baseline",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kl_coef": 0.01,
        "reward.kl_estimator": "k1",
        "advantage.level": "token",
        "advantage.mean": "group",
        "advantage.whiten": True,
        "loss.kind": "ppo_clip",
    },
)
