"""Settings of the replay buffer: its content, its samples, and the updates of critic and policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stages.algorithms.parts.part import AppliesIf, AppliesTo, Part
from stages.runtime.validation import Count, ParamsError

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


def _plays(rl: Rl) -> bool:
    from stages.algorithms.registry import composition

    return composition(rl.algorithm).data != "offline_replay"


class Replay(Part):
    """Off-policy learning with advantage.estimator utterance: critic and policy are trained on samples of stored episodes."""

    applies = AppliesTo("advantage.estimator", "utterance")

    records: list[Literal["rollouts", "demonstrations", "games"]] = []
    """Recorded episodes of the training tasks in the buffer from the start: those of the stage rollout, demonstrations of expert
    and noisy expert, recorded games; those that a domain lacks are omitted."""
    capacity: Annotated[Count, AppliesIf(_plays, "an algorithm that plays episodes")] = 100_000
    """Maximum number of stored turns of played episodes; the oldest episodes are dropped."""
    episodes: Count = 16
    """Episodes sampled for each optimiser step, with replacement; all their turns are used."""
    critic_updates: Count = 20
    """Optimiser steps of the critic per step."""
    warmup_updates: Annotated[int, Field(ge=0)] = 0
    """Further optimiser steps of the critic in the first step, before the policy follows it; with `records`, mostly on recorded
    episodes."""
    policy_updates: Count = 2
    """Batches per step on which the policy is trained, after the critic. actions: played: the same batch each time, and the
    default is 1."""
    tau: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Polyak rate of the target network, updated after each update of the critic; 1: a copy."""
    value_target: Literal["policy", "expectile"] = "policy"
    """Target of V. policy: Q of actions newly sampled from the policy; expectile: Q of the recorded action by expectile
    regression (implicit Q-learning), so that no unrecorded action is evaluated."""
    samples: Annotated[Count, AppliesTo("value_target", "policy")] = 1
    """policy: actions sampled per turn."""
    expectile: Annotated[float, Field(gt=0.0, lt=1.0), AppliesTo("value_target", "expectile")] = 0.9
    """expectile: 0.5 gives the mean; towards 1, V approaches the Q of the best recorded action."""
    bootstrap_truncated: bool = False
    """Whether to bootstrap with V after the last turn of a truncated episode; False: truncation is an end."""
    actions: Literal["fresh", "played", "recorded"] = "fresh"
    """Actions on which the policy is trained. fresh: newly sampled after histories of sampled episodes; played: the step's own
    episodes; recorded: those of sampled episodes."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        if "policy_updates" not in given.replay.model_fields_set and values["replay"]["actions"] == "played":
            # These episodes were played by the policy before its first update of the step.
            values["replay"]["policy_updates"] = 1

    def check(self, rl: Rl, method: Composition) -> None:
        if method.data == "offline_replay":
            self._check_records(rl, method.card.slug)
        if rl.advantage.estimator == "utterance":
            self._check_turn_critic(rl)

    def _check_records(self, rl: Rl, slug: str) -> None:
        if rl.advantage.estimator != "utterance":
            raise ParamsError(
                f"rl.advantage.estimator: {rl.advantage.estimator} needs episodes that the policy plays, but algorithm {slug} "
                f"learns from an offline dataset; set it to null"
            )
        if not self.records:
            raise ParamsError(f"rl.replay.records is empty, and algorithm {slug} has no other data; list some")
        if self.actions == "played":
            raise ParamsError(f"rl.replay.actions is played, but algorithm {slug} plays no episodes; set it to recorded or fresh")

    def _check_turn_critic(self, rl: Rl) -> None:
        other = {
            "group_resampling.kind": (rl.group_resampling.kind, "none"),
            "branching.kind": (rl.branching.kind, "none"),
            "credit.kind": (rl.credit.kind, "outcome"),
            "external.per_group": (rl.external.per_group, 0),
            "reward.kl_coef": (rl.reward.kl_coef, 0.0),
        }
        for key, (value, none) in other.items():
            if value != none:
                raise ParamsError(
                    f"rl.{key}: {value} applies to returns and groups of one step's episodes, but rl.advantage.estimator: "
                    f"utterance learns values of turns from all steps' episodes; set it to {none} (for demonstrations, use "
                    f"rl.replay.records)"
                )
        if self.actions == "played" and self.policy_updates > 1 and rl.loss.kind == "policy_gradient":
            raise ParamsError(
                f"rl.replay.policy_updates is {self.policy_updates}, and with rl.replay.actions: played all these batches are "
                f"the same episodes, which are off-policy after the first update; rl.loss.kind: policy_gradient does not correct "
                f"for that: set policy_updates to 1, loss.kind to importance, ppo_clip, gspo or cispo, or actions to fresh"
            )
        if self.actions == "recorded" and rl.loss.kind != "own":
            raise ParamsError(
                f"rl.replay.actions: recorded trains the policy on actions of other policies, for which rl.loss.kind: "
                f"{rl.loss.kind} does not correct; set it to fresh, or use algorithm archer_offline, which weights them by "
                f"advantage"
            )
