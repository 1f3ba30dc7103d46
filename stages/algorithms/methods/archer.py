"""ArCHer: a turn-level critic learns off-policy from replayed episodes, a token-level policy from its advantages.

Each step plays and stores episodes; then the critic makes `replay.critic_updates` optimiser steps on samples of all stored
episodes, and the policy is trained on actions that it samples anew after histories of sampled episodes. The critic reads a full
history with the action in one causal pass (Q at the action's last token, V at the last one before it); the paper's encoder reads
the two separately, truncated to 512 tokens.
"""

from stages.algorithms.card import Card, Composition
from stages.values.settings import HeadParams

CARD = Card(
    slug="archer",
    title="ArCHer",
    paper="Zhou et al., arXiv 2402.19446",
    equation="Q_i(s,a) to r + gamma (1-d) V'_i(s'), V_i(s) to Q'_i(s, a_pi), i = 1, 2, primes the target network "
    "(replay.tau); loss = -A sum_j log pi(a_j), A = min Q - min V, on newly sampled actions",
    assumptions="a turn is one action, its end token included; the turn limit is an end (replay.bootstrap_truncated). Gradients "
    "are averaged over a batch and clipped per network; the authors' code sums them and clips both networks' together. The loss "
    "is a mean over turns with actions: fresh, and with played and recorded over episodes, each the sum of its turns",
    reduces_to="every turn terminal: REINFORCE for a contextual bandit with a learned baseline; one token per turn: a "
    "token-level actor-critic; during critic.warmup_steps: the policy is unchanged",
    tested_by="tests/algorithms/test_archer.py, tests/values/test_turn_critic.py, tests/training/test_archer.py",
    switch="rl.algorithm: archer",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "advantage.estimator": "utterance",
        "advantage.gamma": 0.95,
        "loss.kind": "policy_gradient",
        "loss.aggregation": "seq_mean_token_sum",
        "critic.head": HeadParams(loss="mse"),
        "critic.learning_rate": 3e-4,
    },
)
