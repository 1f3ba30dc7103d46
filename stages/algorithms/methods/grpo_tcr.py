"""GRPO-TCR: token-level loss, clip-higher, overlong reward shaping."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="grpo_tcr",
    title="GRPO-TCR",
    paper="Yu et al., Demystifying RL in Agentic Reasoning, arXiv 2510.11701",
    equation="GRPO with Token mean, Clip 1 - 0.2 .. 1 + 0.28 (dual clip 10) and length term in the Reward; no KL; success 1, "
    "failure min(-0.6, -1 + 0.1 calls)",
    assumptions="groups of at least 2 episodes; the environment's cost counts tool calls. reward.tool_bonus_on: both with "
    "a tool_bonus_cap that no failure reaches (0.9) is the paper's equation, the default its code",
    reduces_to="clip_high 0.2, tool_bonus 0, overlong_penalty 0: GRPO with token mean",
    tested_by="tests/algorithms/test_open_agentrl.py",
    switch="rl.algorithm: grpo_tcr",
)

COMPOSITION = Composition(
    card=CARD,
    parts={
        "reward.correct": 1.0,
        "reward.wrong": -1.0,
        "reward.tool_bonus": 0.1,
        "reward.tool_bonus_on": "wrong",
        "reward.tool_bonus_cap": -0.6,
        "reward.overlong_penalty": 1.0,
        "advantage.mean": "group",
        "advantage.std": "group",
        "loss.kind": "ppo_clip",
        "loss.clip_high": 0.28,
        "loss.dual_clip": 10.0,
        "loss.aggregation": "token_mean",
    },
)
