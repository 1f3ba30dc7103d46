"""The critic's settings, and the check that its support covers the returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.algorithms.parts.reward import largest_reward
from stages.algorithms.parts.step_values import not_a_return
from stages.runtime.validation import Count, NonNegative, ParamsError, Positive
from stages.values.settings import HeadParams, ReturnDistribution
from stages.values.supports import check_support

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


def learns_values(rl: Rl) -> bool:
    """Whether a resolved section uses a critic, of tokens or of turns."""
    return rl.advantage.estimator in ("gae", "team", "utterance")


def needs_critic(rl: Rl) -> bool:
    """Whether a resolved section uses a critic of tokens, which is trained on the policy's batches."""
    return rl.advantage.estimator in ("gae", "team") or (rl.advantage.estimator == "utterance" and rl.advantage.token_baseline)


WITH_CRITIC = AppliesIf(learns_values, "a method with a critic (advantage.estimator: gae, team or utterance)")
WITH_TOKEN_CRITIC = AppliesIf(needs_critic, "a method with a critic of tokens (advantage.estimator: gae or team)")
SQUARED = AppliesIf(lambda rl: rl.critic.distribution is None and rl.critic.head.loss == "mse", "critic.head.loss: mse")


class Critic(Part):
    """The critic of advantage.estimator gae, team or utterance."""

    learning_rate: Annotated[Positive, WITH_CRITIC] = 0.001
    """Learning rate of AdamW."""
    coef: Annotated[NonNegative, WITH_TOKEN_CRITIC] = 0.5
    """gae, team: weight of the critic's loss."""
    warmup_steps: Annotated[int, Field(ge=0), WITH_CRITIC] = 2
    """Number of first steps in which only the critic is trained."""
    head: Annotated[HeadParams, WITH_CRITIC, AppliesTo("distribution", None)] = HeadParams()
    distribution: Annotated[ReturnDistribution | None, WITH_CRITIC] = None
    """Critics of the mean and the spread of the return, with the loss of DSAC-T (arXiv 2310.05858), in place of `head`; {}: with
    the paper's settings."""
    init: Annotated[Literal["policy", "value_model", "judge_model"], WITH_CRITIC] = "policy"
    """Initial weights: the policy's backbone with an untrained head; annotate's step-value model, head included; or its reward
    model (judge.kind local), whose scalar, times judge.scale, is the first value."""
    trunk: Annotated[Literal["own", "frozen"], WITH_TOKEN_CRITIC] = "own"
    """gae, team: own: the backbone is trained; frozen: it stays the start policy's, which costs no memory."""
    hidden: Annotated[list[Count], WITH_TOKEN_CRITIC] = []
    """gae, team: widths of hidden layers (ReLU, without bias) between the backbone and the output."""
    huber_delta: Annotated[Positive | None, WITH_TOKEN_CRITIC, SQUARED] = None
    """gae, team: the loss is e^2 / 2 for errors up to this, linear beyond it on both sides; null: e^2."""
    value_clip: Annotated[NonNegative, WITH_TOKEN_CRITIC] = 0.0
    """gae, team, squared error (or huber_delta): the loss is the larger one of the value and of the value kept within this
    distance of that before the update, max((v - R)^2, (clip(v, v_old +- value_clip) - R)^2). 0: not clipped."""

    def check(self, rl: Rl, method: Composition) -> None:
        if not learns_values(rl):
            return
        if self.warmup_steps >= rl.steps:
            raise ParamsError(
                f"rl.critic.warmup_steps ({self.warmup_steps}) leaves none of rl.steps ({rl.steps}) for the policy; set it below "
                f"rl.steps"
            )
        if self.init == "value_model" and (not rl.reward.environments_own or rl.credit.kind == "progress"):
            raise ParamsError(
                "rl.critic.init: value_model initialises the critic with the environment's expected reward-to-go, but rl.reward "
                "or rl.credit replaces these rewards; set init to policy, or rl.reward and rl.credit to the environment's"
            )
        if self.init != "policy" and (self.trunk == "frozen" or self.hidden):
            raise ParamsError(
                f"rl.critic.init: {self.init} starts from a model with a backbone and an output layer of its own: set init to "
                f"policy, or trunk to own and hidden to []"
            )
        if self.head.loss != "mse" or self.distribution is not None:
            for key, value, off in (("value_clip", self.value_clip, "0"), ("huber_delta", self.huber_delta, "null")):
                if value:
                    raise ParamsError(
                        f"rl.critic.{key} is of the squared error; set rl.critic.head.loss to mse and distribution to null, or "
                        f"{key} to {off}"
                    )
        if self.init == "judge_model":
            self._check_reward_model(rl)
        if self.distribution is not None:
            self._check_distribution(rl, self.distribution)
        if shapes_returns(rl):
            _check_support(rl, *reward_range(rl))

    def _check_reward_model(self, rl: Rl) -> None:
        given = rl.judge
        if rl.reward.kind != "judge" or given.kind != "local" or not given.raw or given.local.path:
            raise ParamsError(
                "rl.critic.init: judge_model starts from the reward model that annotate fits and rl's judge uses; set "
                "rl.reward.kind to judge and rl.judge to {kind: local, scheme: pointwise, raw: true} without a local.path, or "
                "init to policy"
            )
        if self.head.loss != "mse" or self.distribution is not None or rl.advantage.estimator != "gae":
            raise ParamsError(
                "rl.critic.init: judge_model starts from a reward model's scalar; set rl.critic.head.loss to mse, distribution "
                "to null and rl.advantage.estimator to gae, or init to policy"
            )

    def _check_distribution(self, rl: Rl, distribution: ReturnDistribution) -> None:
        if self.init == "value_model":
            raise ParamsError(
                "rl.critic.init: value_model starts from a model with a scalar head, and rl.critic.distribution learns a spread, "
                "too; set init to policy, or distribution to null"
            )
        if rl.advantage.estimator == "utterance":
            if rl.replay.value_target == "expectile":
                raise ParamsError(
                    "rl.replay.value_target: expectile weights the errors of values, so that their spread would not be that of "
                    "returns; set it to policy, or rl.critic.distribution to null"
                )
            return
        for name in sorted({"twins", "expected_target"} & distribution.model_fields_set):
            raise ParamsError(
                f"rl.critic.distribution.{name} has no effect with advantage.estimator: {rl.advantage.estimator}, whose targets "
                f"are returns, not values; remove it, or use algorithm archer"
            )

    def contradictions(self, rl: Rl, method: Composition, section: Callable[[str], Any]) -> Iterator[str]:
        if self.init != "policy" and section("model").lora.rank:
            yield (
                f"rl.critic.init: {self.init} has weights of its own, and with model.lora.rank {section('model').lora.rank} the "
                f"critic shares the policy's: set init to policy, or rank to 0"
            )
        if self.init != "value_model":
            return
        annotate = section("annotate")
        yield from not_a_return(annotate, "critic.init: value_model", "init to policy")
        if annotate.value_model.hidden:
            yield (
                f"rl.critic.init: value_model starts from a linear head, and annotate.value_model.hidden is "
                f"{annotate.value_model.hidden}: set it to 0, or init to policy"
            )
        if self.head != annotate.fitted_head:
            yield (
                f"rl.critic.init: value_model starts from the model that annotate fits with head "
                f"{annotate.fitted_head.model_dump()}, and rl.critic.head is {self.head.model_dump()}; make them equal"
            )


