"""The value model that evaluates leaves: fitted on the rollout stage's episodes before any tree is grown. It predicts the return
from a history on; the tree adds the rewards before it.

With `evaluation.backbone: policy` it is only a head on the policy's hidden states, so value and prior share one forward pass.
With `own` it is a fine-tuned copy with its own engine, whose sessions are extended along a tree. Either way the pending histories
of all trees form one batch. Values do not depend on the batch: the engine's passes do not, and the head is applied to blocks of a
fixed size.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from stages.annotation.derived import value_head
from stages.annotation.tree import returns_to_go
from stages.engine.attention import use_attention
from stages.values.step_value import StepValueModel, ValuePath, fit

if TYPE_CHECKING:
    from stages.annotation.settings import Annotate
    from stages.engine.local_engine import LocalEngine

BLOCK = 4
"""Batch size of the head; matrix products of other sizes may sum in a different order."""


def episode_paths(episodes: Sequence[Mapping[str, Any]], gamma: float) -> list[ValuePath]:
    """One path per episode (rows of EPISODE_SCHEMA): every history before a turn with its return, discounted by `gamma` a turn.

    Turns that a branch inherits from another episode are left out.
    """
    paths = []
    for row in episodes:
        turns = row["turns"][row.get("inherited") or 0 :]
        if not turns:
            continue
        boundaries = [turn["start"] - 1 for turn in turns]
        token_ids = list(row["token_ids"][: boundaries[-1] + 1])
        following = returns_to_go([turn["reward"] for turn in turns], gamma)[:-1]
        paths.append(ValuePath(row["task_id"], token_ids, boundaries, following, [1.0] * len(boundaries)))
    return paths


class HeadEvaluator:
    """A `stages.annotation.search.Reader`: a step-value model's head on the hidden states of `engine`."""

    def __init__(self, engine: LocalEngine, model: StepValueModel) -> None:
        self.engine, self.model = engine, model

    def values(self, sessions: Sequence[int]) -> list[float]:
        states = self.engine.read(sessions)
        return [value for start in range(0, len(states), BLOCK) for value in self._block(states[start : start + BLOCK])]

    @torch.inference_mode()
    def _block(self, states: Sequence[np.ndarray]) -> list[float]:
        padded = np.stack([*states, *[states[0]] * (BLOCK - len(states))])
        logits = self.model.output(torch.from_numpy(padded).to(next(self.model.output.parameters()).device))
        return self.model.head.decode(logits.float()).tolist()[: len(states)]


def leaf_model(policy_model: Any, params: Annotate, weights: Mapping[str, Any] | None = None) -> StepValueModel:
    """The step-value model for `evaluation.backbone`: unfitted, or with the `fitted_weights` of a fitted one."""
    backbone = policy_model.base_model
    if params.evaluation.backbone == "own":
        backbone = copy.deepcopy(backbone).float()
        use_attention(backbone, "sdpa")
    model = StepValueModel(backbone, value_head(params), params.value_model.hidden)
    model.output.to(policy_model.device)
    if weights is not None:
        _fitted_part(model, params).load_state_dict(dict(weights))
    return model


def _fitted_part(model: StepValueModel, params: Annotate) -> nn.Module:
    return model.output if params.evaluation.backbone == "policy" else model


def fitted_weights(model: StepValueModel, params: Annotate) -> dict[str, Any]:
    """The weights that `fit_leaf_model` changes: the head's, and those of a backbone of its own."""
    return {name: value.detach().cpu() for name, value in _fitted_part(model, params).state_dict().items()}


def fit_leaf_model(model: StepValueModel, paths: Sequence[ValuePath], params: Annotate, seed: int, micro: int) -> None:
    """Fit in place with the settings of `annotate.value_model`; the policy's own backbone is frozen in any case.

    Raises ValueError without paths, or for returns outside the head's support.
    """
    if not paths:
        raise ValueError("the rollout stage left no episodes to fit the leaf value model on; raise rollout.tasks")
    settings, head = params.value_model, value_head(params)
    returns = [value for path in paths for value in path.returns]
    if head.loss != "mse" and not head.v_min <= min(returns) <= max(returns) <= head.v_max:
        raise ValueError(
            f"annotate.value_model.head covers {head.v_min:g} to {head.v_max:g}, but the rollout stage's episodes "
            f"have returns from {min(returns):g} to {max(returns):g}: widen v_min and v_max, or set loss to mse"
        )
    if params.evaluation.backbone == "policy":
        settings = settings.model_copy(update={"trains": "head"})
    fit(model, paths, settings, seed, micro)
