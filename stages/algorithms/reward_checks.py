"""What makes no sense about rewards. Light to import."""

from __future__ import annotations

from stages.algorithms.needs import learns_values
from stages.parameters.rl import Reward, Rl
from stages.validation import ParamsError
from stages.values.supports import check_support


def check_reward(rl: Rl) -> None:
    """Raise ParamsError for a resolved section whose rewards contradict one another, or go beyond what filling counts on."""
    _check_kind(rl.reward)
    _check_outcome(rl.reward)
    if rl.filling.kind == "value":
        _check_r_max(rl)


def _check_kind(reward: Reward) -> None:
    if reward.kind == "prs":
        if reward.density != "environment":
            raise ParamsError(
                f"rl.reward.kind: prs scores whole episodes, and rl.reward.density: {reward.density} would take the place of its "
                f"scores: set one of the two to environment"
            )
        names = [stage.name for stage in reward.prs or []]
        if len(set(names)) != len(names):
            raise ParamsError(
                f"rl.reward.prs names a stage twice: {names}; give each stage a name of its own (`term` is what it scores)"
            )
        if sum(stage.weight for stage in reward.prs or []) <= 0:
            raise ParamsError("rl.reward.prs: the weights of all stages are 0, and no reward would be left; set one above 0")
    if reward.kind == "hierarchical" and reward.density != "environment":
        raise ParamsError(
            f"rl.reward.kind: hierarchical scores whole episodes, and rl.reward.density: {reward.density} would put other "
            f"rewards in their place: set one of the two to environment"
        )


def _check_outcome(reward: Reward) -> None:
    """The grades of right and wrong answers, and the penalty on length."""
    if (reward.correct is None) != (reward.wrong is None):
        raise ParamsError("rl.reward.correct and wrong replace the environment's return together: set both, or neither")
    if reward.correct is not None and reward.wrong is not None:
        if reward.correct <= reward.wrong:
            raise ParamsError(f"rl.reward.correct ({reward.correct:g}) must be above wrong ({reward.wrong:g})")
        if reward.kind in ("prs", "hierarchical") or reward.density != "environment":
            raise ParamsError(
                f"rl.reward.correct and wrong grade the outcome alone, in place of what kind: {reward.kind} and density: "
                f"{reward.density} give; set both to null, or these two to environment"
            )
        cap = reward.tool_bonus_cap if reward.tool_bonus else None
        if cap is not None and not reward.wrong <= cap < reward.correct:
            raise ParamsError(
                f"rl.reward.tool_bonus_cap ({cap:g}) is the most that a failure gets with its bonus; it must lie from wrong "
                f"({reward.wrong:g}) to below correct ({reward.correct:g})"
            )
    if reward.overlong_max is not None and reward.overlong_cache is not None and reward.overlong_cache > reward.overlong_max:
        raise ParamsError(
            f"rl.reward.overlong_cache ({reward.overlong_cache}) is the last part of overlong_max ({reward.overlong_max}), over "
            f"which the penalty grows; set it to at most that"
        )


def own_rewards(reward: Reward) -> bool:
    """Whether rewards are the environment's own; penalties and bonuses added to them aside."""
    return reward.kind == reward.density == "environment" and reward.correct is None and reward.wrong is None


def shapes_returns(rl: Rl) -> bool:
    """Whether returns are other than the environment's own; per-token penalties and bonuses for tool calls aside."""
    return not own_rewards(rl.reward) or bool(rl.reward.overlong_penalty) or rl.credit.kind == "progress"


def check_support_of_shaped(rl: Rl) -> None:
    """Raise ParamsError where a resolved section's critic has no room for the returns that shaping gives."""
    if shapes_returns(rl):
        _check_support(rl, *reward_range(rl))


def check_returns(rl: Rl, low: float, high: float) -> None:
    """Raise ParamsError where a resolved section's critic has no room for a domain's own returns, which lie in [low, high]."""
    if not learns_values(rl) or shapes_returns(rl):
        return
    _check_support(rl, low, high)


def _check_support(rl: Rl, low: float, high: float) -> None:
    assert rl.critic.head is not None, "resolve the parameters first"
    try:
        check_support(rl.critic.head, low, high, "returns")
    except ValueError as error:
        raise ParamsError(f"rl.critic.{error}") from error


def largest_reward(reward: Reward) -> float | None:
    """The largest return that shaping gives, None where it is the environment's own."""
    if reward.kind == "prs":
        return sum(stage.weight for stage in reward.prs or [])
    return 1.0 + (reward.multi_tool_bonus or 0.0) if reward.kind == "hierarchical" else reward.correct


def check_progress(rl: Rl) -> None:
    """Raise ParamsError where rewards of steps would have no effect, or would make other switches ineffective."""
    if rl.credit.kind != "progress":
        return
    if rl.advantage.estimator == "group" and rl.advantage.level == "trajectory":
        raise ParamsError(
            "rl.credit.kind: progress spreads the return over turns, and rl.advantage.level: trajectory looks at the sum alone; "
            "set level to turn"
        )
    reward, ours = rl.reward, rl.credit.step_reward == "spa" and rl.credit.residual == "none"
    if ours and (reward.kind != "environment" or reward.density != "environment" or reward.correct is not None):
        raise ParamsError(
            "rl.credit.kind: progress with residual: none puts the estimator's contributions in the place of the return, and "
            "rl.reward would have no effect; set residual to last_step or spread, or rl.reward to the environment's"
        )
    if rl.credit.step_reward == "rloo_broadcast" and rl.group_size < 2:
        raise ParamsError(
            "rl.credit.step_reward: rloo_broadcast compares the episodes of a group, and rl.group_size is 1; set it to at least 2"
        )


def reward_range(rl: Rl) -> tuple[float, float]:
    """The smallest and the largest return that is sure to come up where the environment's is in [0, 1]: after shaping, and with
    one turn's grounding; per-token penalties and bonuses for tool calls aside."""
    reward = rl.reward
    low, high = 0.0, largest_reward(reward)
    if rl.credit.kind == "progress" and rl.credit.grounding_coef:
        if rl.credit.grounding == "penalty":
            low = -rl.credit.grounding_coef
        else:
            high = (1.0 if high is None else high) + rl.credit.grounding_coef
    if reward.kind == "hierarchical":
        low += min(0.0, reward.format_penalty or 0.0)
    if reward.wrong is not None:
        low += reward.wrong
    return low - (reward.overlong_penalty or 0.0), 1.0 if high is None else high


def _check_r_max(rl: Rl) -> None:
    """A task value (r_max - mean) * sigma would be below 0 for the tasks that are solved best."""
    largest, r_max = largest_reward(rl.reward), rl.filling.r_max or 1.0
    if largest is not None and largest > r_max + 1e-9:
        raise ParamsError(
            f"rl.filling.r_max ({r_max:g}) must be the largest attainable reward, and rl.reward gives up to {largest:g}; "
            f"set it to that"
        )
