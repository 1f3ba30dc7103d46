"""Agent-RLVR: failed tasks are tried again with a hint, and the policy learns to succeed without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stages.algorithms.card import Card, Composition
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.settings import Rl

CARD = Card(
    slug="agent_rlvr",
    title="Agent-RLVR",
    paper="Da et al., arXiv 2506.11425",
    equation="pairs of a success, plain or guided by a hint, and a plain failure of the same task, both from the prompt without "
    "the hint; loss = -log sigmoid(beta ((log pi - log pi_ref)(success) - (log pi - log pi_ref)(failure))), log-probabilities "
    "summed over the policy's tokens; pi_ref is the policy after fine-tuning on a fifth of the plain successes (rl.warm_start)",
    assumptions="plain attempts of the rollout stage, some of them failures; a policy that can use hints (sft.guided for small "
    "models). beta, the texts of hints and the length of the warm start are ours: the paper does not state them",
    reduces_to="guidance.kinds []: offline DPO on plain attempts; without the preference step, rejection_sft",
    tested_by="tests/training/test_agent_rlvr.py",
    switch="rl.algorithm: agent_rlvr",
)


def check(given: Rl, rl: Rl) -> None:
    if rl.preference.source != "guided":
        raise ParamsError(
            f"rl.preference.source is {rl.preference.source}, and agent_rlvr learns from guided attempts: set it to guided, or "
            f"algorithm to dpo"
        )


COMPOSITION = Composition(
    card=CARD,
    parts={
        "preference.loss": "dpo",
        "preference.source": "guided",
        "warm_start": {"algorithm": "rejection_sft", "steps": 5, "settings": {"fraction": 0.2}},
    },
    data="pairs",
    check=check,
)
