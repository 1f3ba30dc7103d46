"""MARFT with one decision per text: PPO over a team of agents, planner and solver, who speak in turn."""

from __future__ import annotations

from stages.agent.team import Member
from stages.algorithms.card import Card, Composition
from stages.values.settings import HeadParams

CARD = Card(
    slug="marft",
    title="MARFT, action level",
    paper="MARFT: Multi-Agent Reinforcement Fine-Tuning, arXiv 2504.16129",
    equation="in each round the planner writes a plan and the solver, who reads it, acts; a critic V reads each agent's own "
    "prompt; along the texts of a play d = r + gamma V' - V, A = d + gamma lam A', V' being of whoever speaks next; A normalised "
    "over the texts; loss = mean over texts of -min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A) - 0.01 entropy, rho = the product of a "
    "text's token ratios; clipped Huber loss of V; no optimiser step on a minibatch with KL above 1e-3",
    assumptions="the reward is the acting agent's, who speaks last. Each play is a sequence of its own, so that credit never "
    "depends on what was played before (in the authors' code the link between the agents of a round is masked by the end of the "
    "previous round). Verdicts of the environment end a play and are never read. Each agent's loss is the mean over its texts",
    reduces_to="one agent: PPO with advantage.level: turn and these parts; gamma and lam 1 and V 0: every agent's A is the "
    "team's return",
    tested_by="tests/algorithms/test_marft.py, tests/training/test_team.py, tests/agent/test_team_play.py",
    switch="rl.algorithm: marft",
)

PARTS = {
    "minibatches": 4,
    "advantage.estimator": "team",
    "advantage.level": "turn",
    "advantage.gamma": 0.99,
    "advantage.lam": 0.95,
    "advantage.whiten": True,
    "loss.kind": "turn_clip",
    "loss.ratio_norm": "sum",
    "loss.aggregation": "turn_mean",
    "loss.entropy_coef": 0.01,
    "loss.kl_stop": 1e-3,
    "critic.head": HeadParams(loss="mse"),
    "critic.trunk": "frozen",
    "critic.hidden": [1024, 512],
    "critic.learning_rate": 5e-4,
    "critic.coef": 1.0,
    "critic.warmup_steps": 0,
    "critic.huber_delta": 10.0,
    "critic.value_clip": 0.2,
    "team.members": [Member(role="planner", prompt="planner.txt"), Member(role="solver", sees=["planner"])],
}

COMPOSITION = Composition(card=CARD, parts=PARTS)
