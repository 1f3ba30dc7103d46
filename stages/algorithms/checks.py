"""Which switches of section `rl` would have no effect, and which combinations make no sense. Light to import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stages.algorithms.card import PIECES, Composition
from stages.algorithms.group_checks import BRANCHING, check_groups
from stages.algorithms.reward_checks import check_progress, check_reward, check_support_of_shaped
from stages.parameters.rl import Rl
from stages.validation import ParamsError

REFERENCE_FREE = ("orpo", "simpo", "cpo")
_CLIPPED = ("ppo_clip", "gspo", "cispo")
_REFILLED = ("random", "value")


def needs_critic(rl: Rl) -> bool:
    """Whether a resolved section asks for a critic."""
    return rl.advantage.estimator == "gae"


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
        lambda rl: rl.advantage.estimator != "own",
        "advantage.estimator: group or gae",
    ),
    (
        ("advantage.gamma",),
        lambda rl: rl.advantage.estimator == "gae" or rl.advantage.level in ("turn", "token"),
        "advantage.estimator: gae, or level: turn or token",
    ),
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
        ("critic.learning_rate", "critic.coef", "critic.warmup_steps", "critic.head"),
        needs_critic,
        "a method with a critic (advantage.estimator: gae)",
    ),
    (("preference.gamma",), lambda rl: rl.preference.loss == "simpo", "preference.loss: simpo"),
    (("preference.smoothing",), lambda rl: rl.preference.loss in ("cdpo", "robust_dpo"), "preference.loss: cdpo or robust_dpo"),
    (("preference.length_normalise",), lambda rl: rl.preference.loss == "ipo", "preference.loss: ipo"),
    (("preference.desirable", "preference.undesirable"), lambda rl: rl.preference.loss == "kto", "preference.loss: kto"),
    (("preference.nll_coef",), lambda rl: rl.preference.loss in ("cpo", "orpo"), "preference.loss: cpo or orpo"),
]
"""(keys, what they need to have an effect, that in words)."""


def get(rl: Rl, key: str) -> Any:
    """The value of a dotted key of section `rl`."""
    section, name = key.split(".")
    return getattr(getattr(rl, section), name)


def check(given: Rl, resolved: Rl, method: Composition) -> None:
    """Raise ParamsError for a switch that the user gave and that would be ignored, and for a combination without meaning;
    `resolved` is `given` with its nulls filled."""
    _check_pieces(resolved, method)
    _check_effects(given, resolved, method)
    if method.data == "pairs":
        _check_pairs(resolved)
    elif method.data == "episodes":
        _check_sense(resolved)
        check_reward(resolved)
        check_groups(resolved)
        _check_advantage(resolved)
        check_progress(resolved)
    if method.check is not None:
        method.check(given, resolved)


def _check_pieces(rl: Rl, method: Composition) -> None:
    kinds = {
        "reward": rl.reward.kind,
        "branching": rl.branching.kind,
        "filling": rl.filling.kind,
        "advantage": rl.advantage.estimator,
        "credit": rl.credit.kind,
        "loss": rl.loss.kind,
        "preference": rl.preference.loss,
    }
    lacking = [part for part in PIECES if kinds[part] == "own" and part not in method.pieces]
    if lacking:
        key = {"advantage": "estimator", "preference": "loss"}.get(lacking[0], "kind")
        raise ParamsError(
            f"rl.{lacking[0]}.{key} is set to own, and algorithm {method.card.slug} has no {lacking[0]} of its own; set it to "
            f"null"
        )


def _check_effects(given: Rl, resolved: Rl, method: Composition) -> None:
    """Refuse what would silently be ignored."""
    slug = method.card.slug
    sections = ("reward", "branching", "filling", "external", "horizon", "advantage", "credit", "loss", "critic")
    if method.data != "episodes":
        source = {"pairs": "stored pairs, not from episodes", "stored": "stored episodes, and plays none"}[method.data]
        for section in sections:
            for name, value in getattr(given, section):
                if value is not None:
                    raise ParamsError(f"rl.{section}.{name} has no effect: algorithm {slug} learns from {source}; set it to null")
    if method.data == "stored":
        for name in ("environment_steps", "stop_at_success"):
            if getattr(given, name) is not None:
                raise ParamsError(
                    f"rl.{name} has no effect: algorithm {slug} learns from stored episodes, and plays none; set it to null"
                )
    if method.data != "pairs":
        for name, value in given.preference:
            if value is not None:
                raise ParamsError(
                    f"rl.preference.{name} has no effect: algorithm {slug} learns from episodes; set it to null, or algorithm to "
                    f"one that learns from pairs, such as dpo"
                )
    for keys, has_effect, needed in NEEDS:
        for key in keys:
            if get(given, key) is not None and not has_effect(resolved):
                raise ParamsError(
                    f"rl.{key} has no effect here: it needs {needed} (algorithm {slug}); set it to null, or change that"
                )


def _check_pairs(rl: Rl) -> None:
    if rl.preference.loss == "kto" and rl.preference.pairs_per_step == 1:
        raise ParamsError(
            "rl.preference.pairs_per_step is 1, and kto compares with the continuations of other pairs; set it to at least 2"
        )


def _check_sense(rl: Rl) -> None:
    sampling, reward, filling = rl.sampling, rl.reward, rl.filling
    if sampling.temperature == 0 or sampling.top_p < 1 or sampling.top_k > 0:
        raise ParamsError(
            f"rl.sampling (temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, top_k {sampling.top_k}) must draw "
            f"from the whole distribution that is trained: temperature above 0, top_p 1, top_k 0"
        )
    if filling.kind not in ("none", "own") and rl.group_size < 2:
        raise ParamsError(
            f"rl.filling.kind: {filling.kind} looks for groups of equal rewards, and rl.group_size is 1; set it to >= 2"
        )
    if filling.kind == "value" and filling.value_of == "last_stage" and reward.kind != "prs":
        raise ParamsError("rl.filling.value_of: last_stage is the last stage of progressive shaping; set rl.reward.kind to prs")


def _check_advantage(rl: Rl) -> None:
    advantage = rl.advantage
    mean, std, level = advantage.mean, advantage.std, advantage.level
    if advantage.estimator == "gae":
        if mean != "none" or std != "none":
            raise ParamsError(
                f"rl.advantage.mean {mean} and std {std} belong to estimator: group; with gae the critic is the baseline: set "
                f"both to none, or estimator to group"
            )
        if level == "trajectory":
            raise ParamsError(
                "rl.advantage.level: trajectory belongs to estimator group; gae credits turns or tokens: set it to either"
            )
        check_support_of_shaped(rl)
        if (rl.critic.warmup_steps or 0) >= rl.steps:
            raise ParamsError(
                f"rl.critic.warmup_steps ({rl.critic.warmup_steps}) leaves none of the {rl.steps} steps to the policy; set it "
                f"below rl.steps"
            )
    if advantage.estimator == "group" and rl.group_size < 2:
        if mean in ("group", "leave_one_out", "length_weighted") or std == "group":
            raise ParamsError(
                f"rl.group_size is 1 and rl.advantage (mean {mean}, std {std}) compares episodes of a group; group_size must be "
                f"at least 2, or mean and std none or batch"
            )
        if "batch" in (mean, std) and rl.tasks_per_step < 2:
            raise ParamsError(
                f"rl.advantage (mean {mean}, std {std}) compares the episodes of a step, and there is one; raise "
                f"rl.tasks_per_step or group_size"
            )
    if advantage.estimator == "group" and level == "token" and advantage.gamma != 1.0:
        raise ParamsError(
            "rl.advantage.gamma below 1 discounts by tokens at level token, 0.99 over 400 tokens being 0.018; the group "
            "estimator discounts turns: set rl.advantage.level to turn, or gamma to null"
        )
    if mean in ("greedy", "length_weighted") and level in ("turn", "token"):
        raise ParamsError(f"rl.advantage.mean: {mean} is a baseline for whole episodes; set rl.advantage.level to trajectory")
    if advantage.whiten and std in ("group", "batch"):
        raise ParamsError(
            f"rl.advantage.whiten would normalise a second time what std: {std} has normalised, which is another method; set std "
            f"to none, or whiten to false"
        )
    if rl.loss.kind == "policy_gradient" and (rl.epochs > 1 or rl.minibatches > 1):
        raise ParamsError(
            f"rl.loss.kind: policy_gradient has no correction for data that the policy has moved away from, and rl.epochs is "
            f"{rl.epochs}, rl.minibatches {rl.minibatches}; set both to 1, or loss.kind to importance, ppo_clip, gspo or cispo"
        )
