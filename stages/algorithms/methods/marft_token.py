"""MARFT with one decision per token."""

from __future__ import annotations

from stages.algorithms.card import Card, Composition
from stages.algorithms.methods.marft import PARTS

CARD = Card(
    slug="marft_token",
    title="MARFT, token level",
    paper="MARFT: Multi-Agent Reinforcement Fine-Tuning, arXiv 2504.16129",
    equation="marft with V, A and rho of each token: along the tokens of a play d = r + gamma V' - V, a text's reward on its "
    "last token, V' after it being that of the next text's first token; mean over tokens; no optimiser step with KL above 1.7e-6",
    assumptions="as marft. team.token_gamma is 1 (the authors discount within texts as between them, which leaves 0.076 of a "
    "reward after 256 tokens of 0.99)",
    reduces_to="one agent and gamma 1: PPO with these parts, bit for bit",
    tested_by="tests/algorithms/test_marft.py, tests/training/test_team.py",
    switch="rl.algorithm: marft_token",
)

OF_TURNS = ("loss.ratio_norm",)
"""Choices of marft that have no meaning for tokens."""

COMPOSITION = Composition(
    card=CARD,
    parts={
        **{key: value for key, value in PARTS.items() if key not in OF_TURNS},
        "advantage.level": "token",
        "loss.kind": "ppo_clip",
        "loss.aggregation": "token_mean",
        "loss.kl_stop": 1.7e-6,
    },
)
