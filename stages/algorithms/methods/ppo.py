"""PPO with generalised advantage estimation and a learned critic.

The critic is a copy of the start policy's backbone with a scalar head (`rl.critic.head`) and its own optimiser: value errors
never move the policy's weights, and `critic.warmup_steps` leaves the policy exactly where it was. Its targets are A + V,
its loss the head's own, without PPO's optional value clipping (it has no meaning for categorical heads).
"""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="ppo",
    title="PPO",
    paper="Schulman et al., arXiv 1707.06347; GAE arXiv 1506.02438",
    equation="d_t = r_t + gamma V(t+1) - V(t), A_t = d_t + gamma lam A(t+1) over an episode's policy tokens (advantage.level: "
    "turn: over its turns), whitened over the batch; loss = -min(rho A, clip(rho) A); critic fitted to A + V",
    assumptions="a turn's reward falls on its last policy token; the turn limit is part of the task (V after it is 0)",
    reduces_to="lam 1 and a constant critic: REINFORCE with that constant as baseline; at rho = 1 the gradient of REINFORCE",
    tested_by="tests/algorithms/test_gae.py, tests/algorithms/test_losses.py",
    switch="rl.algorithm: ppo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.estimator": "gae",
        "advantage.gamma": 1.0,
        "advantage.lam": 1.0,
        "advantage.whiten": True,
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
    },
)