def shapes_returns(rl: Rl) -> bool:
    """Whether returns differ from the environment's own, ignoring per-token penalties and bonuses for tool calls."""
    return not rl.reward.environments_own or rl.reward.overlong_penalty > 0 or rl.credit.kind == "progress"


def check_returns(rl: Rl, low: float, high: float) -> None:
    """Raise ParamsError if the critic's support does not cover a domain's own returns, which are in [low, high], or if the
    searches of rl.reannotate have other ones."""
    rl.reannotate.check_returns(low, high)
    if learns_values(rl) and not shapes_returns(rl):
        _check_support(rl, low, high)


def _check_support(rl: Rl, low: float, high: float) -> None:
    if rl.critic.distribution is not None:
        return
    try:
        check_support(rl.critic.head, low, high, "returns")
    except ValueError as error:
        raise ParamsError(f"rl.critic.{error}") from error


def reward_range(rl: Rl) -> tuple[float, float]:
    """The smallest and the largest return that are certain to occur if the environment's are in [0, 1]: after shaping and one
    turn's grounding, ignoring per-token penalties and bonuses for tool calls."""
    reward = rl.reward
    low, high = 0.0, largest_reward(reward)
    if rl.credit.kind == "progress" and rl.credit.grounding_coef:
        if rl.credit.grounding == "penalty":
            low = -rl.credit.grounding_coef
        else:
            high = (1.0 if high is None else high) + rl.credit.grounding_coef
    if reward.kind == "hierarchical":
        low += min(0.0, reward.format_penalty)
    if reward.wrong is not None:
        low += reward.wrong
    return low - reward.overlong_penalty, 1.0 if high is None else high
