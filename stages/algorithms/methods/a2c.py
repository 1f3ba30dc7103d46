"""A2C: advantage actor-critic, without clipping."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="a2c",
    title="A2C",
    paper="Mnih et al., Asynchronous Methods for Deep Reinforcement Learning, arXiv 1602.01783",
    equation="A_t = G_t - V_t over an episode's policy tokens (GAE with lam 1); loss = -A_t log pi(y_t) - 0.01 entropy; critic "
    "fitted to G with weight 0.5",
    assumptions="on-policy data (one epoch, one minibatch); a separate critic, as in PPO; critic.head {loss: mse} gives the "
    "paper's squared error",
    reduces_to="entropy_coef 0 and a constant critic: REINFORCE with that constant as baseline",
    tested_by="tests/algorithms/test_survey.py",
    switch="rl.algorithm: a2c",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.estimator": "gae",
        "advantage.lam": 1.0,
        "loss.kind": "policy_gradient",
        "loss.entropy_coef": 0.01,
        "critic.coef": 0.5,
    },
)
