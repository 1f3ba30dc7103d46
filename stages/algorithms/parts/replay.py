"""The replay buffer: what it holds and draws, and how often critic and policy learn."""

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
    """Learning off-policy, with advantage.estimator utterance: whole episodes are kept, and critic and policy learn from draws
    of them."""

    applies = AppliesTo("advantage.estimator", "utterance")

    records: list[Literal["rollouts", "demonstrations", "games"]] = []
    """Recorded episodes of the training tasks that can be drawn from the start: those of the stage rollout, demonstrations of
    expert and noisy expert, game records. What a domain does not have is left out."""
    capacity: Annotated[Count, AppliesIf(_plays, "an algorithm that plays episodes to keep")] = 100_000
    """Turns of played episodes that are kept; the oldest episodes make room."""
    episodes: Count = 16
    """Drawn for each optimiser step, with replacement; it learns from all their turns."""
    critic_updates: Count = 20
    """Optimiser steps of the critic per step."""
    policy_updates: Count = 2
    """Batches per step that the policy learns from, after the critic. actions: played: the same one each time; the default is
    then 1."""
    tau: Annotated[float, Field(gt=0.0, le=1.0)] = 0.1
    """Polyak rate of the target network, which follows each update of the critic; 1: a copy."""
    value_target: Literal["policy", "expectile"] = "policy"
    """What V learns. policy: Q of actions that the policy draws anew; expectile: of the recorded action, by expectile regression
    (implicit Q-learning), so that no action is valued that the records lack."""
    samples: Annotated[Count, AppliesTo("value_target", "policy")] = 1
    """policy: actions drawn per turn."""
    expectile: Annotated[float, Field(gt=0.0, lt=1.0), AppliesTo("value_target", "expectile")] = 0.9
    """expectile: 0.5 is the mean; towards 1 V becomes the best recorded action's Q."""
    bootstrap_truncated: bool = False
    """Where a limit cut the episode, the last turn's target goes on with V; False: the limit is the end."""
    actions: Literal["fresh", "played", "recorded"] = "fresh"
    """What the policy learns from. fresh: actions that it draws anew after histories of drawn episodes; played: the step's own
    episodes; recorded: the actions of drawn episodes."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        if "policy_updates" not in given.replay.model_fields_set and values["replay"]["actions"] == "played":
            # The episodes were played once, by the policy as it was before the first batch.
            values["replay"]["policy_updates"] = 1

    def check(self, rl: Rl, method: Composition) -> None:
        if method.data == "offline_replay":
            self._check_records(rl, method.card.slug)
        if rl.advantage.estimator == "utterance":
            self._check_utterances(rl)

    def _check_records(self, rl: Rl, slug: str) -> None:
        if rl.advantage.estimator != "utterance":
            raise ParamsError(
                f"rl.advantage.estimator: {rl.advantage.estimator} needs episodes that the policy plays, but algorithm {slug} "
                f"learns from an offline dataset; set it to null"
            )
        if not self.records:
            raise ParamsError(f"rl.replay.records is empty, and algorithm {slug} has nothing else to learn from; name some")
        if self.actions == "played":
            raise ParamsError(f"rl.replay.actions: played, and algorithm {slug} plays none; set it to recorded or fresh")

    def _check_utterances(self, rl: Rl) -> None:
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
                    f"rl.{key}: {value} acts on returns and groups of one step's episodes, and rl.advantage.estimator: utterance "
                    f"learns values of turns from all steps' episodes; set it to {none} (demonstrations: rl.replay.records)"
                )
        if self.actions == "played" and self.policy_updates > 1 and rl.loss.kind == "policy_gradient":
            raise ParamsError(
                f"rl.replay.policy_updates is {self.policy_updates}, and with rl.replay.actions: played all these batches are "
                f"the same episodes, which the policy has moved away from after the first; rl.loss.kind: policy_gradient has no "
                f"correction for that: set policy_updates to 1, loss.kind to importance, ppo_clip, gspo or cispo, or actions to "
                f"fresh"
            )
        if self.actions == "recorded" and rl.loss.kind != "own":
            raise ParamsError(
                f"rl.replay.actions: recorded lets the policy learn from actions of other policies, which rl.loss.kind: "
                f"{rl.loss.kind} does not correct for; set it to fresh, or take algorithm archer_offline, which weighs them by "
                f"advantage"
            )
