"""ARPO: rollouts that branch where entropy rises behind a tool's answer.

A branch takes over the turns before it, tokens, key/value cache and the environment's state alike, so they are played and paid
for once; in training their tokens are read once for all branches (rl.share_prefixes) and count in the loss once per branch. The
update is GRPO's: `credit.kind: outcome` is the soft attribution of the published results, `branches` the hard one of the paper's
text. The limit on tool calls is the environment's own (per_domain.<name>.environment.max_turns). Bad format is any action that
the environment did not accept, which in some worlds includes moves that are merely impossible.
"""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="arpo",
    title="ARPO",
    paper="Dong et al., ARPO, arXiv 2507.19849",
    equation="P(branch) = clip(base + w (H_t - H_0), 0, 1) behind each answer, until the group is full; reward -1 for bad "
    "format, else F1, + 0.1 with two tools; GRPO's A_i on all of a branch's tokens (soft), or its mean over those who share them "
    "(hard)",
    assumptions="entropy over the 10 likeliest tokens, summed over a turn's first 20, over ln of the vocabulary size; "
    "branching.probe answer looks behind the answer as the paper does, call at the turn before as the authors' code does; "
    "branching.inherit true (a branch's rise counts from its parent's first turn) and aggregate mean are ours",
    reduces_to="branching.beam 1 with initial = group_size: GRPO; entropy_weight 0: branching.kind random; while no ratio is "
    "clipped, hard = soft under loss.aggregation token_mean, whatever the advantages",
    tested_by="tests/algorithms/test_arpo.py, tests/agent/test_branching.py",
    switch="rl.algorithm: arpo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.kind": "hierarchical",
        "branching.kind": "entropy",
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.dual_clip": 3.0,
        "loss.aggregation": "token_mean",
    },
)
