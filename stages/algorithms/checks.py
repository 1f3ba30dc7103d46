"""Which switches of section `rl` would have no effect, and which combinations make no sense. Light to import."""

from __future__ import annotations

from stages.algorithms.card import PIECES, Composition
from stages.algorithms.group_checks import check_groups
from stages.algorithms.needs import NEEDS, get, learns_values
from stages.algorithms.replay_checks import check_replay
from stages.algorithms.reward_checks import check_progress, check_reward, check_support_of_shaped, own_rewards
from stages.parameters.rl import Rl
from stages.validation import ParamsError

SOURCES = {"pairs": "stored pairs", "stored": "recorded episodes"}
"""Of methods with losses of a kind of their own, by stages.algorithms.card.Composition.data."""


def check(given: Rl, resolved: Rl, method: Composition) -> None:
    """Raise ParamsError for a switch that the user gave and that would be ignored, and for a combination without meaning;
    `resolved` is `given` with its nulls filled."""
    _check_pieces(resolved, method)
    _check_effects(given, resolved, method)
    if method.data == "pairs":
        _check_pairs(resolved)
    elif method.data in ("episodes", "records"):
        _check_sense(resolved)
        check_reward(resolved)
        check_groups(resolved)
        _check_advantage(resolved)
        _check_critic(resolved)
        check_progress(resolved)
        check_replay(given, resolved, method)
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
    if method.data != "episodes" and given.curriculum.kind == "value":
        raise ParamsError(f"rl.curriculum.kind: value has no effect: algorithm {slug} plays no tasks; set it to difficulty")
    chosen = given.selection.kind
    if method.data != "episodes" and chosen != "all":
        raise ParamsError(f"rl.selection.kind: {chosen} has no effect: algorithm {slug} plays no tasks; set it to all")
    sections = ("reward", "branching", "filling", "external", "horizon", "advantage", "credit", "loss", "critic", "replay")
    if method.data in SOURCES:
        for section in sections:
            for name, value in getattr(given, section):
                if value is not None:
                    raise ParamsError(
                        f"rl.{section}.{name} has no effect: algorithm {slug} learns from {SOURCES[method.data]}, "
                        f"not from what it plays; set it to null"
                    )
    if method.data != "episodes":
        for name in ("environment_steps", "stop_at_success"):
            if getattr(given, name) is not None:
                raise ParamsError(f"rl.{name} has no effect: algorithm {slug} plays nothing; set it to null")
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
    if rl.loss.kind == "policy_gradient" and (rl.epochs > 1 or (rl.minibatches or 1) > 1):
        raise ParamsError(
            f"rl.loss.kind: policy_gradient has no correction for data that the policy has moved away from, and rl.epochs is "
            f"{rl.epochs}, rl.minibatches {rl.minibatches}; set both to 1, or loss.kind to importance, ppo_clip, gspo or cispo"
        )


def _check_critic(rl: Rl) -> None:
    if not learns_values(rl):
        return
    if (rl.critic.warmup_steps or 0) >= rl.steps:
        raise ParamsError(
            f"rl.critic.warmup_steps ({rl.critic.warmup_steps}) leaves none of the {rl.steps} steps to the policy; set it below "
            f"rl.steps"
        )
    if rl.critic.init == "value_model" and (not own_rewards(rl.reward) or rl.credit.kind == "progress"):
        raise ParamsError(
            "rl.critic.init: value_model starts the critic at the environment's reward still to come, and rl.reward or rl.credit "
            "puts other rewards in its place; set init to policy, or these to the environment's"
        )
    check_support_of_shaped(rl)
