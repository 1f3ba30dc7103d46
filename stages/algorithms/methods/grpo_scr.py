"""GRPO-SCR: sequence-level ratio, clip-higher, overlong reward shaping."""

from stages.algorithms.card import Card, Composition

CARD = Card(
    slug="grpo_scr",
    title="GRPO-SCR",
    paper="Yu et al., Demystifying RL in Agentic Reasoning, arXiv 2510.11701",
    equation="as GRPO-TCR with one ratio per episode (GSPO's), clip 1 - 0.0003 .. 1 + 0.0004, mean over episodes",
    assumptions="as GRPO-TCR",
    reduces_to="rewards of the environment: GSPO",
    tested_by="tests/algorithms/test_open_agentrl.py",
    switch="rl.algorithm: grpo_scr",
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
        "loss.kind": "gspo",
        "loss.clip_low": 0.0003,
        "loss.clip_high": 0.0004,
        "loss.aggregation": "seq_mean_token_mean",
    },
)
