"""ARPO: rollouts that branch where entropy rises after a tool's answer.

A branch inherits the turns before it, including tokens, key/value cache and the environment's state, so that they are played
once; in training, their tokens are processed once for all branches (rl.share_prefixes) but enter the loss once per branch. The
update is GRPO's: `credit.kind: outcome` is the soft attribution of the published results, `branches` the hard one of the paper's
text. The limit on tool calls is the environment's own (per_domain.<name>.environment.max_turns). Invalid format means any action
that the environment rejects, which in some worlds includes moves that are merely impossible.
"""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="arpo",
    title="ARPO",
    paper="Dong et al., ARPO, arXiv 2507.19849",
    equation="P(branch) = clip(base + w (H_t - H_0), 0, 1) after each answer, until the group is full; reward -1 for invalid "
    "format, else F1, + 0.1 with two tools; GRPO's A_i on all of a branch's tokens (soft), or its mean over the episodes that "
    "share them (hard)",
    assumptions="entropy over the 10 most likely tokens, summed over a turn's first 20 and divided by ln of the vocabulary size; "
    "branching.probe answer uses the turn after the answer as in the paper, call the turn before it as in the authors' code; "
    "branching.inherit true (a branch's rise is measured from its parent's first turn) and aggregate mean are ours",
    reduces_to="branching.beam 1 with initial = group_size: GRPO; entropy_weight 0: branching.kind random; as long as no ratio "
    "is clipped, hard = soft with loss.aggregation token_mean, whatever the advantages",
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
