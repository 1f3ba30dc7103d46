"""PPO's critic: a copy of the policy's backbone with a scalar head (stages/values/heads), or annotate's step-value model.

Under LoRA, the copy shares the policy's frozen weights and has its own adapters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stages.agent.logprobs import States, predicting_states
from stages.training.common.adapters import twin
from stages.values.gaussian import GaussianHead
from stages.values.heads import make_head
from stages.values.settings import HeadParams, ReturnDistribution
from stages.values.step_value import StepValueModel, check_same_head


class Critic(nn.Module):
    """V of the state before each token, read from the hidden state of the token before it.

    The output layer starts at zero, so every state starts with the head's prior value. `start`: a step-value model to initialise
    backbone and output layer from. Raises ValueError if its head differs. `params`: of a scalar head, or of the Gaussian one of
    DSAC-T, whose targets are samples of the return: with advantage.lam below 1, of the lambda-return.
    """

    def __init__(
        self,
        policy: Any,
        params: HeadParams | ReturnDistribution,
        states: States = predicting_states,
        start: StepValueModel | None = None,
    ) -> None:
        super().__init__()
        self._states = states
        self.backbone = twin(policy.base_model) if start is None else start.backbone
        self.head = make_head(params)
        self.output = nn.Linear(policy.config.hidden_size, self.head.outputs)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)
        if start is not None:
            assert isinstance(params, HeadParams), "refused when params.yaml is checked"
            check_same_head(start, params)
            self.output.load_state_dict(start.output.state_dict())

    def logits(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Head logits [N, outputs] before each masked token of token_ids, mask [B, T]; N masked tokens in row order."""
        return self.output(self._states(self.backbone, token_ids, mask).to(self.output.weight.dtype))

    @torch.no_grad()
    def values(self, token_ids: Tensor, mask: Tensor) -> Tensor:
        """Values [B, T] float32 before each masked token, 0 elsewhere."""
        values = torch.zeros(mask.shape, device=mask.device)
        values[mask] = self.head.decode(self.logits(token_ids, mask)).float()
        return values

    def loss(self, token_ids: Tensor, mask: Tensor, returns: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The head's loss on each masked token against returns [B, T]; the values before the update and, for a Gaussian head, the
        spreads, without gradient; each [N]. Values are comparable across heads, losses are not."""
        logits = self.logits(token_ids, mask)
        spread = self.head.spread(logits.detach()) if isinstance(self.head, GaussianHead) else None
        return self.head.loss(logits, returns[mask]), self.head.decode(logits.detach()), spread
