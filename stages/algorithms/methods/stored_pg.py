"""Policy gradient on stored programs, the baseline for B-Coder on the same data."""

from __future__ import annotations

import torch

from stages.algorithms.batch import LossTerms
from stages.algorithms.card import Card, Composition, OfflineLosses
from stages.algorithms.parts.offline import OfflineBatch, OfflineSettings, Scores, imitation, required, weighted_sum
from stages.algorithms.settings import Rl
from stages.runtime.validation import Share

CARD = Card(
    slug="stored_pg",
    title="Policy gradient on stored programs",
    paper="Le et al., CodeRL, arXiv 2207.01780 (its actor's loss, without the critic's weights of tokens); the clipped ratio is "
    "PPO's, arXiv 1707.06347",
    equation="A = R - mean return of the SFT policy on the task; loss = -min(rho A, clip(rho) A) - beta_ce log pi of the ground "
    "truth, rho = pi / pi_SFT of each token, means over an episode's tokens",
    assumptions="offline dataset as for b_coder; no episodes are played; CodeRL's baseline is the greedy program's return. "
    "Programs by others were not sampled from pi_SFT, so that rho does not correct for them",
    reduces_to="settings.clip null: REINFORCE on the offline dataset, as CodeRL has it; all returns equal to the baseline: "
    "supervised fine-tuning on the ground truth",
    tested_by="tests/algorithms/test_b_coder.py, tests/training/test_offline.py",
    switch="rl.algorithm: stored_pg",
)


class Settings(OfflineSettings):
    clip: Share | None = 0.2
    """Clip range of the ratio to the SFT policy; null: -A log pi, without a ratio."""


def policy_loss(scores: Scores, batch: OfflineBatch, rl: Rl) -> LossTerms:
    """A micro-batch's share."""
    settings: Settings = rl.settings
    logprobs = required(scores.logprobs)
    advantage = (batch.returns - batch.baseline)[:, None]
    if settings.clip is None:
        per_token = -advantage * logprobs
    else:
        ratio = torch.where(batch.mask, logprobs - batch.logprobs_ref, torch.zeros_like(logprobs)).exp()
        per_token = -torch.minimum(ratio * advantage, ratio.clamp(1 - settings.clip, 1 + settings.clip) * advantage)
    gradient, ce = weighted_sum(per_token, batch.mask, batch.weight), imitation(logprobs, batch)
    loss = gradient + settings.beta_ce * ce
    return LossTerms(loss, {"loss": loss.detach(), "ground_truth_nll": ce.detach()})


COMPOSITION = Composition(card=CARD, parts={}, settings=Settings, data="offline", offline=OfflineLosses(policy=policy_loss))
