"""RLVRR: rewards from references that a program verifies: key words in order, and predicates of style."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="rlvrr",
    title="RLVRR",
    paper="Jiang et al., arXiv 2601.18533",
    equation="r = r_c / 2 + r_s / 2; r_c = mean over key points of max_i LCS(occ(K_i, z_i), occ(K_i, y)) / max of their "
    "lengths, occ(K, t) the occurrences of key words K in t in order, z_i references, y the answer; r_s = sum of the weights of "
    "the style predicates that y passes; A = (r - mean) / (std with n-1, + 1e-6) in groups; PPO's clip 0.2, token mean, KL "
    "coefficient 0.01 (k3)",
    assumptions="references are good, and agreement in words means agreement in content: synonyms score 0, and a bare list of "
    "key words in order scores r_c = 1 (references_keyword_share in the history; references.max_keyword_share bounds it). The "
    "paper has a language model choose key words and write predicates; here a domain's program does, or rules of ours. Tasks "
    "whose own references earn less than references.least_own_reward are left out, on the scale of the mean (the paper does not "
    "say on which); without style predicates the content has their weight. The "
    "reference code adds both parts (references.content_weight and style_weight 1), counts occurrences in the first reference "
    "only (references.matching reference) and uses the k1 estimator, whose gradient is 0 on average",
    reduces_to="one key point with the exact answer as key word and style_weight 0: the verifiable 0 or 1; references.content "
    "recall: keyword coverage; content_weight 0: a pure format reward",
    tested_by="tests/judging/test_references.py, tests/training/test_reference_rewards.py",
    switch="rl.algorithm: rlvrr",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kind": "references",
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
        "loss.kl_coef": 0.01,
        "loss.kl_estimator": "k3",
    },
)
