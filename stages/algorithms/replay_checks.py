"""What makes no sense about learning from replayed and from recorded episodes. Light to import."""

from __future__ import annotations

from stages.algorithms.card import Composition
from stages.algorithms.needs import needs_utterances
from stages.parameters.rl import Rl
from stages.validation import ParamsError

UNPLAYED = ("branching", "filling", "external", "horizon")
"""Sections about how episodes are played."""


def check_replay(given: Rl, rl: Rl, method: Composition) -> None:
    """Raise ParamsError for what would be ignored, or would not teach what it says; `rl` is `given` with its nulls filled."""
    if method.data == "records":
        _check_records(given, rl, method)
    if needs_utterances(rl):
        _check_utterances(rl)


def _check_records(given: Rl, rl: Rl, method: Composition) -> None:
    slug = method.card.slug
    for section in UNPLAYED:
        for name, value in getattr(given, section):
            if value is not None:
                raise ParamsError(
                    f"rl.{section}.{name} has no effect: algorithm {slug} learns from recorded episodes and plays none; set "
                    f"it to null"
                )
    if given.replay.capacity is not None:
        raise ParamsError(f"rl.replay.capacity has no effect: algorithm {slug} plays no episodes to keep; set it to null")
    if not needs_utterances(rl):
        raise ParamsError(
            f"rl.advantage.estimator: {rl.advantage.estimator} judges episodes that the policy played, and algorithm {slug} "
            f"learns from recorded ones; set it to null"
        )
    if not rl.replay.records:
        raise ParamsError(f"rl.replay.records is empty, and algorithm {slug} has nothing else to learn from; name some")
    if rl.replay.actions == "played":
        raise ParamsError(f"rl.replay.actions: played, and algorithm {slug} plays none; set it to recorded or fresh")


def _check_utterances(rl: Rl) -> None:
    replay = rl.replay
    other = {
        "filling.kind": (rl.filling.kind, "none"),
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
    if replay.actions == "played" and (replay.policy_updates or 1) > 1 and rl.loss.kind == "policy_gradient":
        raise ParamsError(
            f"rl.replay.policy_updates is {replay.policy_updates}, and with rl.replay.actions: played all these batches are the "
            f"same episodes, which the policy has moved away from after the first; rl.loss.kind: policy_gradient has no "
            f"correction for that: set policy_updates to 1, loss.kind to importance, ppo_clip, gspo or cispo, or actions to fresh"
        )
    if replay.actions == "recorded" and rl.loss.kind != "own":
        raise ParamsError(
            f"rl.replay.actions: recorded lets the policy learn from actions of other policies, which rl.loss.kind: "
            f"{rl.loss.kind} does not correct for; set it to fresh, or take algorithm archer_offline, which weighs them by "
            f"advantage"
        )
