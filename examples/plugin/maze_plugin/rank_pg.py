"""rank_pg: REINFORCE with a group's returns replaced by their centred ranks."""

from __future__ import annotations

from stages.plugins import Card, Composition, Positive, Section


class Settings(Section):
    scale: Positive = 1.0
    """Largest advantage."""


def advantage(batch, rl):
    """`advantages` [B, T]: the share of the group that an episode beats, minus the share that beats it."""
    same = batch.group[:, None] == batch.group[None, :]
    beats = (batch.rewards[:, None] > batch.rewards[None, :]) & same
    others = (same.sum(1) - 1).clamp(min=1)
    rank = (beats.sum(1) - beats.sum(0)) / others
    return batch.with_(advantages=rl.settings.scale * rank[:, None] * batch.mask)


COMPOSITION = Composition(
    card=Card(
        slug="rank_pg",
        title="Rank policy gradient",
        paper="a template",
        equation="A_i = scale * (episodes of the group below i - those above i) / (G - 1); loss = -A log pi(y_t)",
        assumptions="groups of at least 2 episodes",
        reduces_to="groups of 2 with returns 0 and 1: RLOO",
        tested_by="tests/test_plugin_template.py",
        switch="rl.algorithm: rank_pg",
    ),
    parts={"loss.kind": "policy_gradient"},
    pieces={"advantage": advantage},
    settings=Settings,
)
