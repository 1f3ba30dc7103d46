"""ArCHer: a critic of whole utterances learns off-policy from replayed episodes, a policy of tokens from its advantages.

Each step plays episodes and keeps them; then the critic makes `replay.critic_updates` optimiser steps on draws of all that is
kept, and the policy learns from actions that it draws anew after histories of drawn episodes. The critic reads a whole history
with the action in one causal pass (Q at the action's last token, V at the last one before it), where the paper's encoder reads
the two apart, cut to 512 tokens.
"""

from stages.algorithms.card import Card, Composition
from stages.values.settings import HeadParams

CARD = Card(
    slug="archer",
    title="ArCHer",
    paper="Zhou et al., arXiv 2402.19446",
    equation="Q_i(s,a) to r + gamma (1-d) V'_i(s'), V_i(s) to Q'_i(s, a_pi), i = 1, 2, primes the target network "
    "(replay.tau); loss = -A sum_j log pi(a_j), A = min Q - min V, on actions drawn anew",
    assumptions="a turn is one action, its end token included; the turn limit is an end (replay.bootstrap_truncated). Gradients "
    "are averaged over a batch and clipped per network, where the authors' code sums them and clips both networks' at once. The "
    "loss is a mean over turns under actions: fresh; under played and recorded over episodes, each the sum of its turns",
    reduces_to="every turn terminal: a contextual bandit's REINFORCE with a learnt baseline; one token per turn: an "
    "actor-critic of tokens; critic_updates alone (critic.warmup_steps): the policy stays as it is",
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
