"""What `rl.algorithm` and the user's own switches come to, and which combinations make no sense. Light to import: params.yaml is
checked with this before anything runs.

A composition's parts fill the keys that are null; DEFAULTS fill the rest. A key that the user gave and that could have no effect
is refused (NEEDS), and so is a combination without meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from stages.algorithms.card import PIECES, Composition
from stages.algorithms.registry import composition
from stages.parameters.rl import PrsStage, Rl
from stages.parameters.shared import HeadParams
from stages.validation import ParamsError

PRS_STAGES = [
    PrsStage(name="parse", weight=0.1),
    PrsStage(name="tool", weight=0.1),
    PrsStage(name="outcome", weight=0.8, threshold=0.0),
]
"""Format first, then a tool call, then the outcome."""

DEFAULTS: dict[str, Any] = {
    "reward.kind": "environment",
    "reward.prs": PRS_STAGES,
    "reward.density": "environment",
    "reward.divisor": "max_total",
    "reward.max_total": 1.0,
    "reward.tool_bonus": 0.0,
    "reward.tool_bonus_on": "wrong",
    "reward.overlong_penalty": 0.0,
    "reward.kl_coef": 0.0,
    "reward.kl_estimator": "k1",
    "filling.kind": "none",
    "filling.rounds": 3,
    "filling.replace": "zero_advantage",
    "filling.min_value": 0.05,
    "filling.spread": "std",
    "filling.value_of": "reward",
    "filling.r_max": 1.0,
    "filling.temperature": 1.0,
    "filling.zero_tol": 1e-8,
    "filling.smooth": "cap",
    "filling.c_max": 1.0,
    "filling.overlong": "keep",
    "advantage.estimator": "group",
    "advantage.mean": "none",
    "advantage.std": "none",
    "advantage.ddof": 1,
    "advantage.gamma": 1.0,
    "advantage.lam": 1.0,
    "advantage.whiten": False,
    "credit.kind": "outcome",
    "credit.weight": 1.0,
    "loss.kind": "policy_gradient",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.aggregation": "token_mean",
    "loss.kl_coef": 0.0,
    "loss.kl_estimator": "k3",
    "loss.entropy_coef": 0.0,
    "critic.learning_rate": 1e-3,
    "critic.coef": 0.5,
    "critic.warmup_steps": 2,
    "critic.head": HeadParams(),
    "preference.loss": "dpo",
    "preference.level": "trajectory",
    "preference.pairs_per_step": 32,
    "preference.beta": 0.1,
    "preference.gamma": 0.5,
    "preference.smoothing": 0.1,
    "preference.length_normalise": False,
    "preference.desirable": 1.0,
    "preference.undesirable": 1.0,
    "preference.nll_coef": 1.0,
}
"""By dotted key. Keys that are not in here stay null where the method says nothing: no dual clip, no clipping of advantages, no
own value for right and wrong, lengths from model.max_length; advantage.level follows the estimator."""

REFERENCE_FREE = ("orpo", "simpo", "cpo")
_CLIPPED = ("ppo_clip", "gspo", "cispo")
_REFILLED = ("random", "value")


def needs_critic(rl: Rl) -> bool:
    """Whether a resolved section asks for a critic."""
    return rl.advantage.estimator == "gae"


def needs_reference(rl: Rl) -> bool:
    """Whether a resolved section compares with the frozen start policy while training on episodes."""
    return (rl.loss.kl_coef or 0.0) > 0 or (rl.reward.kl_coef or 0.0) > 0


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
    (("credit.weight",), lambda rl: rl.credit.kind != "outcome", "credit.kind: annotated"),
    (("loss.clip_low", "loss.clip_high"), lambda rl: rl.loss.kind in (*_CLIPPED, "own"), "loss.kind: ppo_clip, gspo or cispo"),
    (("loss.dual_clip",), lambda rl: rl.loss.kind == "ppo_clip", "loss.kind: ppo_clip"),
    (("loss.constant_length",), lambda rl: rl.loss.aggregation == "constant", "loss.aggregation: constant"),
    (("loss.kl_estimator",), lambda rl: bool(rl.loss.kl_coef), "a loss.kl_coef above 0"),
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


def resolve_section(given: Rl, max_length: int | None = None) -> tuple[Composition, Rl]:
    """The method and the section with its nulls filled; `max_length`: model.max_length, for lengths that are null.

    Raises ParamsError for an unknown algorithm, for switches without effect and for combinations without meaning.
    """
    method = composition(given.algorithm)
    values = given.model_dump()
    own = {
        f"{part}.{'loss' if part == 'preference' else 'estimator' if part == 'advantage' else 'kind'}" for part in method.pieces
    }
    stands_for = {**DEFAULTS, **dict.fromkeys(own, "own"), **method.parts}
    for key, value in stands_for.items():
        section, name = key.split(".")
        if values[section][name] is None:
            values[section][name] = value
    if values["advantage"]["level"] is None and values["advantage"]["estimator"] != "own":
        values["advantage"]["level"] = "token" if values["advantage"]["estimator"] == "gae" else "trajectory"
    _lengths(values, max_length)
    values["settings"] = _settings(given, method)
    resolved = Rl.model_validate(values)
    _check_pieces(resolved, method)
    _check_effects(given, resolved, method)
    if method.data == "pairs" and resolved.preference.loss == "kto" and resolved.preference.pairs_per_step == 1:
        raise ParamsError(
            "rl.preference.pairs_per_step is 1, and kto compares with the continuations of other pairs; set it to at least 2"
        )
    if method.data == "episodes":
        _check_sense(resolved)
        _check_advantage(resolved)
    return method, resolved


def _lengths(values: dict[str, Any], max_length: int | None) -> None:
    loss, reward = values["loss"], values["reward"]
    if loss["aggregation"] == "constant" and loss["constant_length"] is None:
        loss["constant_length"] = max_length
    if reward["overlong_penalty"]:
        if reward["overlong_max"] is None:
            reward["overlong_max"] = max_length
        if reward["overlong_cache"] is None and reward["overlong_max"]:
            reward["overlong_cache"] = max(1, reward["overlong_max"] // 5)


def _settings(given: Rl, method: Composition) -> Any:
    """The method's own keys, checked by its own model."""
    slug = method.card.slug
    if method.settings is None:
        if given.settings:
            raise ParamsError(f"rl.settings: algorithm {slug} has no keys of its own; got {sorted(given.settings)}")
        return {}
    if isinstance(given.settings, method.settings):
        return given.settings
    try:
        return method.settings.model_validate(given.settings)
    except ValidationError as error:
        lines = [f"rl.settings.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise ParamsError(f"algorithm {slug}: {'; '.join(lines)}; known: {', '.join(method.settings.model_fields)}") from error


def _check_pieces(rl: Rl, method: Composition) -> None:
    kinds = {
        "reward": rl.reward.kind,
        "filling": rl.filling.kind,
        "advantage": rl.advantage.estimator,
        "credit": rl.credit.kind,
        "loss": rl.loss.kind,
        "preference": rl.preference.loss,
    }
    lacking = [part for part in PIECES if kinds[part] == "own" and part not in method.pieces]
    if lacking:
        raise ParamsError(f"rl.{lacking[0]} is set to own, and algorithm {method.card.slug} has no {lacking[0]} of its own")


def _check_effects(given: Rl, resolved: Rl, method: Composition) -> None:
    """Refuse what would silently be ignored."""
    slug = method.card.slug
    sections = ("reward", "filling", "advantage", "credit", "loss", "critic")
    if method.data == "pairs":
        for section in sections:
            for name, value in getattr(given, section):
                if value is not None:
                    raise ParamsError(
                        f"rl.{section}.{name} has no effect: algorithm {slug} learns from stored pairs, not from episodes; set it "
                        f"to null"
                    )
    else:
        for name, value in given.preference:
            if value is not None:
                raise ParamsError(
                    f"rl.preference.{name} has no effect: algorithm {slug} learns from episodes; set it to null, or algorithm to one "
                    f"that learns from pairs, such as dpo"
                )
    for keys, has_effect, needed in NEEDS:
        for key in keys:
            if get(given, key) is not None and not has_effect(resolved):
                raise ParamsError(
                    f"rl.{key} has no effect here: it needs {needed} (algorithm {slug}); set it to null, or change that"
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
            f"rl.filling.kind {filling.kind} looks for groups of equal rewards, and rl.group_size is 1; set it to >= 2"
        )
    if filling.kind == "value" and filling.value_of == "last_stage" and reward.kind != "prs":
        raise ParamsError("rl.filling.value_of: last_stage is the last stage of progressive shaping; set rl.reward.kind to prs")
    if reward.kind == "prs":
        if reward.density == "dense":
            raise ParamsError("rl.reward.kind: prs scores whole episodes; rl.reward.density: dense scores turns: choose one")
        names = [stage.name for stage in reward.prs or []]
        if len(set(names)) != len(names):
            raise ParamsError(f"rl.reward.prs names a stage twice: {names}")
        if sum(stage.weight for stage in reward.prs or []) <= 0:
            raise ParamsError("rl.reward.prs: the weights of all stages are 0; no reward would be left")
    if (reward.correct is None) != (reward.wrong is None):
        raise ParamsError("rl.reward.correct and wrong replace the environment's return together: set both, or neither")
    if reward.correct is not None and reward.wrong is not None:
        if reward.correct <= reward.wrong:
            raise ParamsError(f"rl.reward.correct ({reward.correct:g}) must be above wrong ({reward.wrong:g})")
        if reward.kind == "prs" or reward.density == "dense":
            raise ParamsError("rl.reward.correct and wrong grade the outcome alone; with prs or density: dense set both to null")


def _check_advantage(rl: Rl) -> None:
    advantage = rl.advantage
    mean, std, level = advantage.mean, advantage.std, advantage.level
    if advantage.estimator == "gae":
        if mean != "none" or std != "none":
            raise ParamsError(
                f"rl.advantage.mean {mean} and std {std} belong to estimator group; with gae the critic is the baseline: set both "
                f"to none, or estimator to group"
            )
        if level == "trajectory":
            raise ParamsError("rl.advantage.level: trajectory belongs to estimator group; gae credits turns or tokens")
    if advantage.estimator == "group" and rl.group_size < 2:
        if mean in ("group", "leave_one_out", "length_weighted") or std == "group":
            raise ParamsError(
                f"rl.group_size is 1 and rl.advantage (mean {mean}, std {std}) compares episodes of a group; group_size must be at "
                f"least 2, or mean and std none or batch"
            )
        if std == "batch" and rl.tasks_per_step < 2:
            raise ParamsError("rl.advantage.std: batch needs at least 2 episodes a step; raise rl.tasks_per_step or group_size")
    if advantage.estimator == "group" and level == "token" and advantage.gamma != 1.0:
        raise ParamsError(
            "rl.advantage.gamma below 1 discounts by tokens at level token, 0.99 over 400 tokens being 0.018; the group estimator "
            "discounts turns: set rl.advantage.level to turn, or gamma to null"
        )
    if mean in ("greedy", "length_weighted") and level in ("turn", "token"):
        raise ParamsError(f"rl.advantage.mean: {mean} is a baseline for whole episodes; set rl.advantage.level to trajectory")
    if advantage.whiten and std in ("group", "batch"):
        raise ParamsError(
            f"rl.advantage.whiten would normalise a second time what std: {std} has normalised, which is another method; set std to "
            f"none, or whiten to false"
        )
    if rl.loss.kind == "policy_gradient" and (rl.epochs > 1 or rl.minibatches > 1):
        raise ParamsError(
            f"rl.loss.kind: policy_gradient has no correction for data that the policy has moved away from, and rl.epochs is "
            f"{rl.epochs}, rl.minibatches {rl.minibatches}; set both to 1, or loss.kind to ppo_clip, gspo or cispo"
        )
