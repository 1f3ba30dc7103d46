"""Rejection sampling: maximum likelihood on the successes among attempts that were made before training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from stages.algorithms.card import Card, Composition
from stages.runtime.validation import Count, Section

CARD = Card(
    slug="rejection_sft",
    title="Rejection-sampling fine-tuning",
    paper="Yuan et al., RFT, arXiv 2308.01825; as start and baseline of Agent-RLVR, arXiv 2506.11425",
    equation="loss = -log pi(y_t), mean over the policy's tokens of a step's successful attempts",
    assumptions="successes among the plain attempts of the rollout stage. settings.guided adds successes with a hint, which the "
    "training sequence does not show; the paper found positives with hints in the prompt worse, and trains on plain ones",
    reduces_to="all attempts successful, fraction 1: supervised fine-tuning on the policy's own attempts",
    tested_by="tests/training/test_agent_rlvr.py",
    switch="rl.algorithm: rejection_sft",
)


class Settings(Section):
    paths_per_step: Count = 32
    """Attempts per optimiser step; each is used once per pass."""
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Share of the plain successes that is trained on, drawn at random; rounded to the nearest number."""
    guided: bool = False
    """Also train on the successes of the guided pass (rl.guidance), without their hints."""


COMPOSITION = Composition(card=CARD, parts={}, settings=Settings, data="attempts")
