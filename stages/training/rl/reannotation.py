"""Search trees of the current policy in the middle of rl, and the step-value model that is fitted to them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stages.agent.chat import Chat
from stages.agent.environment_pool import EnvironmentPool
from stages.agent.policy import Policy
from stages.algorithms.parts.reannotate import Reannotate
from stages.annotation.derived import value_head
from stages.annotation.fit_models import fit_value_model
from stages.annotation.forest import choose_tasks
from stages.annotation.search import Search
from stages.annotation.settings import Annotate
from stages.engine.attention import use_attention
from stages.engine.engine import Engine
from stages.records.task import Task
from stages.seeding import key64
from stages.training.rl.models import Models
from stages.values.step_value import StepValueModel, ValuePath

if TYPE_CHECKING:
    from stages.runtime.stage import StageContext


class Reannotation:
    """Grows trees with the policy as it is, and replaces `models.step_values` if there is one. `key` seeds all random draws."""

    def __init__(
        self,
        context: StageContext,
        settings: Reannotate,
        policy: Policy,
        models: Models,
        engine: Engine,
        chat: Chat,
        pool: EnvironmentPool,
        *key: object,
    ) -> None:
        self.context, self.every, self.policy, self.models = context, settings.every, policy, models
        self.engine, self.chat, self.pool, self.key = engine, chat, pool, key
        self.params = Annotate.model_validate(settings.annotate)
        self.refitted = False
        """Whether the step-value model is no longer the one that annotate saved."""

    def due(self, step: int) -> bool:
        """Whether step `step`, from 0, begins with new trees."""
        return step > 0 and step % self.every == 0

    def grow(
        self, tasks: Sequence[Task], success: Mapping[str, float], step: int
    ) -> tuple[list[dict[str, Any]], dict[str, float]]:
        """The node rows of new trees, by task, and the history's columns about them. The processes share the trees.

        success: task -> estimated success; tasks are chosen as annotate chooses them.
        """
        seed, processes = key64(*self.key, "reannotate", step), self.models.processes
        chosen = choose_tasks(tasks, success, self.params.tasks, seed)
        self.models.refresh_player()
        search = Search(self.engine, self.chat, self.pool, self.params, seed, self.context.params.model.max_length)
        trees = search.grow(chosen[processes.index :: processes.count])
        grown = processes.gather([(tree.rows(), tree.counters["environment_steps"]) for tree in trees])
        rows = [row for of_tree, _ in grown for row in of_tree]
        metrics = {"tree_steps": float(sum(steps for _, steps in grown))}
        if self.models.step_values is not None:
            metrics["value_explained_variance"] = self._refit(rows, seed)
        return rows, metrics

    def _refit(self, rows: list[dict[str, Any]], seed: int) -> float:
        """Fit the step-value model to the trees, in the first process; returns its explained variance on held-out tasks."""
        processes, found = self.models.processes, []
        if processes.index == 0:
            policy = replace(self.policy, model=self.models.player)
            episodes: list[ValuePath] = []  # those of the stage rollout are of the policy before rl
            model, _, report = fit_value_model(self.context, policy, rows, episodes, self.params, seed)
            found = [(model.state_dict(), report["calibration"]["explained_variance"])]
        ((weights, explained),) = processes.gather(found)
        self._replace(weights)
        return float(explained)

    def _replace(self, weights: Mapping[str, Any]) -> None:
        backbone = copy.deepcopy(self.models.player.base_model).float()
        use_attention(backbone, "sdpa")
        model = StepValueModel(backbone, value_head(self.params), self.params.value_model.hidden)
        model.load_state_dict(weights)
        self.models.step_values = model.to(self.models.processes.device).eval()
        self.refitted = True

    def state_dict(self) -> dict[str, Any]:
        values = self.models.step_values
        return {"step_values": values.state_dict() if self.refitted and values is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["step_values"] is not None:
            self._replace(state["step_values"])
