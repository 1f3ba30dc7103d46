"""The value model that a search reads leaves with: fitted on the episodes of the stage rollout before any tree is grown. It says
the reward still to come; what was paid on the way to a leaf the tree knows and adds.

On the policy's own states (`evaluation.backbone: policy`) it is a head alone: the pass that the policy draws its next action
from gives its state, so that value and prior cost one pass. On an `own` backbone, a fine-tuned copy, it has an engine of its own,
whose sessions read what is new along a tree. Either way all histories that wait are read in one batch over all trees, and a value
does not depend on that batch: the engine's passes do not, and the head is applied to blocks of a fixed size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stages.annotation.tree import returns_to_go
from stages.annotation.units import value_head
from stages.engine.attention import use_attention
from stages.values.step_value import FitReport, StepValueModel, ValuePath, fit

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate
    from stages.engine.torch_engine import TorchEngine

BLOCK = 4
"""States that the head is applied to at once: matrix products of other sizes may sum in another order."""


def episode_paths(episodes: Sequence[Mapping[str, Any]], params: Annotate) -> list[ValuePath]:
    """One path per episode of the policy (rows of EPISODE_SCHEMA): every history before a turn, with the rewards that came from
    this turn on, discounted as the backup discounts.

    Branches repeat the turns that they took over from other episodes; those count once.
    """
    paths = []
    for row in episodes:
        turns = row["turns"][row.get("inherited") or 0 :]
        if not turns:
            continue
        boundaries = [turn["start"] - 1 for turn in turns]
        token_ids = list(row["token_ids"][: boundaries[-1] + 1])
        gamma = params.gamma if params.backup == "discounted_max" else 1.0
        following = returns_to_go([turn["reward"] for turn in turns], gamma)[:-1]
        paths.append(ValuePath(row["task_id"], token_ids, boundaries, following, [1.0] * len(boundaries)))
    return paths


class HeadEvaluator:
    """`stages.annotation.search.Reader`: a step-value model's head over the states that `engine` computes."""

    def __init__(self, engine: TorchEngine, model: StepValueModel) -> None:
        self.engine, self.model = engine, model

    def values(self, sessions: Sequence[int]) -> list[float]:
        states = self.engine.read(sessions)
        return [value for start in range(0, len(states), BLOCK) for value in self._block(states[start : start + BLOCK])]

    @torch.inference_mode()
    def _block(self, states: Sequence[np.ndarray]) -> list[float]:
        padded = np.stack([*states, *[states[0]] * (BLOCK - len(states))])
        logits = self.model.output(torch.from_numpy(padded).to(self.model.output.weight.device))
        return self.model.head.decode(logits.float()).tolist()[: len(states)]


def leaf_model(policy_model: Any, params: Annotate, weights: Mapping[str, Any] | None = None) -> StepValueModel:
    """An unfitted step-value model as `evaluation.backbone` says, or with the stored `weights` of a fitted one (`stored`)."""
    if params.evaluation.backbone == "policy":
        model = StepValueModel(policy_model.base_model, value_head(params))
    else:
        backbone = copy.deepcopy(policy_model.base_model).float()
        use_attention(backbone, "sdpa")
        model = StepValueModel(backbone, value_head(params))
    model.output.to(policy_model.device)
    if weights is not None:
        (model.output if params.evaluation.backbone == "policy" else model).load_state_dict(dict(weights))
    return model


def stored(model: StepValueModel, params: Annotate) -> dict[str, Any]:
    """What of a fitted model has to be kept: the head, and a backbone of its own."""
    part = model.output if params.evaluation.backbone == "policy" else model
    return {name: value.detach().cpu() for name, value in part.state_dict().items()}


def fit_leaf_model(model: StepValueModel, paths: Sequence[ValuePath], params: Annotate, seed: int, micro: int) -> FitReport:
    """Fit in place, as `annotate.value_model` says. On the policy's own states the backbone stays as it is.

    Raises ValueError without paths, or for returns that the head cannot say.
    """
    if not paths:
        raise ValueError("the stage rollout left no episodes to fit the leaves' value model on; raise rollout.tasks")
    settings, head = params.value_model, value_head(params)
    returns = [value for path in paths for value in path.returns]
    if head.loss != "mse" and not head.v_min <= min(returns) <= max(returns) <= head.v_max:
        raise ValueError(
            f"annotate.value_model.head covers {head.v_min:g} to {head.v_max:g}, and the episodes of rollout "
            f"have returns from {min(returns):g} to {max(returns):g}: widen v_min and v_max, or set loss to mse"
        )
    if params.evaluation.backbone == "own":
        return fit(model, paths, settings, seed, micro)
    settings = settings.model_copy(update={"learning_rate": params.evaluation.head_learning_rate})
    wanted = [parameter.requires_grad for parameter in model.backbone.parameters()]
    model.backbone.requires_grad_(False)
    try:
        return fit(model, paths, settings, seed, micro)
    finally:
        for parameter, trained in zip(model.backbone.parameters(), wanted, strict=True):
            parameter.requires_grad_(trained)
