"""PACS: the outcome as a label, and a score made of the policy's own log-probabilities that is fitted to it."""

from __future__ import annotations

from typing import Literal

from stages.algorithms.card import Card, Composition
from stages.algorithms.implicit_critic import advantage, loss
from stages.algorithms.settings import Rl
from stages.runtime.validation import ParamsError, Positive, Section, Share

CARD = Card(
    slug="pacs",
    title="PACS",
    paper="Li et al., arXiv 2509.02522",
    equation="r_i = beta sum_t (log pi - log pi_old); psi_i = r_i - mean of the group's other r; loss = mean of w_i times the "
    "cross-entropy of sigmoid(psi_i) with the label 1[R_i >= threshold], w_i = G / (2 n of the label); no advantage, no clip",
    assumptions="whole groups of at least 2 episodes in a micro-batch, which is enforced; sums over tokens, so that a smaller "
    "beta fits longer episodes; an episode that was cut has label 0; the reference code clips no gradients (rl.max_grad_norm)",
    reduces_to="first update, settings.class_weight none, beta 1: RLOO with loss.aggregation seq_mean_token_sum, exactly",
    tested_by="tests/algorithms/test_pacs.py, tests/training/test_whole_groups.py",
    switch="rl.algorithm: pacs",
)


class Settings(Section):
    beta: Positive = 1.0
    """Factor on the reward proxy."""
    score: Literal["rloo", "grpo", "naive"] = "rloo"
    """psi: less the mean of the others' proxies; standardised in the group (its first gradients are about 1e6 times larger, since
    all proxies are equal then); the proxy itself."""
    reward_proxy: Literal["log_ratio", "mean_logp"] = "log_ratio"
    """Sum over policy tokens of the log ratio to the reference; or the mean of their log-probabilities, without a reference."""
    reference: Literal["step_old", "start"] = "step_old"
    """log_ratio: the policy that played the step's episodes, as in the authors' code, or the one that rl started from, as in the
    paper's text but without its resets."""
    class_weight: Literal["none", "group_balanced", "only_positive", "only_negative"] = "group_balanced"
    """group_balanced: both labels weigh the same in a group; only_...: episodes of the other label count 0."""
    threshold: Share | None = 0.5
    """Return from which the label is 1; null: the return itself, which must lie in [0, 1], is a soft label."""


def needs_start(rl: Rl) -> bool:
    """Whether the proxy compares with the policy that rl started from."""
    settings: Settings = rl.settings
    return settings.reward_proxy == "log_ratio" and settings.reference == "start"


def check(given: Rl, resolved: Rl) -> None:
    """Labels and scores take the places of advantage and loss, and of all that would act on these."""
    settings: Settings = resolved.settings
    if resolved.loss.kind != "own" or resolved.advantage.estimator != "own":
        raise ParamsError(
            f"rl.algorithm pacs is an advantage and a loss in one; with rl.loss.kind {resolved.loss.kind} and "
            f"rl.advantage.estimator {resolved.advantage.estimator} nothing of it would be left: set both to null, or name the "
            f"algorithm that you want"
        )
    if resolved.group_size < 2:
        raise ParamsError("rl.algorithm pacs scores the episodes of a group against each other; rl.group_size must be at least 2")
    ignored = {
        **{f"loss.{key}": key in given.loss.model_fields_set for key in ("clip_low", "clip_high")},
        "advantage.whiten": resolved.advantage.whiten,
        "advantage.clip": resolved.advantage.clip is not None,
        "reward.kl_coef": resolved.reward.kl_coef > 0,
        "credit.kind": resolved.credit.kind != "outcome",
    }
    for key, asked in ignored.items():
        if asked:
            raise ParamsError(f"rl.{key} has no effect: algorithm pacs learns from labels, not from advantages; set it to null")
    if resolved.external.per_group:
        raise ParamsError(
            "rl.external.per_group is above 0, and algorithm pacs scores whole groups of the policy's own episodes; set it to 0"
        )
    if settings.reward_proxy == "mean_logp" and "reference" in settings.model_fields_set:
        raise ParamsError("rl.settings.reference has no effect with reward_proxy: mean_logp, which has none; leave it out")


COMPOSITION = Composition(
    card=CARD,
    parts={"advantage.estimator": "own", "loss.kind": "own", "loss.aggregation": "seq_mean_token_sum"},
    pieces={"advantage": advantage, "loss": loss},
    settings=Settings,
    whole_groups=True,
    reference=needs_start,
    check=check,
)
