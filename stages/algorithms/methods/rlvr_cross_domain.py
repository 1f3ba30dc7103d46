"""RL with a generative verifier's soft scores for free-form answers, normalised over the batch."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="rlvr_cross_domain",
    title="RLVR across domains",
    paper="Su et al., Crossing the Reward Bridge, arXiv 2503.23829",
    equation="c: the label that a verifier draws for (question, reference, last line of the answer), p1 and p0 the "
    "probabilities of right and wrong; r = p1 if c is right, 1 - p0 if it is wrong, 0 if it is neither (verifier.score binary: "
    "1, 0, 0); z = (r - mean) / std over the batch, 0 where all are equal; A = z - beta sum_t (log pi_old - log pi_ref), beta "
    "0.01; loss = -A log pi(y_t), the whole answer one action",
    assumptions="the verifier never sees what the environment returned. The paper distils it from a model of 72 B; here it is "
    "the model in verifier.path, or without one a copy of the SFT policy, fitted when rl starts on references, mistakes in their "
    "wording and text without content, or with verifier.fit_on rollouts on what the SFT policy answered, of tasks that rl does "
    "not train on (verifier.fit_share). Switches of ours: the "
    "std has divisor n (the paper does not say), verifier.read answer "
    "reads more than the last line, verifier.renormalise; the paper's rule baselines are verifier.kind contains and jaccard. The "
    "history has the verifier's false-positive rate, since a policy may learn what the verifier takes for right",
    reduces_to="verifier.kind contains with exact answers: REINFORCE with standardised outcomes; advantage.mean leave_one_out "
    "with verifier.normalise none: RLOO on verified rewards",
    tested_by="tests/judging/test_verification.py, tests/training/test_verified_rewards.py",
    switch="rl.algorithm: rlvr_cross_domain",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kind": "verifier",
        "reward.kl_coef": 0.01,
        "reward.kl_estimator": "k1",
        "advantage.mean": "none",
        "advantage.std": "none",
        "loss.kind": "policy_gradient",
        "loss.aggregation": "seq_mean_token_sum",
    },
)
