"""SALMON: PPO on a reward model that reads principles; other principles steer the policy without another reward model."""

from stages.algorithms.card import Card, Composition
from stages.judging.settings import LengthBonus, SampledPrinciples
from stages.values.settings import HeadParams

CARD = Card(
    slug="salmon",
    title="SALMON",
    paper="Sun et al., arXiv 2310.05910",
    equation="preferences: s_12 and s_21 are a judge's margins for answer 1 over 2 by principle d in both orders, g_d = (s_12 + "
    "s_21) / 2 / var_d where they agree in sign, else 0; some principles are shown, each negated with probability 1/2 (g -> -g), "
    "and the largest |g| decides. Reward model: -log sigmoid(r_w - r_l), r read after principles and answer. RL: principles are "
    "drawn per task by weight; R = 10 (r + 5 min(0.8, m length / longest) - 6 [did not stop] - 0.01 sum_t max(0, log pi_old - "
    "log pi_ref)), the last term token by token; PPO with GAE, gamma and lambda 1, whitened advantages",
    assumptions="annotate.judge_model is a reward model fitted with principles, on the domain; r is the log-odds of two tokens, "
    "which is linear in the last hidden state as the paper's head is. m is judge.length_bonus.rate (the paper: 1, and -0.4 for "
    "reasoning). The critic starts from the reward model, with its scalar as the first value, and its loss is clipped at 0.2. "
    "The variance is the reference code's divisor, which counts principles of large variance down twice (principles.normaliser "
    "std). The rule on languages is a switch (principles.languages). Principles of rl may differ from those that the model was "
    "fitted with, if it is large enough to read others, and may begin later (from_step). The paper makes two passes over a "
    "batch, in two minibatches (epochs and minibatches 2); with one update per batch neither clip acts",
    reduces_to="one principle, never negated, without noise: a reward model of AI feedback; judge_model.principles null: a "
    "Bradley-Terry model; its reward with another algorithm: judge.kind local under that algorithm",
    tested_by="tests/judging/test_principles.py, tests/judging/test_judge_model.py, tests/training/test_salmon.py",
    switch="rl.algorithm: salmon",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kind": "judge",
        "reward.kl_coef": 0.1,  # 10 * 0.01: judge.scale multiplies the judge's reward alone
        "reward.kl_estimator": "k1_positive",
        "judge.kind": "local",
        "judge.scheme": "pointwise",
        "judge.raw": True,
        "judge.principles": SampledPrinciples(),
        "judge.length_bonus": LengthBonus(),
        "judge.unfinished_penalty": 6.0,
        "judge.scale": 10.0,
        "advantage.estimator": "gae",
        "advantage.gamma": 1.0,
        "advantage.lam": 1.0,
        "advantage.whiten": True,
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
        "critic.head": HeadParams(loss="mse"),
        "critic.coef": 0.1,
        "critic.init": "judge_model",
        "critic.value_clip": 0.2,
    },
)
