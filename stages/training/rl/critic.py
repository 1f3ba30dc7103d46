"""PPO's critic: a copy of the policy's backbone with a scalar head (stages/values/heads), or annotate's step-value model.

Under LoRA, the copy shares the policy's frozen weights and has its own adapters. With `trunk: frozen` the backbone is the frozen
reference's, and only what comes after it is trained (MARFT, arXiv 2504.16129).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stages.agent.logprobs import States, predicting_states
from stages.seeding import seed_torch
from stages.training.common.adapters import twin
from stages.values.gaussian import GaussianHead
from stages.values.heads import MseHead, make_head
from stages.values.settings import HeadParams, ReturnDistribution
from stages.values.step_value import StepValueModel, check_same_head


class Critic(nn.Module):
    """V of the state before each token, read from the hidden state of the token before it.

    The output layer starts at zero, so every state starts with the head's prior value. `start`: a step-value model to initialise
    backbone and output layer from. Raises ValueError if its head differs. `params`: of a scalar head, or of the Gaussian one of
    DSAC-T, whose targets are samples of the return: with advantage.lam below 1, of the lambda-return. hidden: widths of ReLU
    layers before the output layer, whose random weights `key` seeds. frozen: the backbone is `policy`'s own, and not trained.
    """

    def __init__(
        self,
        policy: Any,
        params: HeadParams | ReturnDistribution,
        states: States = predicting_states,
        start: StepValueModel | None = None,
        *key: object,
        hidden: Sequence[int] = (),
        frozen: bool = False,
    ) -> None:
        super().__init__()
        self._states, self._frozen = states, frozen
        if start is not None:
            self.backbone = start.backbone
        else:
            self.backbone = policy.base_model if frozen else twin(policy.base_model)
        self.head = make_head(params)
        widths = [policy.config.hidden_size, *hidden]
        if hidden:
            seed_torch(*key, "critic")
        pairs = pairwise(widths)
        self.hidden = nn.Sequential(*(part for low, high in pairs for part in (nn.Linear(low, high, bias=False), nn.ReLU())))
        self.output = nn.Linear(widths[-1], self.head.outputs)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        if start is not None:
            assert isinstance(params, HeadParams), "refused when params.yaml is checked"
            check_same_head(start, params)
            self.output.load_state_dict(start.output.state_dict())

    def logits(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Head logits [N, outputs] before each masked token of token_ids, mask [B, T]; N masked tokens in row order."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._frozen):
            states = self._states(self.backbone, token_ids, mask)
        return self.output(self.hidden(states.to(self.output.weight.dtype)))

    @torch.no_grad()
    def values(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Values [B, T] float32 before each masked token, 0 elsewhere."""
        values = torch.zeros(mask.shape, device=mask.device)
        values[mask] = self.head.decode(self.logits(token_ids, mask)).float()
        return values

    def loss(
        self,
        token_ids: Tensor,
        mask: Tensor,
        returns: Tensor,
        old: Tensor | None = None,
        huber: float | None = None,
        clip: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The head's loss on each masked token against returns [B, T]; the values before the update and, for a Gaussian head, the
        spreads, without gradient; each [N]. Values are comparable across heads, losses are not. old [B, T]: the step's first
        values, for `value_loss` with `huber` and `clip`, where the head has squared error and one of them is set."""
        logits = self.logits(token_ids, mask)
        spread = self.head.spread(logits.detach()) if isinstance(self.head, GaussianHead) else None
        if isinstance(self.head, MseHead) and (huber is not None or clip is not None):
            first = None if old is None else old[mask]
            per_token = value_loss(self.head.decode(logits), returns[mask], first, huber, clip)
        else:
            per_token = self.head.loss(logits, returns[mask])
        return per_token, self.head.decode(logits.detach()), spread


def value_loss(values: Tensor, returns: Tensor, old: Tensor | None, huber: float | None, clip: float | None) -> Tensor:
    """Loss [N] of values [N] against returns [N]: with e = R - V, e^2, or under `huber` e^2 / 2 for |e| up to it and
    huber (|e| - huber / 2) beyond. clip: the larger one of that and the loss of old + clamp(V - old, -clip, clip)."""

    def of(error: Tensor) -> Tensor:
        if huber is None:
            return error.square()
        return torch.where(error.abs() <= huber, 0.5 * error.square(), huber * (error.abs() - 0.5 * huber))

    plain = of(returns - values)
    if clip is None:
        return plain
    assert old is not None
    return torch.maximum(plain, of(returns - old - (values - old).clamp(-clip, clip)))
