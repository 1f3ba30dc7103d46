"""ReMax: REINFORCE with the greedy policy's return as baseline."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="remax",
    title="ReMax",
    paper="Li et al., arXiv 2310.10505",
    equation="A = R - R of the task's greedy episode; loss = -A log pi(y_t)",
    assumptions="one additional greedy episode per task and step, which is not trained on; group_size may be 1; on-policy data; "
    "token mean instead of the paper's sum over tokens (seq_mean_token_sum)",
    reduces_to="a greedy episode that always fails (R 0): REINFORCE without baseline",
    tested_by="tests/algorithms/test_advantage.py, tests/algorithms/test_methods.py, tests/training/test_rl_methods.py",
    switch="rl.algorithm: remax",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "greedy",
        "loss.kind": "policy_gradient",
    },
)
