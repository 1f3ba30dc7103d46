"""What section `rl` reads of the stages annotate and rollout, which can be off. Light to import."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stages.algorithms.card import Composition
from stages.algorithms.parts.critic import learns_values
from stages.algorithms.parts.guidance import plays_guided
from stages.algorithms.settings import Rl

FROM_TREES = ("trees", "all")
"""Values of rl.preference.source with pairs of annotate's trees."""


@dataclass(frozen=True)
class Use:
    """One use of annotate's output. `key`: the setting of section rl that makes it, with its value."""

    what: str
    key: str
    of_trees: bool = True
    """Whether it is made from search trees, and not from the stage rollout's episodes alone."""


def uses_of(method: Composition, rl: Rl, first: tuple[Composition, Rl] | None = None) -> list[Use]:
    """The uses that a resolved section makes, and `first`, its warm start's; [] for none."""
    return [*_learnt(method, rl, ""), *(_learnt(*first, "warm_start.") if first else ()), *_credited(method, rl)]


def _learnt(method: Composition, rl: Rl, place: str) -> Iterator[Use]:
    """What it learns from. place: of the section in `rl`."""
    algorithm = f"{place}algorithm: {method.card.slug}"
    if method.data == "pairs" and rl.preference.source in FROM_TREES:
        yield Use("preference pairs for RL", algorithm)
    if method.data == "paths":
        yield Use("correct paths for RL", algorithm)
    if plays_guided(rl) and rl.guidance.source == "mcts":
        yield Use("hints for guided attempts", f"{place}guidance.source: mcts")
    taught = rl.credit.kind == "own" and method.teacher is not None and method.teacher(rl)
    if taught and getattr(rl.settings, "source", None) == "trees":
        yield Use("solutions for the teacher", f"{place}settings.source: trees")


def _credited(method: Composition, rl: Rl) -> Iterator[Use]:
    """Where it reads annotate's models."""
    if rl.credit.kind == "annotated":
        yield Use("step credit from the step-value model", "credit.kind: annotated")
    if rl.credit.kind == "progress" and rl.credit.step_reward == "spa":
        yield Use("step rewards from the progress estimator", "credit.kind: progress", of_trees=False)
    if learns_values(rl) and rl.critic.init == "value_model":
        yield Use("critic initialised from the step-value model", "critic.init: value_model")
    if learns_values(rl) and rl.critic.init == "judge_model":
        yield Use("critic initialised from the judge model", "critic.init: judge_model", of_trees=False)
    if rl.reward.kind == "judge" and rl.judge.kind == "local" and not rl.judge.local.path:
        yield Use("rewards from the judge model", "judge.kind: local", of_trees=False)
    if rl.curriculum.kind == "value" and method.data == "episodes":
        yield Use("task curriculum from the step-value model", "curriculum.kind: value")


def without_trees(method: Composition, rl: Rl, annotate: Any) -> Iterator[str]:
    """Why the resolved section, its warm start aside, can't do without trees, where section `annotate` grows none."""
    if annotate.tasks:
        return
    for use in uses_of(method, rl):
        if use.of_trees:
            yield f"rl.{use.key} reads annotate's trees, and annotate.tasks is 0: set tasks above 0, or change {use.key}"
    if rl.add_tree_steps:
        yield (
            "rl.add_tree_steps adds the environment steps of annotate's trees, and annotate.tasks is 0: set tasks above 0, or "
            "add_tree_steps to false"
        )


def without_rollouts(method: Composition, rl: Rl, rollout: Any, annotate: Any) -> Iterator[str]:
    """Why the resolved section, its warm start aside, or section `annotate` can't do without the SFT policy's episodes, where
    section `rollout` plays none."""
    if rollout.tasks:
        return
    slug = method.card.slug
    judged = annotate.judge_model.kind != "none" and annotate.judge_model.labels != "trees"
    readers = {
        f"rl.algorithm: {slug}": method.data in ("attempts", "offline"),
        f"rl.preference.source: guided (of rl.algorithm: {slug})": method.data == "pairs" and rl.preference.source == "guided",
        f"rl.replay.records: {rl.replay.records} (of rl.algorithm: {slug})": "rollouts" in rl.replay.records,
        "rl.selection.kind: model_aware": rl.selection.kind == "model_aware",
        "rl.verifier.fit_on: rollouts": rl.reward.kind == "verifier" and rl.verifier.fit_on == "rollouts",
        f"annotate.progress.kind: {annotate.progress.kind}": annotate.progress.kind != "none",
        f"annotate.judge_model.labels: {annotate.judge_model.labels}": judged,
        f"annotate.evaluation.kind: {annotate.evaluation.kind}": annotate.tasks > 0 and annotate.evaluation.kind != "rollout",
        "annotate.evaluation.model_rollouts": annotate.tasks > 0 and annotate.evaluation.model_rollouts is not None,
    }
    for reader in (reader for reader, reads in readers.items() if reads):
        key = reader.partition(":")[0]
        yield f"{reader} learns from rollout's episodes, and rollout.tasks is 0: set it above 0, such as 96, or change {key}"
