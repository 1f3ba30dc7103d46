"""Multi-turn PPO with dense rewards, and the factors of its study of estimators."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="meow_tea_taro",
    title="Meow-Tea-Taro's multi-turn PPO",
    paper="Wang and Ammanabrolu, A Practitioner's Guide to Multi-turn Agentic RL, arXiv 2510.01132",
    equation="PPO with GAE over policy tokens; reward: the environment's increments over one divisor, on each turn's last token, "
    "minus 0.01 k1 per token",
    assumptions="the study compares advantage.level token, turn or trajectory; advantage.estimator gae (biased) or group with "
    "mean group, std group (GRPO, biased) or mean leave_one_out (RLOO, unbiased); reward.density single or dense",
    reduces_to="reward.density environment, kl_coef 0: PPO; gamma and lam 1, V 0: the reward-to-go, token and turn level alike",
    tested_by="tests/algorithms/test_meow_tea_taro.py",
    switch="rl.algorithm: meow_tea_taro",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.density": "dense",
        "reward.kl_coef": 0.01,
        "reward.kl_estimator": "k1",
        "advantage.estimator": "gae",
        "advantage.level": "token",
        "advantage.whiten": True,
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
    },
)
