"""GPG: group policy gradient."""

from stages.algorithms.card import Card, Composition
from stages.algorithms.parts.advantage import episode_advantages
from stages.algorithms.parts.group_resampling import dead_rows, trained_rows
from stages.runtime.validation import ParamsError, Positive, Section

CARD = Card(
    slug="gpg",
    title="GPG",
    paper="Chu et al., arXiv 2504.02546",
    equation="A_i = alpha (R_i - group mean), alpha = min(episodes / episodes of live groups, most); loss = -A log pi(y_t)",
    assumptions="groups of at least 2 episodes; on-policy data; excluded and masked episodes are not counted",
    reduces_to="no group of equal returns: RLOO times (G-1)/G",
    tested_by="tests/algorithms/test_gpg.py",
    switch="rl.algorithm: gpg",
)


class Settings(Section):
    most: Positive = 8.0
    """Largest alpha."""


def advantage(batch, rl):
    """`advantages` [B, T]: alpha times the group-centred return on policy tokens."""
    counts = batch.weights * trained_rows(batch, rl.group_resampling)
    live = float(counts[~dead_rows(batch.rewards, batch.group)].sum())
    alpha = min(float(counts.sum()) / max(live, 1.0), rl.settings.most)
    centred = episode_advantages(batch.rewards, batch.group, "group", "none")
    return batch.with_(advantages=alpha * centred[:, None] * batch.mask).with_metrics(alpha=alpha)


def check(given, rl):
    if rl.group_size < 2:
        raise ParamsError("rl.algorithm: gpg compares the episodes of a group, and rl.group_size is 1; set it to at least 2")


COMPOSITION = Composition(
    card=CARD, parts={"loss.kind": "policy_gradient"}, pieces={"advantage": advantage}, settings=Settings, check=check
)
