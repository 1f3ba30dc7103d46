"""PPO's critic: a copy of the policy's backbone with a scalar head (stages/values/heads), or a model that annotate fitted.

Under LoRA, the copy shares the policy's frozen weights and has its own adapters. With `trunk: frozen` the backbone is the frozen
reference's, and only what comes after it is trained (MARFT, arXiv 2504.16129).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stages.agent.logprobs import States, predicting_states
from stages.agent.policy import load_policy
from stages.engine.head import scale_and_cap
from stages.judging.local import LocalJudge
from stages.judging.settings import LocalParams
from stages.seeding import seed_torch
from stages.training.common.adapters import twin
from stages.values.gaussian import GaussianHead
from stages.values.heads import make_head
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
        clip: float | None = None,
        huber: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The head's loss on each masked token against returns [B, T]; the values before the update and, for a Gaussian head, the
        spreads, without gradient; each [N]. Values are comparable across heads, losses are not. huber, clip: of a squared error,
        see `errors` and, around the values `old` [B, T], `clipped_errors`."""
        logits = self.logits(token_ids, mask)
        spread = self.head.spread(logits.detach()) if isinstance(self.head, GaussianHead) else None
        found, values = self.head.decode(logits), self.head.decode(logits.detach())
        if clip is not None and old is not None:
            return clipped_errors(found, old[mask], returns[mask], clip, huber), values, spread
        if huber is not None:
            return errors(found - returns[mask], huber), values, spread
        return self.head.loss(logits, returns[mask]), values, spread


def errors(difference: Tensor, huber: float | None) -> Tensor:
    """e^2 [N]; under `huber` e^2 / 2 for |e| up to it, and huber (|e| - huber / 2) beyond it on both sides."""
    if huber is None:
        return difference.square()
    return torch.where(difference.abs() <= huber, 0.5 * difference.square(), huber * (difference.abs() - 0.5 * huber))


def clipped_errors(values: Tensor, old: Tensor, returns: Tensor, clip: float, huber: float | None = None) -> Tensor:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2), or of these Huber losses (`errors`), each [N]: a value gains
    nothing from moving farther than `clip` from what it was before the update."""
    kept = old + (values - old).clamp(-clip, clip)
    return torch.maximum(errors(values - returns, huber), errors(kept - returns, huber))


def reward_start(folder: Path, options: Sequence[str], scale: float, params: HeadParams, device: str) -> StepValueModel:
    """A critic's start from the reward model in `folder`, whose scalar is l(first option) - l(second option): its backbone, and
    `scale` times the difference of its output layer's rows. Raises ValueError for a model whose logits are capped."""
    policy = load_policy(folder, device=device)
    first, second = LocalJudge(policy, LocalParams(options=list(options)), max_length=1).option_tokens
    factor, cap = scale_and_cap(policy.model.config)
    if cap is not None:
        raise ValueError(f"{folder}: its logits are capped at {cap:g}, so they are not linear; set rl.critic.init to policy")
    layer = policy.model.get_output_embeddings()
    start = StepValueModel(policy.model.base_model.float(), params).to(device)
    with torch.no_grad():
        start.output.weight.copy_(scale * factor * (layer.weight[first] - layer.weight[second]).float())
        if layer.bias is not None:
            start.output.bias.copy_(scale * factor * (layer.bias[first] - layer.bias[second]).float())
    return start.eval()
