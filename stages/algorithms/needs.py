"""Which switches of section `rl` need others to have an effect, and what there must be beside the policy. Light to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stages.algorithms.group_checks import BRANCHING
from stages.parameters.rl import Replay, Rl

REFERENCE_FREE = ("orpo", "simpo", "cpo")
_CLIPPED = ("ppo_clip", "gspo", "cispo")
_REFILLED = ("random", "value")


def learns_values(rl: Rl) -> bool:
    """Whether a resolved section asks for a critic, of tokens or of utterances."""
    return rl.advantage.estimator in ("gae", "utterance")


def needs_critic(rl: Rl) -> bool:
    """Whether a resolved section asks for a critic of tokens, which learns from the batch that the policy learns from."""
    return rl.advantage.estimator == "gae" or (needs_utterances(rl) and bool(rl.advantage.token_baseline))


def needs_utterances(rl: Rl) -> bool:
    """Whether a resolved section asks for the critic of utterances, which learns from replayed episodes."""
    return rl.advantage.estimator == "utterance"


def needs_reference(rl: Rl) -> bool:
    """Whether a resolved section compares with the frozen start policy while training on episodes."""
    return (rl.loss.kl_coef or 0.0) > 0 or (rl.reward.kl_coef or 0.0) > 0


def _external(rl: Rl) -> str | None:
    """The loss of external tokens, None where there are none."""
    return rl.external.loss if rl.external.per_group else None


NEEDS: list[tuple[tuple[str, ...], Callable[[Rl], bool], str]] = [
    (("reward.prs",), lambda rl: rl.reward.kind == "prs", "reward.kind: prs"),
    (("reward.divisor", "reward.max_total"), lambda rl: rl.reward.density == "dense", "reward.density: dense"),
    (("reward.tool_bonus_on", "reward.tool_bonus_cap"), lambda rl: bool(rl.reward.tool_bonus), "a reward.tool_bonus above 0"),
    (
        ("reward.overlong_max", "reward.overlong_cache"),
        lambda rl: bool(rl.reward.overlong_penalty),
        "a reward.overlong_penalty above 0",
    ),
    (("reward.kl_estimator",), lambda rl: bool(rl.reward.kl_coef), "a reward.kl_coef above 0"),
    (
        ("reward.format_penalty", "reward.multi_tool_bonus"),
        lambda rl: rl.reward.kind == "hierarchical",
        "reward.kind: hierarchical",
    ),
    (
        ("branching.initial", "branching.beam", "branching.base"),
        lambda rl: rl.branching.kind in BRANCHING,
        "branching.kind: entropy or random",
    ),
    (
        tuple(f"branching.{name}" for name in ("entropy_weight", "tokens", "candidates", "aggregate", "probe", "inherit")),
        lambda rl: rl.branching.kind == "entropy",
        "branching.kind: entropy",
    ),
    (("filling.rounds",), lambda rl: rl.filling.kind == "resample", "filling.kind: resample"),
    (
        ("filling.replace", "filling.smooth", "filling.c_max"),
        lambda rl: rl.filling.kind in _REFILLED,
        "filling.kind: random or value",
    ),
    (("filling.min_value",), lambda rl: rl.filling.replace == "low_value", "filling.replace: low_value"),
    (
        ("filling.spread", "filling.value_of", "filling.r_max"),
        lambda rl: rl.filling.kind == "value" or rl.filling.replace == "low_value",
        "filling.kind: value",
    ),
    (("filling.temperature",), lambda rl: rl.filling.kind == "value", "filling.kind: value"),
    (("filling.zero_tol",), lambda rl: rl.filling.kind != "none", "a filling.kind other than none"),
    (("external.source", "external.loss"), lambda rl: bool(rl.external.per_group), "an external.per_group above 0"),
    (("external.mix", "external.u"), lambda rl: _external(rl) == "mis", "external.loss: mis and a per_group above 0"),
    (
        ("external.ratio_max", "external.gamma"),
        lambda rl: _external(rl) in ("mis", "pi", "old"),
        "external.loss: mis, pi or old and a per_group above 0",
    ),
    (("external.coef",), lambda rl: _external(rl) == "sft", "external.loss: sft and a per_group above 0"),
    (("horizon.turns",), lambda rl: rl.horizon.kind == "fixed", "horizon.kind: fixed"),
    (
        ("horizon.rounds", "horizon.steps_per_stage", "horizon.order"),
        lambda rl: rl.horizon.kind == "scaling_inter",
        "horizon.kind: scaling_inter",
    ),
    (
        ("advantage.mean", "advantage.std", "advantage.ddof"),
        lambda rl: rl.advantage.estimator == "group",
        "advantage.estimator: group",
    ),
    (
        ("advantage.level",),
        lambda rl: rl.advantage.estimator in ("group", "gae"),
        "advantage.estimator: group or gae",
    ),
    (
        ("advantage.gamma",),
        lambda rl: learns_values(rl) or rl.advantage.level in ("turn", "token"),
        "advantage.estimator: gae or utterance, or level: turn or token",
    ),
    (("advantage.token_baseline",), needs_utterances, "advantage.estimator: utterance"),
    (("advantage.lam",), lambda rl: rl.advantage.estimator == "gae", "advantage.estimator: gae"),
    (("credit.weight",), lambda rl: rl.credit.kind in ("annotated", "progress", "own"), "credit.kind: annotated or progress"),
    (
        ("credit.step_reward", "credit.step_weight", "credit.grounding", "credit.grounding_coef"),
        lambda rl: rl.credit.kind == "progress",
        "credit.kind: progress",
    ),
    (
        ("credit.residual",),
        lambda rl: rl.credit.kind == "progress" and rl.credit.step_reward == "spa",
        "credit.kind: progress, step_reward: spa",
    ),
    (
        ("credit.key", "credit.history", "credit.match", "credit.repeats", "credit.renormalise"),
        lambda rl: rl.credit.kind == "graph",
        "credit.kind: graph",
    ),
    (("credit.threshold",), lambda rl: rl.credit.match == "cosine", "credit.match: cosine"),
    (("loss.clip_low", "loss.clip_high"), lambda rl: rl.loss.kind in (*_CLIPPED, "own"), "loss.kind: ppo_clip, gspo or cispo"),
    (("loss.dual_clip",), lambda rl: rl.loss.kind == "ppo_clip", "loss.kind: ppo_clip"),
    (("loss.constant_length",), lambda rl: rl.loss.aggregation == "constant", "loss.aggregation: constant"),
    (("loss.kl_estimator",), lambda rl: bool(rl.loss.kl_coef), "a loss.kl_coef above 0"),
    (("loss.entropy_aggregation",), lambda rl: bool(rl.loss.entropy_coef), "a loss.entropy_coef above 0"),
    (
        tuple(f"critic.{name}" for name in ("learning_rate", "warmup_steps", "head", "init")),
        learns_values,
        "a method with a critic (advantage.estimator: gae or utterance)",
    ),
    (("critic.coef",), needs_critic, "a method with a critic of tokens (advantage.estimator: gae)"),
    (tuple(f"replay.{name}" for name in Replay.model_fields), needs_utterances, "advantage.estimator: utterance"),
    (("replay.samples",), lambda rl: rl.replay.value_target == "policy", "replay.value_target: policy"),
    (("replay.expectile",), lambda rl: rl.replay.value_target == "expectile", "replay.value_target: expectile"),
    (("preference.gamma",), lambda rl: rl.preference.loss == "simpo", "preference.loss: simpo"),
    (("preference.smoothing",), lambda rl: rl.preference.loss in ("cdpo", "robust_dpo"), "preference.loss: cdpo or robust_dpo"),
    (("preference.length_normalise",), lambda rl: rl.preference.loss == "ipo", "preference.loss: ipo"),
    (("preference.desirable", "preference.undesirable"), lambda rl: rl.preference.loss == "kto", "preference.loss: kto"),
    (("preference.nll_coef",), lambda rl: rl.preference.loss in ("cpo", "orpo"), "preference.loss: cpo or orpo"),
]
"""(keys, what they need to have an effect, that in words)."""


def get(rl: Rl, key: str) -> Any:
    """The value of a dotted key of section `rl`."""
    section, _, name = key.rpartition(".")
    return getattr(getattr(rl, section) if section else rl, name)
