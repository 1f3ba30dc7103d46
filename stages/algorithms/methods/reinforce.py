"""REINFORCE with a batch-mean baseline."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="reinforce",
    title="REINFORCE, batch-mean baseline",
    paper="Williams, Machine Learning 8, 1992",
    equation="A = R - mean of all returns in the batch; loss = -A log pi(y_t), averaged over all policy tokens of the batch",
    assumptions="on-policy data (one epoch, one minibatch); tasks of similar difficulty, as the baseline ignores the task",
    reduces_to="advantage.mean group: RLOO up to the factor (G-1)/G",
    tested_by="tests/algorithms/test_advantage.py, tests/algorithms/test_losses.py",
    switch="rl.algorithm: reinforce",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "batch",
        "loss.kind": "policy_gradient",
    },
)
