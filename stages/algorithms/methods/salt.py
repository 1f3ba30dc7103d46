"""SALT: step advantages from the graph of a group's episodes, on top of a group method.

`advantage.mean: leave_one_out` with `std: none` makes it SALT on RLOO. If hardly any steps merge (history column `merged_steps`
below 0.05 or so) it equals the underlying method: it needs state keys from the environment, or `credit.match: cosine`, which
merges textual states that differ in a few words.
"""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="salt",
    title="SALT",
    paper="Li et al., SALT, arXiv 2510.20022",
    equation="GRPO's A_i; a step (s, a, s') that several episodes of a group took has the mean of their A_i, any other its own "
    "A_i; then GRPO's loss",
    assumptions="the environment's state keys identify states and do not reveal the outcome; the history that must be equal, too "
    "(credit.history), one vote per episode (credit.repeats), the form of the key (credit.key), similarity of states by words "
    "(credit.match cosine, threshold) and credit.renormalise are ours; the mean over episodes of token means is GRPO's, the "
    "paper uses the mean over tokens (loss.aggregation token_mean)",
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
