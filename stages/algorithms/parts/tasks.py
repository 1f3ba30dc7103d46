"""Where the tasks of rl come from; stages/algorithms/task_source.py is the contract. Light to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from stages.algorithms.parts.part import Part
from stages.algorithms.parts.reward import SCORED
from stages.algorithms.task_source import source_class, source_settings
from stages.runtime.validation import ParamsError

if TYPE_CHECKING:
    from stages.algorithms.card import Composition
    from stages.algorithms.settings import Rl


class Tasks(Part):
    """The source of training tasks."""

    switch = "source"
    data = ("episodes",)

    source: Annotated[str, Field(min_length=1)] = "static"
    """A module of stages/algorithms/sources, or an entry point of the group bellwether.task_sources. static: the tasks that
    curate wrote, drawn by rl.curriculum."""
    settings: Any = {}
    """The source's own keys, where it has any: a mapping, or (resolved) the source's own section."""

    @classmethod
    def derive(cls, given: Rl, values: dict[str, Any], max_length: int | None) -> None:
        """Check the source's settings. Raises ParamsError."""
        tasks = values["tasks"]
        tasks["settings"] = source_settings(tasks["source"], tasks["settings"])

    def check(self, rl: Rl, method: Composition) -> None:
        source = source_class(self.source)
        if unknown := sorted(rl.roles.keys() - set(source.roles)):
            raise ParamsError(
                f"rl.roles.{unknown[0]} has no effect: the roles of rl.tasks.source {self.source} are "
                f"{', '.join(source.roles) or 'none'}; remove it"
            )
        if source.roles and rl.advantage.estimator in ("gae", "team", "utterance"):
            raise ParamsError(
                f"rl.advantage.estimator {rl.advantage.estimator} has one critic, and rl.tasks.source {self.source} trains "
                f"{', '.join(source.roles)}, too: set it to group"
            )
        if source.roles and rl.reward.kind in SCORED:
            raise ParamsError(
                f"rl.reward.kind {rl.reward.kind} scores answers, not what {', '.join(source.roles)} of rl.tasks.source "
                f"{self.source} write: set it to environment"
            )
        if source.recorded:
            self._check_recorded(rl, method)
        if source.curated:
            return
        needs = {
            "external.per_group": rl.external.per_group > 0,
            "imitation.ratio": rl.imitation.ratio > 0,
            "reannotate.every": rl.reannotate.every > 0,
            "advantage.estimator: utterance": rl.advantage.estimator == "utterance",
            "selection.kind: model_aware": rl.selection.kind != "all",
            "curriculum.kind: value": rl.curriculum.kind == "value",
            f"algorithm: {method.card.slug}, whose teacher reads solutions,": rl.credit.kind == "own"
            and method.teacher is not None
            and method.teacher(rl),
        }
        if used := [key for key, holds in needs.items() if holds]:
            raise ParamsError(
                f"rl.{used[0]} is about tasks that curate wrote, and rl.tasks.source {self.source} makes its own: switch it off, "
                f"or set source to static"
            )

    def _check_recorded(self, rl: Rl, method: Composition) -> None:
        """Raise ParamsError for what needs episodes to be played, or log-probabilities other than the recorded ones."""
        rescored = rl.loss.kind == "own" and method.rescored is not None and method.rescored(rl)
        needs = {
            "advantage.mean: greedy": rl.advantage.mean == "greedy",
            "advantage.estimator: team": rl.advantage.estimator == "team",
            f"branching.kind: {rl.branching.kind}": rl.branching.kind != "none",
            f"horizon.kind: {rl.horizon.kind}": rl.horizon.kind != "environment",
            "judge": rl.reward.kind == "judge" and rl.judge.anchored_by_greedy,
        }
        if used := [key for key, holds in needs.items() if holds]:
            raise ParamsError(
                f"rl.{used[0]} plays episodes in its own way, and those of rl.tasks.source {self.source} were played already: "
                f"switch it off, or set source to static"
            )
        if rl.loss.kind == "policy_gradient" or rescored:
            raise ParamsError(
                f"rl.loss.kind {rl.loss.kind} of {method.card.slug} has no ratio to recorded log-probabilities, and the policy "
                f"moves away from those: choose a loss with one, such as ppo_clip, for rl.tasks.source {self.source}"
            )
        if rl.warm_start:
            raise ParamsError(
                f"rl.warm_start changes the policy before rl.tasks.source {self.source} trains it on its answers: set it to {{}}"
            )
