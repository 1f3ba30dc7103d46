"""SALT: step advantages from the graph of a group's episodes, on top of a group method.

`advantage.mean: leave_one_out` with `std: none` makes it SALT on RLOO. Where hardly any steps merge (history column
`merged_steps`, below 0.05 or so) it is the method underneath: keys must come from the environment, and `credit.match: cosine`
merges states in free text that differ in a few words.
"""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="salt",
    title="SALT",
    paper="Li et al., SALT, arXiv 2510.20022",
    equation="GRPO's A_i; a step (s, a, s') that several episodes of a group took gets the mean of their A_i, any other keeps "
    "its own; then GRPO's loss",
    assumptions="state keys of the environment tell equal states apart from others, and not the outcome; the history that must "
    "be equal too (credit.history), one vote per episode (credit.repeats), the key's form (credit.key), likeness of states by "
    "their words (credit.match cosine, threshold) and credit.renormalise are ours; the mean over episodes of token means is "
    "GRPO's, where the paper takes the mean over tokens (loss.aggregation token_mean)",
    reduces_to="no step in common, or credit.match scrambled: GRPO, bit for bit",
    tested_by="tests/algorithms/test_salt.py",
    switch="rl.algorithm: salt",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "group",
        "advantage.std": "group",
        "credit.kind": "graph",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "seq_mean_token_mean",
    },
)
