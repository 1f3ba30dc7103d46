"""RLOO: REINFORCE with a leave-one-out baseline."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="rloo",
    title="RLOO",
    paper="Ahmadian et al., Back to Basics, arXiv 2402.14740",
    equation="A_i = R_i - mean of the other returns of its group = G/(G-1) (R_i - group mean); loss = -A log pi(y_t)",
    assumptions="groups of at least 2 episodes from one prompt; on-policy data. The paper sums over an episode's tokens; the "
    "batch-wide token mean here differs by one factor per batch (loss.aggregation: seq_mean_token_sum gives the sum)",
    reduces_to="G/(G-1) times Dr. GRPO's advantage",
    tested_by="tests/algorithms/test_advantage.py",
    switch="rl.algorithm: rloo",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.mean": "leave_one_out",
        "loss.kind": "policy_gradient",
    },
)
