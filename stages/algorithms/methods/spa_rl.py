"""SPA-RL: PPO on step rewards from a progress estimator and the acceptance of actions.

The annotate stage fits the estimator (`annotate.progress.kind: spa`) to the rollouts of the SFT policy, without copies of
environments. The paper trains on those rollouts once; here the policy plays, and credit is assigned to each step's own episodes.
The authors' published code uses `credit.step_reward: rloo_broadcast` and `step_weight: steps_to_go` instead.
"""

from stages.algorithms.card import Card, Composition
from stages.values.settings import HeadParams

CARD = Card(
    slug="spa_rl",
    title="SPA-RL",
    paper="Wang et al., SPA-RL, arXiv 2505.20732",
    equation="sum_i c_i, with c_i predicted at the end of turn i, is fitted to R; r_i = weight c_i - grounding_coef (1 - g_i), "
    "g_i = 1 if the action was accepted; PPO with GAE over turns",
    assumptions="returns of the SFT policy's rollouts reveal which turns earn them; grounding as a penalty, so that longer "
    "episodes earn nothing extra (credit.grounding bonus is the published form), is ours; so are, for lack of published values, "
    "weight 1 of contributions, learning rates and epochs of estimator and policy, and training without a KL term",
    reduces_to="grounding_coef 0, residual last_step and c = 0: PPO on the return at the end; one turn: an outcome reward model",
    tested_by="tests/algorithms/test_spa_rl.py, tests/values/test_progress.py",
    switch="rl.algorithm: spa_rl",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.estimator": "gae",
        "advantage.level": "turn",
        "advantage.gamma": 1.0,
        "advantage.lam": 0.95,
        "advantage.whiten": True,
        "credit.kind": "progress",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
        # Sums of contributions and penalties have no bounds that a support could cover.
        "critic.head": HeadParams(loss="mse"),
    },
)
