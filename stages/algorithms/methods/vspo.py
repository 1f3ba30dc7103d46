"""VSPO: value-based sampling of the groups of a batch, with smoothing."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="vspo",
    title="VSPO",
    paper="Su et al., Progressive Reward Shaping and Value-based Sampling, arXiv 2512.07478",
    equation="GRPO (clip 0.2, KL 0.001); groups of equal returns are replaced by others, drawn by V = (R_max - mean) std; a "
    "group with weight c has A min(1, c_max / c)",
    assumptions="groups of at least 2 episodes; group_resampling.r_max is the largest attainable reward. Name and purpose of the "
    "smoothing are the paper's; its formula and the sampling are ours (group_resampling.smooth, group_resampling.temperature)",
    reduces_to="no group of equal returns: GRPO, bit for bit; group_resampling.temperature to infinity: kind random",
    tested_by="tests/algorithms/test_vspo_prs.py",
    switch="rl.algorithm: vspo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "group_resampling.kind": "value",
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.kl_coef": 0.001,
        "loss.kl_estimator": "k3",
        "loss.aggregation": "seq_mean_token_mean",
    },
)
