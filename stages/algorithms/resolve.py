"""What `rl.algorithm` and the user's own switches come to, and which combinations make no sense. Light to import: params.yaml is
checked with this before anything runs.

A composition's parts fill the keys that are null; DEFAULTS fill the rest. What is refused stands in stages/algorithms/checks.py.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from stages.algorithms.card import Composition
from stages.algorithms.checks import check
from stages.algorithms.horizon import stage_count
from stages.algorithms.registry import composition
from stages.parameters.rl import Rl
from stages.rewards.settings import PrsStage
from stages.validation import ParamsError
from stages.values.settings import HeadParams

PRS_STAGES = [
    PrsStage(name="parse", weight=0.1),
    PrsStage(name="tool", weight=0.1),
    PrsStage(name="outcome", weight=0.8, threshold=0.0),
]
"""Format first, then a tool call, then the outcome."""

LEVELS = {"group": "trajectory", "gae": "token"}
"""advantage.level by its estimator; the others know none."""

DEFAULTS: dict[str, Any] = {
    "minibatches": 1,
    "reward.kind": "environment",
    "reward.prs": PRS_STAGES,
    "reward.density": "environment",
    "reward.divisor": "max_total",
    "reward.max_total": 1.0,
    "reward.format_penalty": -1.0,
    "reward.multi_tool_bonus": 0.1,
    "reward.tool_bonus": 0.0,
    "reward.tool_bonus_on": "wrong",
    "reward.overlong_penalty": 0.0,
    "reward.kl_coef": 0.0,
    "reward.kl_estimator": "k1",
    "branching.kind": "none",
    "branching.beam": 2,
    "branching.base": 0.5,
    "branching.entropy_weight": 0.2,
    "branching.tokens": 20,
    "branching.candidates": 10,
    "branching.aggregate": "sum",
    "branching.probe": "answer",
    "branching.inherit": True,
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
    "external.per_group": 0,
    "external.source": "expert",
    "external.loss": "mis",
    "external.mix": 0.5,
    "external.u": 1.0,
    "external.gamma": 0.0,
    "external.coef": 1.0,
    "horizon.kind": "environment",
    "horizon.order": "rising",
    "advantage.estimator": "group",
    "advantage.mean": "none",
    "advantage.std": "none",
    "advantage.ddof": 1,
    "advantage.gamma": 1.0,
    "advantage.lam": 1.0,
    "advantage.whiten": False,
    "advantage.token_baseline": False,
    "credit.kind": "outcome",
    "credit.weight": 1.0,
    "credit.step_reward": "spa",
    "credit.residual": "none",
    "credit.step_weight": "one",
    "credit.grounding": "penalty",
    "credit.grounding_coef": 0.5,
    "credit.key": "transition",
    "credit.history": 1,
    "credit.match": "exact",
    "credit.threshold": 0.95,
    "credit.repeats": "once",
    "credit.renormalise": "none",
    "loss.kind": "policy_gradient",
    "loss.clip_low": 0.2,
    "loss.clip_high": 0.2,
    "loss.aggregation": "token_mean",
    "loss.kl_coef": 0.0,
    "loss.kl_estimator": "k3",
    "loss.entropy_coef": 0.0,
    "loss.entropy_aggregation": "loss",
    "critic.learning_rate": 1e-3,
    "critic.coef": 0.5,
    "critic.warmup_steps": 2,
    "critic.head": HeadParams(),
    "critic.init": "policy",
    "replay.records": [],
    "replay.capacity": 100_000,
    "replay.episodes": 16,
    "replay.critic_updates": 20,
    "replay.policy_updates": 2,
    "replay.tau": 0.1,
    "replay.value_target": "policy",
    "replay.samples": 1,
    "replay.expectile": 0.9,
    "replay.bootstrap_truncated": False,
    "replay.actions": "fresh",
    "preference.source": "trees",
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
"""By dotted key. Keys that are not in here stay null where the method says nothing: no dual clip, no clipping of advantages or
external ratios, no own value for right and wrong, lengths from model.max_length, the horizon's rounds from the environment;
advantage.level follows the estimator, branching.initial is half of a
group's episodes that the policy plays."""


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
        section, _, name = key.rpartition(".")
        where = values[section] if section else values
        if where[name] is None:
            where[name] = value
    if given.minibatches is None:
        # Minibatches are whole groups: a step of fewer tasks has room for no more.
        values["minibatches"] = min(values["minibatches"], given.tasks_per_step)
    if given.replay.policy_updates is None and values["replay"]["actions"] == "played":
        # The episodes were played once, by the policy as it was before the first batch.
        values["replay"]["policy_updates"] = 1
    if values["advantage"]["level"] is None:
        values["advantage"]["level"] = LEVELS.get(values["advantage"]["estimator"])
    if values["branching"]["kind"] not in ("none", "own") and values["branching"]["initial"] is None:
        values["branching"]["initial"] = max(1, (given.group_size - (values["external"]["per_group"] or 0)) // 2)
    _lengths(values, max_length)
    _stages(values)
    values["settings"] = _settings(given, method)
    resolved = Rl.model_validate(values)
    check(given, resolved, method)
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


def _stages(values: dict[str, Any]) -> None:
    horizon = values["horizon"]
    if horizon["kind"] == "scaling_inter" and horizon["steps_per_stage"] is None:
        horizon["steps_per_stage"] = math.ceil(values["steps"] / stage_count(horizon["rounds"]))


def _settings(given: Rl, method: Composition) -> Any:
    """The method's own keys, checked by its own model."""
    slug = method.card.slug
    if method.settings is None:
        if given.settings:
            raise ParamsError(
                f"rl.settings: algorithm {slug} has no keys of its own; got {sorted(given.settings)}; set it to {{}}"
            )
        return {}
    if isinstance(given.settings, method.settings):
        return given.settings
    try:
        return method.settings.model_validate(given.settings)
    except ValidationError as error:
        lines = [f"rl.settings.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise ParamsError(f"algorithm {slug}: {'; '.join(lines)}; known: {', '.join(method.settings.model_fields)}") from error
