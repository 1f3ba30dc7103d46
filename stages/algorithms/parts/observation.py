"""The loss on observation tokens (ECHO); stages/training/rl/observation.py implements it. Light to import."""

from __future__ import annotations

from stages.algorithms.parts.part import Part
from stages.runtime.validation import NonNegative


class Observation(Part):
    """Prediction of the environment's answers: an auxiliary loss in the pass of the policy's loss."""

    data = ("episodes",)

    coef: NonNegative = 0.0
    """Weight of the mean negative log-probability of the tokens that the environment wrote after the policy's turns, the chat
    template's among them, under sampling.temperature. Episodes of dead groups then pass through the policy, too. 0: none."""
